//! PostgreSQL servers of a test, each in a folder of its own and on a Unix socket, and regions on
//! them.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gw_interface::config::Config;
use gw_local_region::{Listen, Server, Sleep, Starter};
use gw_region::RegionKey;
use gw_store::{KnownRecords, PostgresSettings, PostgresSource, PostgresStore};

use super::process::{self, Running, config_text, gw_gateway};
use crate::support::{eventually, programs};

/// The apex of the regions in tests.
const APEX: &str = "eu1.gw.localhost";

pub(crate) struct Postgres {
    /// Before the folder, which is deleted after the server has ended.
    server: Server,
    folder: tempfile::TempDir,
}

impl Postgres {
    pub(crate) fn start() -> Self {
        let mut postgres = Self::new();
        postgres.initialize();
        postgres.resume();
        postgres
    }

    /// Makes the files of a new database, or copies those that an earlier test has made: that takes
    /// a quarter of the time.
    fn initialize(&self) {
        let version = self.server.version();
        let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("postgres-{version}"));
        if kept.exists() {
            copy(&kept, self.server.data());
            return;
        }
        self.server.initialize(&mut Sleep).unwrap();
        let new = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        copy(self.server.data(), new.path());
        // Another test may have been faster.
        let _ = fs::rename(new.path(), kept);
    }

    /// Starts a standby of `self`.
    pub(crate) fn standby(&self) -> Self {
        let mut standby = Self::new();
        standby.server.copy(&self.server, &mut Sleep).unwrap();
        standby.resume();
        standby
    }

    /// Starts a server with a copy of the database of `self`. It takes changes, on the same
    /// timeline.
    pub(crate) fn copy(&self) -> Self {
        let mut copy = Self::new();
        copy.server.copy(&self.server, &mut Sleep).unwrap();
        fs::remove_file(copy.server.data().join("standby.signal")).unwrap();
        copy.resume();
        copy
    }

    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        // The user of the server enters it.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let starter = Starter::new(gw_gateway().get_program());
        let log = folder.path().join("postgres.log");
        let files = folder.path().join("postgres");
        let server = Server::new(&starter, &files, log, Listen::Socket).unwrap();
        let postgres = Self { server, folder };
        fs::write(postgres.key_file(), "5a".repeat(32)).unwrap();
        fs::set_permissions(postgres.key_file(), fs::Permissions::from_mode(0o600)).unwrap();
        postgres
    }

    /// Path of the server's socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.server.socket()
    }

    /// Starts the server again, and waits until it answers.
    pub(crate) fn resume(&mut self) {
        self.server.start(&mut Sleep).unwrap();
    }

    /// Ends the server and its sessions at once.
    pub(crate) fn stop(&mut self) {
        self.server.abort();
    }

    pub(crate) fn url(&self) -> String {
        self.url_of("postgres")
    }

    pub(crate) fn url_of(&self, database: &str) -> String {
        self.server.url(database)
    }

    /// Process ids of the server and of its children.
    pub(crate) fn processes(&self) -> Vec<u32> {
        let server = self.server.id().unwrap();
        let mut processes = process::children(server);
        processes.push(server);
        processes
    }

    /// Process ids of the sessions of clients; empty if the server does not answer.
    pub(crate) fn sessions(&self) -> Vec<u32> {
        const SESSIONS: &str = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client \
                                backend' AND pid <> pg_backend_pid()";
        let output = self.server.psql(SESSIONS).output().unwrap();
        String::from_utf8(output.stdout)
            .unwrap()
            .lines()
            .filter_map(|line| line.parse().ok())
            .collect()
    }

    /// Runs SQL; returns the rows, with `|` between columns.
    pub(crate) fn sql(&self, sql: &str) -> String {
        let output = run(&mut self.server.psql(sql));
        String::from_utf8(output.stdout)
            .unwrap()
            .trim_end()
            .to_owned()
    }

    /// Runs SQL that fails; returns the error.
    pub(crate) fn fails(&self, sql: &str) -> String {
        let output = self.server.psql(sql).output().unwrap();
        assert!(!output.status.success(), "{sql}");
        String::from_utf8(output.stderr).unwrap()
    }

    /// All stored text, as a backup holds it.
    pub(crate) fn dump(&self) -> String {
        let output = run(self.server.client("pg_dump").arg("postgres"));
        String::from_utf8(output.stdout).unwrap()
    }

    /// PgBouncer in front of the server, on a Unix socket; returns it with its URL. Sessions of
    /// clients share connections to the server if `pool_mode` is `transaction`.
    pub(crate) fn pool(&self, pool_mode: &str) -> (Running, String) {
        let socket = self.socket();
        let socket = socket.parent().unwrap();
        let path = self.folder.path().join(format!("{pool_mode}.ini"));
        let text = format!(
            "[databases]\npostgres = host={} user=gw\n[pgbouncer]\nlisten_addr =\n\
             listen_port = 6432\nunix_socket_dir = {}\nauth_type = any\npool_mode = {pool_mode}\n",
            socket.display(),
            socket.display()
        );
        fs::write(&path, text).unwrap();
        let mut command = self.server.program("/usr/sbin/pgbouncer");
        let process = Running::new(
            command
                .arg("-q")
                .arg(path)
                .stderr(Stdio::null())
                .spawn()
                .unwrap(),
        );
        eventually("PgBouncer listens", || {
            UnixStream::connect(socket.join(".s.PGSQL.6432")).ok()
        });
        (process, self.url().replace("/postgres", ":6432/postgres"))
    }
}

