//! PostgreSQL servers of a test, each in a folder of its own and on a Unix socket, and regions on them.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, Signal, geteuid, kill_process};

use gw_gateway::config::{Config, StoreSettings};
use gw_gateway::region::RegionKey;
use gw_gateway::store::{KnownRecords, PostgresSettings, PostgresSource, PostgresStore};

use super::eventually;
use super::process::{Running, config_text};
use super::programs;

/// The apex of the regions in tests.
const APEX: &str = "eu1.gw.localhost";

/// The user id of the server, which refuses to run as root.
const SERVER_USER: u32 = 65_534;

pub(crate) struct Postgres {
    /// Before the folder, which is deleted after the server has ended.
    process: Option<Running>,
    folder: tempfile::TempDir,
}

impl Postgres {
    pub(crate) fn start() -> Self {
        let mut server = Self::new();
        let mut initdb = server.program("initdb");
        initdb
            .args([
                "-U",
                "gw",
                "-A",
                "trust",
                "-N",
                "-E",
                "UTF8",
                "--locale=C",
                "-D",
            ])
            .arg(server.data());
        run(&mut initdb);
        server.resume();
        server
    }

    /// Starts a standby of `self`.
    pub(crate) fn standby(&self) -> Self {
        let mut standby = Self::new();
        let mut backup = standby.program("pg_basebackup");
        backup
            .arg("-h")
            .arg(self.socket())
            .args(["-U", "gw", "-R", "-c", "fast", "-D"])
            .arg(standby.data());
        run(&mut backup);
        standby.resume();
        standby
    }

    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let server = Self {
            process: None,
            folder,
        };
        fs::write(server.key_file(), "5a".repeat(32)).unwrap();
        fs::set_permissions(server.key_file(), fs::Permissions::from_mode(0o600)).unwrap();
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

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// A program of PostgreSQL. It ends with this test, also if the test is killed.
    fn program(&self, name: &str) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "QUIT"]);
        if geteuid().is_root() {
            command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        }
        command
            .arg(folder_of_programs().join(name))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .current_dir(self.folder.path());
        command
    }

    /// Starts the server again, and waits until it answers.
    pub(crate) fn resume(&mut self) {
        let mut command = self.program("postgres");
        command
            .arg("-D")
            .arg(self.data())
            .arg("-k")
            .arg(self.socket())
            .args(["-c", "listen_addresses="]);
        self.process = Some(Running::new(command.stderr(Stdio::null()).spawn().unwrap()));
        let mut ready = self.program("pg_isready");
        ready.arg("-h").arg(self.socket());
        eventually("PostgreSQL answers", || {
            ready.status().unwrap().success().then_some(())
        });
    }

    pub(crate) fn stop(&mut self) {
        let mut process = self.process.take().unwrap();
        // Ends the processes of its connections, too.
        let id = Pid::from_raw(process.id().try_into().unwrap()).unwrap();
        kill_process(id, Signal::QUIT).unwrap();
        process.exit_code();
    }

    pub(crate) fn url(&self) -> String {
        self.url_of("postgres")
    }

    pub(crate) fn url_of(&self, database: &str) -> String {
        format!(
            "postgres://gw@{}/{database}",
            self.socket().display().to_string().replace('/', "%2F")
        )
    }

    /// Process ids of the server and of its children.
    pub(crate) fn processes(&self) -> Vec<u32> {
        let server = self.process.as_ref().unwrap().id();
        let children =
            fs::read_to_string(format!("/proc/{server}/task/{server}/children")).unwrap();
        children
            .split(' ')
            .filter_map(|id| id.parse().ok())
            .chain([server])
            .collect()
    }

    /// Process ids of the sessions of clients; empty if the server does not answer.
    pub(crate) fn sessions(&self) -> Vec<u32> {
        const SESSIONS: &str = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()";
        let mut command = self.program("psql");
        command
            .arg("-h")
            .arg(self.socket())
            .args(["-U", "gw", "-d", "postgres", "-XAtqc", SESSIONS]);
        let output = command
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .output()
            .unwrap();
        String::from_utf8(output.stdout)
            .unwrap()
            .lines()
            .filter_map(|line| line.parse().ok())
            .collect()
    }

    /// Runs SQL; returns the rows, with `|` between columns.
    pub(crate) fn sql(&self, sql: &str) -> String {
        let mut command = self.program("psql");
        command
            .arg("-h")
            .arg(self.socket())
            .args(["-U", "gw", "-d", "postgres", "-XAtqc", sql]);
        String::from_utf8(run(command.stdout(Stdio::piped())).stdout)
            .unwrap()
            .trim_end()
            .to_owned()
    }

    /// Runs SQL that fails; returns the error.
    pub(crate) fn fails(&self, sql: &str) -> String {
        let mut command = self.program("psql");
        command
            .arg("-h")
            .arg(self.socket())
            .args(["-U", "gw", "-d", "postgres", "-XAtqc", sql]);
        let output = command.output().unwrap();
        assert!(!output.status.success(), "{sql}");
        String::from_utf8(output.stderr).unwrap()
    }

    /// All stored text, as a backup holds it.
    pub(crate) fn dump(&self) -> String {
        let mut command = self.program("pg_dump");
        command
            .arg("-h")
            .arg(self.socket())
            .args(["-U", "gw", "postgres"]);
        String::from_utf8(run(command.stdout(Stdio::piped())).stdout).unwrap()
    }

    /// PgBouncer in front of the server, on a Unix socket; returns it with its URL. Sessions of clients share connections to
    /// the server if `pool_mode` is `transaction`.
    pub(crate) fn pool(&self, pool_mode: &str) -> (Running, String) {
        let socket = self.socket();
        let path = self.folder.path().join(format!("{pool_mode}.ini"));
        let text = format!(
            "[databases]\npostgres = host={} user=gw\n[pgbouncer]\nlisten_addr =\nlisten_port = 6432\n\
             unix_socket_dir = {}\nauth_type = any\npool_mode = {pool_mode}\n",
            socket.display(),
            socket.display()
        );
        fs::write(&path, text).unwrap();
        let mut command = self.program("/usr/sbin/pgbouncer");
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
    /// Starts a server with the tables of a region; `None` if PostgreSQL is not installed and may be missing.
    pub(crate) fn with_region() -> Option<Self> {
        if !programs::usable(&["postgresql"]) {
            return None;
        }
        let postgres = Self::start();
        PostgresStore::create(&postgres.source("init")).unwrap();
        Some(postgres)
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

    /// Makes the next key the only one of later configurations and sources. Returns the file of the earlier key.
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
            keys: self
                .config(Path::new("/nowhere"))
                .region_keys()
                .unwrap()
                .unwrap(),
            node: node.to_owned(),
            lock: self.folder.path().join(format!("{node}.lock")),
            known: KnownRecords::default(),
        }
    }

    /// The configuration of a node on free ports.
    pub(crate) fn config(&self, data_dir: &Path) -> Config {
        let mut config = Config::parse(&config_text(data_dir, 0), |_| None).unwrap();
        assert_eq!(config.region.apex(), APEX);
        config.store =
            StoreSettings::Postgres(PostgresSettings::new(&self.url(), None, None).unwrap());
        config.region_key = Some(self.key_file());
        config.region_key_next = Some(self.next_key_file()).filter(|file| file.exists());
        config
    }

    /// The configuration of [`Self::config`] as text.
    pub(crate) fn config_text(&self, data_dir: &Path) -> String {
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
            config_text(data_dir, 0),
            key("region_key", self.key_file())
        )
    }

    /// A proxy in front of the server that can lose replies.
    pub(crate) fn proxy(&self) -> Proxy {
        Proxy::start(self.socket().join(".s.PGSQL.5432"))
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        if self.process.is_some() {
            self.stop();
        }
    }
}

fn run(command: &mut Command) -> Output {
    let output = command.stderr(Stdio::piped()).output().unwrap();
    assert!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// The folder of the newest installed server's programs.
fn folder_of_programs() -> PathBuf {
    let versions =
        fs::read_dir("/usr/lib/postgresql").expect("PostgreSQL is installed: ./test --setup");
    let version = |path: &Path| path.file_name()?.to_str()?.parse::<u32>().ok();
    let newest = versions
        .map(|entry| entry.unwrap().path())
        .max_by_key(|path| version(path));
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
