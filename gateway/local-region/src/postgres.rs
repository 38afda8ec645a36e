//! A PostgreSQL server in a folder of its own.

use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use gw_shared::files;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::folder::temporary;
use crate::part::{Part, Starter, wait_for_end, without_variables_of_postgres};
use crate::programs::{self, Programs};
use crate::{Error, User, Wait};

/// User of the database, with all rights. The folder of the socket keeps other users of the machine
/// out.
const USER: &str = "gw";
/// Name of the socket in its folder.
const SOCKET: &str = ".s.PGSQL.5432";
/// Longest path of a Unix socket (unix(7)), without the byte zero at its end.
const SOCKET_PATH_MAX: usize = 107;
const READY_WITHIN: Duration = Duration::from_secs(60);
const STOP_WITHIN: Duration = Duration::from_secs(10);

/// Where a server takes connections.
#[derive(Debug, Clone, Copy)]
pub enum Listen {
    /// On a Unix socket only.
    Socket,
    /// On all addresses of its machine. Its clients know it by this one.
    Addresses(Ipv4Addr),
}

/// A server. A drop ends it at once.
pub struct Server {
    starter: Starter,
    programs: Programs,
    /// `None` if the user of this process runs it.
    user: Option<User>,
    data: PathBuf,
    /// Folder of the socket.
    socket: PathBuf,
    listen: Listen,
    log: PathBuf,
    /// `None` while it does not run.
    part: Option<Part>,
    /// Folder of the socket, if the path of the data folder is too long for it.
    _temporary: Option<TempDir>,
}

impl Server {
    /// A server with its files in `folder`, which does not run yet.
    pub fn new(
        starter: &Starter,
        folder: &Path,
        log: PathBuf,
        listen: Listen,
    ) -> Result<Self, Error> {
        let user = programs::user();
        let data = folder.join("data");
        let path = std::env::var_os("PATH").unwrap_or_default();
        let programs = Programs::find(
            &path,
            Path::new(programs::INSTALLED),
            version_of_files(&data),
        )?;
        create(folder, user.map(|_| 0o711))?;
        let (socket, temporary) = socket_folder(folder)?;
        for path in [&data, &socket] {
            create(path, None)?;
            if let Some(User { id, group }) = user {
                chown(path, Some(id), Some(group)).map_err(Error::io(path.display()))?;
            }
        }
        Ok(Self {
            starter: starter.clone(),
            programs,
            user,
            data,
            socket,
            listen,
            log,
            part: None,
            _temporary: temporary,
        })
    }

    /// Makes the files of a new database, unless there are some.
    pub fn initialize(&self, wait: &mut impl Wait) -> Result<(), Error> {
        if version_of_files(&self.data).is_some() {
            return Ok(());
        }
        let mut command = self.program("initdb");
        let access = ["-U", USER, "-A", "trust"];
        let format = ["-N", "-E", "UTF8", "--locale=C"];
        command.args(access).args(format).arg("-D").arg(&self.data);
        // After SIGINT it removes what it has made.
        let part = Part::start("initdb", &mut command, &self.log, None)?;
        let part = part.with_signals(Signal::INT, Signal::INT);
        let Err(error) = succeed(part, "initdb makes a database", wait) else {
            return Ok(());
        };
        let (Error::Ended { .. }, Some(User { id, .. })) = (&error, self.user) else {
            return Err(error);
        };
        Err(Error::Postgres(format!(
            "{error}\nPostgreSQL does not run as root, so the user with the id {id} runs it. That \
             user must be able to enter the data folder and all folders above: give another \
             --data-dir, or run the demo as another user"
        )))
    }

    /// Makes a copy of the files of `primary`, which it follows as a standby.
    pub fn copy(&self, primary: &Self, wait: &mut impl Wait) -> Result<(), Error> {
        let mut command = self.program("pg_basebackup");
        command.arg("-h").arg(primary.host());
        command
            .args(["-U", USER, "-R", "-c", "fast", "-D"])
            .arg(&self.data);
        let part = Part::start("pg_basebackup", &mut command, &self.log, None)?;
        succeed(part, "pg_basebackup copies a database", wait)
    }

    /// Starts the server. It takes connections when this returns.
    pub fn start(&mut self, wait: &mut impl Wait) -> Result<(), Error> {
        let mut command = self.program("postgres");
        command.arg("-D").arg(&self.data).args(["-p", "5432"]);
        match self.listen {
            Listen::Socket => {
                command.arg("-k").arg(&self.socket);
                command.args(["-c", "listen_addresses="]);
            }
            Listen::Addresses(_) => {
                command.args(["-c", "listen_addresses=*", "-c", "unix_socket_directories="]);
                command.args(["-c", "shared_buffers=16MB", "-c", "log_min_messages=fatal"]);
            }
        }
        let name = format!("PostgreSQL {}", self.programs.version);
        let part = Part::start(&name, &mut command, &self.log, None)?;
        // The fast and the immediate shutdown.
        let part = self
            .part
            .insert(part.with_signals(Signal::INT, Signal::QUIT));
        wait.until("PostgreSQL takes connections", READY_WITHIN, || {
            part.expect_running()?;
            Ok(is_ready(&self.data, part.id()).then_some(()))
        })
    }