/// The region on a server.
impl Postgres {
    /// Starts a server with the tables of a region; `None` if PostgreSQL is not installed and may
    /// be missing.
    pub(crate) fn with_region() -> Option<Self> {
        if !programs::usable(&["postgresql"]) {
            return None;
        }
        let postgres = Self::start();
        PostgresStore::create(&postgres.source("init")).unwrap();
        Some(postgres)
    }

    /// As [`Self::with_region`], in a cluster of its own: the servers of other functions are copies
    /// of one.
    pub(crate) fn of_another_cluster() -> Self {
        let mut postgres = Self::new();
        postgres.server.initialize(&mut Sleep).unwrap();
        postgres.resume();
        PostgresStore::create(&postgres.source("init")).unwrap();
        postgres
    }

    pub(crate) fn key_file(&self) -> PathBuf {
        self.folder.path().join("region.key")
    }

    pub(crate) fn next_key_file(&self) -> PathBuf {
        self.folder.path().join("next.key")
    }

    /// Makes a next key of the region, which later configurations and sources have.
    pub(crate) fn make_next_key(&self) {
        RegionKey::create(&self.next_key_file()).unwrap();
    }

    /// Makes the next key the only one of later configurations and sources. Returns the file of the
    /// earlier key.
    pub(crate) fn exchange_keys(&self) -> PathBuf {
        let earlier = self.folder.path().join("earlier.key");
        fs::rename(self.key_file(), &earlier).unwrap();
        fs::rename(self.next_key_file(), self.key_file()).unwrap();
        earlier
    }

    pub(crate) fn source(&self, node: &str) -> PostgresSource {
        self.source_at(&self.url(), node)
    }

    pub(crate) fn source_at(&self, url: &str, node: &str) -> PostgresSource {
        PostgresSource {
            settings: PostgresSettings::new(url, None, None).unwrap(),
            apex: APEX.to_owned(),
            keys: self.parsed_config().region_keys().unwrap().unwrap(),
            node: node.to_owned(),
            lock: self.folder.path().join(format!("{node}.lock")),
            known: KnownRecords::default(),
        }
    }

    /// The configuration of a node that is not started, for commands on the database.
    pub(crate) fn parsed_config(&self) -> Config {
        let config = Config::parse(&self.config(Path::new("/nowhere")), |_| None).unwrap();
        assert_eq!(config.region.apex(), APEX);
        config
    }

    /// The configuration of a node on free ports.
    pub(crate) fn config(&self, data_dir: &Path) -> String {
        self.config_at(data_dir, 0)
    }

    /// As [`Self::config`], with this port for callers.
    pub(crate) fn config_at(&self, data_dir: &Path, port: u16) -> String {
        let key = |setting: &str, file: PathBuf| format!("{setting} = \"{}\"\n", file.display());
        let next = self.next_key_file();
        let next = if next.exists() {
            key("region_key_next", next)
        } else {
            String::new()
        };
        let store = self.url();
        format!(
            "{}store = \"{store}\"\n{}{next}",
            config_text(data_dir, port),
            key("region_key", self.key_file())
        )
    }

    /// A proxy in front of the server that can lose replies.
    pub(crate) fn proxy(&self) -> Proxy {
        Proxy::start(self.socket())
    }
}

/// Copies the content of a folder, with its owner and its modes.
fn copy(from: &Path, to: &Path) {
    run(Command::new("cp").arg("-a").arg(from.join(".")).arg(to));
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// Passes bytes between a client over TCP and the server, until it is told to lose replies.
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    loses_replies: Arc<AtomicBool>,
}

impl Proxy {
    fn start(server: PathBuf) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let loses_replies = Arc::<AtomicBool>::default();
        let loses = Arc::clone(&loses_replies);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = UnixStream::connect(&server) else {
                    continue;
                };
                let mut from_client = client.try_clone().unwrap();
                let mut to_client = client;
                let mut to_server = server.try_clone().unwrap();
                let mut from_server = server;
                std::thread::spawn(move || io::copy(&mut from_client, &mut to_server));
                let loses = Arc::clone(&loses);
                std::thread::spawn(move || pass_replies(&mut from_server, &mut to_client, &loses));
            }
        });
        Self {
            address,
            loses_replies,
        }
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
