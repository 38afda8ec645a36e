//! PostgreSQL servers of a test, each in a folder of its own and on a Unix socket.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, geteuid, kill_process};

use crate::support::eventually;
use crate::support::process::Running;

/// The user id of the server, which refuses to run as root.
const SERVER_USER: u32 = 65_534;

pub(super) struct Server {
    /// Before the folder, which is deleted after the server has ended.
    process: Option<Running>,
    folder: tempfile::TempDir,
}

impl Server {
    pub(super) fn start() -> Self {
        let mut server = Self::new();
        let mut initdb = server.program("initdb");
        initdb.args(["-U", "gw", "-A", "trust", "-N", "-E", "UTF8", "--locale=C", "-D"]).arg(server.data());
        run(&mut initdb);
        server.resume();
        server
    }

    /// Starts a standby of `self`.
    pub(super) fn standby(&self) -> Self {
        let mut standby = Self::new();
        let mut backup = standby.program("pg_basebackup");
        backup.arg("-h").arg(self.socket()).args(["-U", "gw", "-R", "-c", "fast", "-D"]).arg(standby.data());
        run(&mut backup);
        standby.resume();
        standby
    }

    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let server = Self { process: None, folder };
        for path in [server.data(), server.socket()] {
            fs::create_dir(&path).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
            if geteuid().is_root() {
                chown(&path, Some(SERVER_USER), Some(SERVER_USER)).unwrap();
            }
        }
        server
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// A program of PostgreSQL. It ends with this test, also if the test is killed.
    fn program(&self, name: &str) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "QUIT"]);
        if geteuid().is_root() {
            command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        }
        command.arg(programs().join(name)).stdin(Stdio::null()).stdout(Stdio::null()).current_dir(self.folder.path());
        command
    }

    /// Starts the server again, and waits until it answers.
    pub(super) fn resume(&mut self) {
        let mut command = self.program("postgres");
        command.arg("-D").arg(self.data()).arg("-k").arg(self.socket()).args(["-c", "listen_addresses="]);
        self.process = Some(Running::new(command.stderr(Stdio::null()).spawn().unwrap()));
        let mut ready = self.program("pg_isready");
        ready.arg("-h").arg(self.socket());
        eventually("PostgreSQL answers", || ready.status().unwrap().success().then_some(()));
    }

    pub(super) fn stop(&mut self) {
        let mut process = self.process.take().unwrap();
        // Ends the processes of its connections, too.
        let id = Pid::from_raw(process.id().try_into().unwrap()).unwrap();
        kill_process(id, Signal::QUIT).unwrap();
        process.exit_code();
    }

    pub(super) fn url(&self) -> String {
        self.url_of("postgres")
    }

    pub(super) fn url_of(&self, database: &str) -> String {
        format!("postgres://gw@{}/{database}", self.socket().display().to_string().replace('/', "%2F"))
    }

    /// Runs SQL; returns the rows, with `|` between columns.
    pub(super) fn sql(&self, sql: &str) -> String {
        let mut command = self.program("psql");
        command.arg("-h").arg(self.socket()).args(["-U", "gw", "-d", "postgres", "-XAtqc", sql]);
        String::from_utf8(run(command.stdout(Stdio::piped())).stdout).unwrap().trim_end().to_owned()
    }

    /// A proxy that passes everything but notifications, as a pool of connections between transactions does.
    pub(super) fn pool(&self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, server) = (listener.local_addr().unwrap(), self.socket().join(".s.PGSQL.5432"));
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = UnixStream::connect(&server) else { continue };
                let (mut from_client, mut to_server) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                std::thread::spawn(move || std::io::copy(&mut from_client, &mut to_server));
                std::thread::spawn(move || without_notifications(server, client));
            }
        });
        address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.process.is_some() {
            self.stop();
        }
    }
}

/// Passes messages of the server (PostgreSQL 15, §55.7) but for NotificationResponse.
fn without_notifications(mut server: UnixStream, mut client: TcpStream) -> std::io::Result<()> {
    loop {
        let mut head = [0; 5];
        server.read_exact(&mut head)?;
        let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
        let mut body = vec![0; length - 4];
        server.read_exact(&mut body)?;
        if head[0] != b'A' {
            client.write_all(&head)?;
            client.write_all(&body)?;
        }
    }
}

fn run(command: &mut Command) -> Output {
    let output = command.stderr(Stdio::piped()).output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

/// The folder of the newest installed server's programs.
fn programs() -> PathBuf {
    let versions = fs::read_dir("/usr/lib/postgresql").expect("PostgreSQL is installed: ./test --setup");
    let version = |path: &Path| path.file_name()?.to_str()?.parse::<u32>().ok();
    let newest = versions.map(|entry| entry.unwrap().path()).max_by_key(|path| version(path));
    newest.unwrap().join("bin")
}
