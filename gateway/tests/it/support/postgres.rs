//! A PostgreSQL server of its own for a test, reached over a Unix socket.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gw_gateway::config::{Config, StoreSettings};
use gw_gateway::hostname::Region;
use gw_gateway::region::RegionKey;
use gw_gateway::store::{PostgresSettings, PostgresSource, PostgresStore, StoreError};

use super::eventually;
use super::process::{config_text, send_signal};

/// The user "nobody": the server refuses to run as root.
const NOBODY: u32 = 65_534;

/// A running server. It is killed on drop.
pub(crate) struct Postgres {
    folder: tempfile::TempDir,
    server: Option<Child>,
}

impl Postgres {
    /// Starts an empty server.
    pub(crate) fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        for name in ["data", "socket"] {
            fs::create_dir(folder.path().join(name)).unwrap();
            if is_root() {
                chown(folder.path().join(name), Some(NOBODY), Some(NOBODY)).unwrap();
            }
        }
        fs::write(folder.path().join("region.key"), "5a".repeat(32)).unwrap();
        fs::set_permissions(folder.path().join("region.key"), fs::Permissions::from_mode(0o600)).unwrap();
        let mut postgres = Self { folder, server: None };
        let made =
            postgres.command("initdb").args(["-U", "gw", "-A", "trust", "-N", "-E", "UTF8", "--locale=C"]).output();
        let made = made.unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        postgres.resume();
        postgres
    }

    /// Starts a server with the tables of a region.
    pub(crate) fn with_region() -> Self {
        let postgres = Self::start();
        PostgresStore::create(&postgres.source("init")).unwrap();
        postgres
    }

    fn command(&self, program: &str) -> Command {
        // The server ends with this process, even if a signal kills it.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]);
        if is_root() {
            let id = NOBODY.to_string();
            command.args(["--reuid", &id, "--regid", &id, "--clear-groups"]);
        }
        command.arg(programs().join(program)).arg("-D").arg(self.path("data"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn url(&self) -> String {
        let socket = self.path("socket").display().to_string().replace('/', "%2F");
        format!("postgres://gw@{socket}/postgres")
    }

    pub(crate) fn key_file(&self) -> PathBuf {
        self.path("region.key")
    }

    pub(crate) fn source(&self, node: &str) -> PostgresSource {
        self.source_at(&self.url(), node)
    }

    pub(crate) fn source_at(&self, url: &str, node: &str) -> PostgresSource {
        PostgresSource {
            settings: PostgresSettings::new(url, None, None).unwrap(),
            apex: "eu1.gw.localhost".to_owned(),
            key: RegionKey::load(&self.key_file()).unwrap(),
            node: node.to_owned(),
            lock: self.path(&format!("{node}.lock")),
        }
    }

    /// The configuration of a node on free ports.
    pub(crate) fn config(&self, data_dir: &Path) -> Config {
        let mut config = Config::parse(&config_text(data_dir, 0), |_| None).unwrap();
        assert_eq!(config.region, Region::new("eu1", "gw.localhost"));
        config.store = StoreSettings::Postgres(self.source("node").settings);
        config.region_key = Some(self.key_file());
        config
    }

    /// The configuration of [`Self::config`] as text.
    pub(crate) fn config_text(&self, data_dir: &Path) -> String {
        let key = self.key_file();
        format!("{}store = \"{}\"\nregion_key = \"{}\"\n", config_text(data_dir, 0), self.url(), key.display())
    }

    /// Ends the server as a crash does.
    pub(crate) fn crash(&mut self) {
        let mut server = self.server.take().unwrap();
        // SIGQUIT also ends the processes of its connections.
        rustix::process::kill_process(pid(&server), rustix::process::Signal::QUIT).unwrap();
        server.wait().unwrap();
    }

    /// Starts the server again, and waits until it answers.
    pub(crate) fn resume(&mut self) {
        let mut command = self.command("postgres");
        command.arg("-k").arg(self.path("socket")).args(["-c", "listen_addresses=", "-F"]);
        self.server = Some(command.stderr(Stdio::null()).spawn().unwrap());
        let mut store = PostgresStore::new(&self.source("wait")).unwrap();
        eventually("PostgreSQL answers", || (!matches!(store.check(), Err(StoreError::Unavailable(_)))).then_some(()));
    }

    /// Runs SQL with psql; returns the rows, columns separated by `|`.
    pub(crate) fn sql(&self, sql: &str) -> String {
        let mut command = Command::new(programs().join("psql"));
        command.arg("-h").arg(self.path("socket")).args(["-U", "gw", "-d", "postgres", "-XAtqc", sql]);
        let output = command.stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
    }

    /// All stored text, as a backup holds it.
    pub(crate) fn dump(&self) -> String {
        let mut command = Command::new(programs().join("pg_dump"));
        let output = command.arg("-h").arg(self.path("socket")).args(["-U", "gw", "postgres"]).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    }

    /// A proxy in front of the server.
    pub(crate) fn proxy(&self) -> Proxy {
        Proxy::start(self.path("socket").join(".s.PGSQL.5432"))
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        if let Some(server) = &self.server {
            // A stopped server handles the signal when it continues.
            send_signal(server.id(), "CONT");
        }
        if self.server.is_some() {
            self.crash();
        }
    }
}

fn pid(child: &Child) -> rustix::process::Pid {
    rustix::process::Pid::from_child(child)
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The folder of the newest installed server's programs.
fn programs() -> PathBuf {
    let versions = fs::read_dir("/usr/lib/postgresql").expect("PostgreSQL is installed: ./test --setup");
    let newest = versions
        .map(|version| version.unwrap().path())
        .max_by_key(|path| path.file_name().and_then(|name| name.to_str()?.parse::<u32>().ok()));
    newest.unwrap().join("bin")
}

/// Passes bytes between a client over TCP and the server, until it is told to lose replies.
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    loses_replies: Arc<AtomicBool>,
}

impl Proxy {
    fn start(server: PathBuf) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, loses_replies) = (listener.local_addr().unwrap(), Arc::<AtomicBool>::default());
        let loses = Arc::clone(&loses_replies);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = UnixStream::connect(&server) else { continue };
                let (mut from_client, mut to_client) = (client.try_clone().unwrap(), client);
                let (mut to_server, mut from_server) = (server.try_clone().unwrap(), server);
                std::thread::spawn(move || io::copy(&mut from_client, &mut to_server));
                let loses = Arc::clone(&loses);
                std::thread::spawn(move || pass_replies(&mut from_server, &mut to_client, &loses));
            }
        });
        Self { address, loses_replies }
    }

    pub(crate) fn url(&self) -> String {
        format!("postgres://gw@{}/postgres", self.address)
    }

    /// Closes the connection in place of the next reply. Later connections work.
    pub(crate) fn lose_the_next_reply(&self) {
        self.loses_replies.store(true, Ordering::SeqCst);
    }

    /// Whether a reply is still to be lost.
    pub(crate) fn has_lost_none(&self) -> bool {
        self.loses_replies.load(Ordering::SeqCst)
    }
}

fn pass_replies(from: &mut UnixStream, to: &mut TcpStream, loses: &AtomicBool) -> io::Result<()> {
    let mut buffer = [0; 16 * 1024];
    loop {
        let received = from.read(&mut buffer)?;
        if received == 0 || loses.swap(false, Ordering::SeqCst) {
            return to.shutdown(std::net::Shutdown::Both);
        }
        to.write_all(&buffer[..received])?;
    }
}