    /// URL of a database, without a password.
    pub fn url(&self, database: &str) -> String {
        let host = self.host();
        let host = utf8_percent_encode(&host, NON_ALPHANUMERIC);
        format!("postgres://{USER}@{host}/{database}")
    }

    /// Folder of the socket, or address.
    fn host(&self) -> String {
        match self.listen {
            Listen::Socket => self.socket.to_string_lossy().into_owned(),
            Listen::Addresses(address) => address.to_string(),
        }
    }

    /// Path of the socket.
    pub fn socket(&self) -> PathBuf {
        self.socket.join(SOCKET)
    }

    /// Major version of the server.
    pub fn version(&self) -> u32 {
        self.programs.version
    }

    /// Folder of the database's files.
    pub fn data(&self) -> &Path {
        &self.data
    }

    /// Id of the process, while it runs.
    pub fn id(&self) -> Option<u32> {
        self.part.as_ref().map(Part::id)
    }

    /// The process, while it runs.
    pub fn part(&mut self) -> Option<&mut Part> {
        self.part.as_mut()
    }

    /// The command that runs a program as the server's user: one of PostgreSQL's by its name,
    /// another one by its path.
    pub fn program(&self, name: &str) -> Command {
        self.starter.program(self.user, &self.programs.path(name))
    }

    /// The command that runs one of PostgreSQL's clients as the user of this process.
    pub fn client(&self, name: &str) -> Command {
        let mut command = Command::new(self.programs.path(name));
        without_variables_of_postgres(&mut command);
        command.args(["-h", &self.host(), "-U", USER]);
        command
    }

    /// The command that runs SQL, and prints rows with `|` between columns.
    pub fn psql(&self, sql: &str) -> Command {
        let mut command = self.client("psql");
        command.args(["-d", "postgres", "-XAtqc", sql]);
        command
    }

    /// Stops the server. Its clients must have ended.
    pub fn stop(&mut self, wait: &mut impl Wait) -> Result<(), Error> {
        let Some(mut part) = self.part.take() else {
            return Ok(());
        };
        part.stop();
        wait_for_end(wait, vec![part], STOP_WITHIN)
    }

    /// Ends the server and its sessions at once.
    pub fn abort(&mut self) {
        self.part = None;
    }
}

/// Waits until a program has succeeded.
fn succeed(mut part: Part, what: &'static str, wait: &mut impl Wait) -> Result<(), Error> {
    wait.until(what, READY_WITHIN, || Ok((!part.runs()).then_some(())))?;
    part.expect_success()
}

/// The major version of the server that made the files in a folder; `None` without files.
fn version_of_files(data: &Path) -> Option<u32> {
    let text = fs::read_to_string(data.join("PG_VERSION")).ok()?;
    text.trim().parse().ok()
}

/// Whether the server of this process id takes connections, as it says itself in the file that
/// `pg_ctl` reads, too.
fn is_ready(data: &Path, id: u32) -> bool {
    let text = fs::read_to_string(data.join("postmaster.pid")).unwrap_or_default();
    let mut lines = text.lines().map(str::trim);
    // An earlier server may have left the file.
    lines.next() == Some(&id.to_string()) && lines.nth(6) == Some("ready")
}

/// Creates a folder that only its owner can enter, and gives it `mode` if there is one.
fn create(path: &Path, mode: Option<u32>) -> Result<(), Error> {
    let set = |mode| fs::set_permissions(path, fs::Permissions::from_mode(mode));
    let created: io::Result<()> =
        files::create_private_dir(path).and_then(|()| mode.map_or(Ok(()), set));
    created.map_err(Error::io(path.display()))
}

/// A folder for the socket in `folder`, or a temporary one if that path would be too long.
fn socket_folder(folder: &Path) -> Result<(PathBuf, Option<TempDir>), Error> {
    let socket = folder.join("socket");
    if socket.join(SOCKET).as_os_str().len() <= SOCKET_PATH_MAX {
        return Ok((socket, None));
    }
    let temporary = temporary()?;
    Ok((temporary.path().to_owned(), Some(temporary)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_socket_of_a_long_data_folder_is_elsewhere() {
        let (socket, temporary) = socket_folder(Path::new("/tmp/demo/postgres")).unwrap();
        assert_eq!(
            (socket, temporary.is_none()),
            (PathBuf::from("/tmp/demo/postgres/socket"), true)
        );
        let long = PathBuf::from(format!("/tmp/{}", "x".repeat(90)));
        let (socket, temporary) = socket_folder(&long).unwrap();
        assert_eq!(socket, temporary.unwrap().path());
        assert!(socket.join(SOCKET).as_os_str().len() <= SOCKET_PATH_MAX);
    }
}
