//! A PostgreSQL server in the data folder of a demo. It listens on a Unix socket only.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use gw_shared::files;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use rustix::process::Signal;

use super::NodesError;
use super::events::Events;
use super::part::{self, Part, User, wait_for_end};
use super::programs::{self, Programs};
use crate::control::node_name;
use crate::store::{PostgresInspector, PostgresSettings};

/// User of the database, with all rights. The folder of the socket keeps other users of the machine out.
const USER: &str = "gw";
const DATABASE: &str = "postgres";
/// Name of the socket in its folder.
const SOCKET: &str = ".s.PGSQL.5432";
/// Longest path of a Unix socket (unix(7)), without the byte zero at its end.
const SOCKET_PATH_MAX: usize = 107;
const READY_WITHIN: Duration = Duration::from_secs(60);
const STOP_WITHIN: Duration = Duration::from_secs(10);

pub(super) struct Server {
    part: Part,
    socket: PathBuf,
    /// Folder of the socket, if the path of the data folder is too long for it.
    _temporary: Option<tempfile::TempDir>,
}

impl Server {
    /// Starts the server. It takes connections when this returns.
    pub(super) fn start(data_dir: &Path, events: &mut Events) -> Result<Self, NodesError> {
        let folder = data_dir.join("postgres");
        let user = programs::user();
        let data = folder.join("data");
        let wanted = fs::read_to_string(data.join("PG_VERSION"))
            .ok()
            .and_then(|text| text.trim().parse().ok());
        let path = std::env::var_os("PATH").unwrap_or_default();
        let programs = Programs::find(&path, Path::new(programs::INSTALLED), wanted)?;
        create(&folder, user.map(|_| 0o711))?;
        let (socket, temporary) = socket_folder(&folder)?;
        for path in [&data, &socket] {
            create(path, None)?;
            if let Some(User { id, group }) = user {
                chown(path, Some(id), Some(group)).map_err(NodesError::io(path.display()))?;
            }
        }
        let log = data_dir.join("postgres.log");
        part::new_log(&log)?;
        if wanted.is_none() {
            initialize(&programs, &data, &log, user, events)?;
        }
        let mut command = command(user)?;
        command
            .arg(programs.postgres())
            .arg("-D")
            .arg(&data)
            .arg("-k")
            .arg(&socket);
        command.args(["-p", "5432", "-c", "listen_addresses="]);
        let part = Part::start(
            &format!("PostgreSQL {}", programs.version),
            &mut command,
            &log,
            None,
        )?;
        // The fast and the immediate shutdown.
        let part = part.with_signals(Signal::INT, Signal::QUIT);
        let mut server = Self {
            part,
            socket,
            _temporary: temporary,
        };
        server.wait_until_ready(events)?;
        Ok(server)
    }

    fn wait_until_ready(&mut self, events: &mut Events) -> Result<(), NodesError> {
        let settings = PostgresSettings::new(&self.url(), None, None);
        let settings =
            settings.map_err(|error| NodesError::Postgres(format!("{}: {error}", self.url())))?;
        events.until("PostgreSQL takes connections", READY_WITHIN, || {
            self.part.expect_running()?;
            Ok(PostgresInspector::connect(&settings, &node_name()).ok())
        })?;
        Ok(())
    }

    /// URL of the database, without a password.
    pub(super) fn url(&self) -> String {
        let folder = self.socket.to_string_lossy();
        format!(
            "postgres://{USER}@{}/{DATABASE}",
            utf8_percent_encode(&folder, NON_ALPHANUMERIC)
        )
    }

    pub(super) fn part(&mut self) -> &mut Part {
        &mut self.part
    }

    /// Stops the server. The nodes must have ended.
    pub(super) fn stop(mut self, events: &mut Events) -> Result<(), NodesError> {
        self.part.stop();
        wait_for_end(events, vec![self.part], STOP_WITHIN)
    }
}

/// Makes the files of a new database.
fn initialize(
    programs: &Programs,
    data: &Path,
    log: &Path,
    user: Option<User>,
    events: &mut Events,
) -> Result<(), NodesError> {
    let mut command = command(user)?;
    command
        .arg(programs.initdb())
        .args([
            "-U",
            USER,
            "-A",
            "trust",
            "-N",
            "-E",
            "UTF8",
            "--locale=C",
            "-D",
        ])
        .arg(data);
    // After SIGINT it removes what it has made.
    let mut part =
        Part::start("initdb", &mut command, log, None)?.with_signals(Signal::INT, Signal::INT);
    events.until("initdb makes a database", READY_WITHIN, || {
        Ok((!part.runs()).then_some(()))
    })?;
    let Err(error) = part.expect_success() else {
        return Ok(());
    };
    let advice = user.map_or_else(String::new, |User { id, .. }| {
        format!(
            "\nPostgreSQL does not run as root, so the user with the id {id} runs it. That user must be able to enter \
             the data folder and all folders above: give another --data-dir, or run the demo as another user"
        )
    });
    Err(NodesError::Postgres(format!("{error}{advice}")))
}

/// The command that runs a program of PostgreSQL, which follows as its next argument.
fn command(user: Option<User>) -> Result<std::process::Command, NodesError> {
    let mut command = part::command("program")?;
    if let Some(User { id, group }) = user {
        command.args(["--user", &id.to_string(), "--group", &group.to_string()]);
    }
    for (name, _) in
        std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("PG"))
    {
        command.env_remove(name);
    }
    // The user of the server may not be allowed to enter the folder of this process.
    command.arg("--").env("LC_ALL", "C").current_dir("/");
    Ok(command)
}

/// Creates a folder that only its owner can enter, and gives it `mode` if there is one.
fn create(path: &Path, mode: Option<u32>) -> Result<(), NodesError> {
    let set = |mode| fs::set_permissions(path, fs::Permissions::from_mode(mode));
    let created: io::Result<()> =
        files::create_private_dir(path).and_then(|()| mode.map_or(Ok(()), set));
    created.map_err(NodesError::io(path.display()))
}

/// A folder for the socket in `folder`, or a temporary one if that path would be too long.
fn socket_folder(folder: &Path) -> Result<(PathBuf, Option<tempfile::TempDir>), NodesError> {
    let socket = folder.join("socket");
    if socket.join(SOCKET).as_os_str().len() <= SOCKET_PATH_MAX {
        return Ok((socket, None));
    }
    let temporary = tempfile::Builder::new().prefix("gw-demo-").tempdir();
    let temporary = temporary.map_err(NodesError::io(std::env::temp_dir().display()))?;
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
