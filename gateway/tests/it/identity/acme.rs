//! Certificates of an ACME authority: the first one, renewal, an authority that is away, kills, and
//! proofs in handshakes.

mod authority_away;
mod files;
mod other_processes;
mod passage;
mod rate_limits;
mod renewal_info;
mod renewals;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::crypto::aws_lc_rs;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, ServerName};
use serde_json::Value;

use crate::support::acme_front::Front;
use crate::support::acme_servers::free_address;
use crate::support::acme_servers::named::{KEY_NAME, Named};
use crate::support::acme_servers::pebble::{Options, Pebble};
use crate::support::eventually;
use crate::support::processes::process::{Running, Served, gw_gateway, serve, serve_command};
use crate::support::processes::region::Region;
use crate::support::programs::usable;

const PROGRAMS: [&str; 3] = ["pebble", "named", "curl"];
const APEX: &str = "eu1.example.test";
const TENANT: &str = "acme--api.eu1.example.test";
const PATH: &str = "/.well-known/jwks.json";
/// Longest time from the start with an empty data folder to the first answer with a certificate of
/// the authority.
const FIRST_WITHIN: Duration = Duration::from_secs(10);
/// Longest time from the return of the authority to a renewed certificate.
const RENEWED_WITHIN: Duration = Duration::from_secs(60);

/// An authority, its DNS server, and the configuration of a gateway that uses both.
struct Prepared {
    folder: tempfile::TempDir,
    named: Named,
    pebble: Pebble,
}

impl Prepared {
    /// `None` without the programs.
    fn new() -> Option<Self> {
        Self::with(0, |_| {}, "")
    }

    /// A gateway that proves its apex in handshakes. It listens on `port`, and the authority
    /// connects to `tls_port`.
    fn with_handshakes(port: u16, tls_port: u16) -> Option<Self> {
        let challenge = "challenge = \"tls-alpn\"\n";
        Self::with(port, |options| options.tls_port = tls_port, challenge)
    }

    /// A gateway that listens on `port`. `challenge` replaces the DNS updates.
    fn with(port: u16, adjust: impl FnOnce(&mut Options), challenge: &str) -> Option<Self> {
        if !usable(&PROGRAMS) {
            return None;
        }
        let named = Named::start("eu1 A 127.0.0.1");
        let mut options = Options::new(named.address);
        adjust(&mut options);
        let pebble = Pebble::start(options);
        let directory = pebble.directory();
        Some(Self::at(named, pebble, &directory, port, challenge))
    }

    /// A gateway whose requests to the authority go through a front.
    fn with_front() -> Option<(Self, Front)> {
        Self::with_front_at(0)
    }

    /// As [`Self::with_front`]. The gateway listens on `port`, and the authority connects there.
    fn with_front_at(port: u16) -> Option<(Self, Front)> {
        if !usable(&PROGRAMS) {
            return None;
        }
        let named = Named::start("eu1 A 127.0.0.1\n*.eu1 A 127.0.0.1");
        let mut options = Options::new(named.address);
        options.tls_port = port;
        let pebble = Pebble::start(options);
        let front = Front::start(&pebble);
        let prepared = Self::at(named, pebble, &front.directory(), port, "");
        Some((prepared, front))
    }

    /// A gateway that uses the authority with this directory.
    fn at(named: Named, pebble: Pebble, directory: &str, port: u16, challenge: &str) -> Self {
        let prepared = Self {
            folder: tempfile::tempdir().unwrap(),
            named,
            pebble,
        };
        let server = prepared.named.address;
        let updates = format!(
            "challenge = \"dns-rfc2136\"\n[acme.rfc2136]\nserver = \"{server}\"\nkey_name = \
             \"{KEY_NAME}\"\nkey_file = {:?}\n",
            prepared.named.key_file()
        );
        let challenge = match challenge.is_empty() {
            true => &updates,
            false => challenge,
        };
        let text = format!(
            "region = \"eu1\"\ndomain = \"example.test\"\ndata_dir = {:?}\n\
             listen = \"127.0.0.1:{port}\"\nadmin_listen = \"127.0.0.1:0\"\nworkers = 2\n\
             log_format = \"json\"\ntls = \"acme\"\ndns_servers = [\"{server}\"]\n[acme]\n\
             directory = {:?}\nca_file = {:?}\ncontact = [\"admin@example.test\"]\n\
             terms_accepted = true\n{challenge}",
            prepared.path("data"),
            directory,
            prepared.pebble.ca_file(),
        );
        fs::write(prepared.path("gateway.toml"), text).unwrap();
        prepared.root();
        prepared
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn serve(&self) -> Served {
        serve(&mut serve_command(&self.path("gateway.toml")))
    }

    /// Writes the root of the issued certificates to a file.
    fn root(&self) -> PathBuf {
        let path = self.path("root.pem");
        fs::write(&path, self.pebble.issuing_root()).unwrap();
        path
    }

    /// Whether a request over HTTPS that trusts this root is answered.
    fn answers(&self, address: SocketAddr, name: &str) -> bool {
        let port = address.port();
        let status = Command::new("curl")
            .args(["--silent", "--output", "/dev/null", "--max-time", "5"])
            .arg("--cacert")
            .arg(self.path("root.pem"))
            .args(["--resolve", &format!("{name}:{port}:127.0.0.1")])
            .arg(format!("https://{name}:{port}{PATH}"))
            .status();
        status.unwrap().success()
    }

    /// `gw-gateway certificate`, whose output is JSON.
    fn command(&self, served: &Served, action: &str) -> Value {
        self.run(served, &["certificate", action])
    }

    /// The output of a command of `gw-gateway`, JSON; `Null` without one.
    fn run(&self, served: &Served, arguments: &[&str]) -> Value {
        let output = gw_gateway()
            .args(arguments)
            .args(["--json", "--admin-token-file"])
            .arg(self.path("data/admin.token"))
            .args(["--admin-url", &format!("http://{}", served.admin_address)])
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap_or_default()
    }

    /// The certificate of the region, as `list` prints it.
    fn certificate(&self, served: &Served) -> Value {
        let list = self.command(served, "list");
        let items = list.get("items").unwrap_or(&list);
        items.as_array().unwrap()[0].clone()
    }

    /// Waits until the certificate of the region is valid: no order is open.
    #[track_caller]
    fn await_valid(&self, served: &Served) {
        eventually("the certificate is valid", || {
            (self.certificate(served)["status"] == "valid").then_some(())
        });
    }

    /// Waits for a certificate that is in use and is not `before`.
    fn await_certificate(&self, served: &Served, before: &[u8]) -> Vec<u8> {
        // Each worker takes the certificate in its own time, and a connection goes to any of them.
        eventually("the certificate of the authority at all workers", || {
            let mut found =
                (0..8).map(|_| Some(Connection::open(self, served.address)?.certificate()));
            let first = found.next()?.filter(|first| first != before);
            first.filter(|first| found.all(|next| next.as_ref() == Some(first)))
        })
    }
}

/// A connection that stays open, to the apex.
struct Connection(BufReader<StreamOwned<ClientConnection, TcpStream>>);

impl Connection {
    /// `None` if the certificate is not of the authority.
    fn open(prepared: &Prepared, address: SocketAddr) -> Option<Self> {
        Self::open_to(&prepared.path("root.pem"), APEX, address)
    }

    fn open_to(root: &Path, name: &'static str, address: SocketAddr) -> Option<Self> {
        let mut roots = RootCertStore::empty();
        let root = CertificateDer::from_pem_file(root).unwrap();
        roots.add(root).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from(name).unwrap();
        let mut session = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut stream = TcpStream::connect(address).unwrap();
        while session.is_handshaking() {
            session.complete_io(&mut stream).ok()?;
        }
        Some(Self(BufReader::new(StreamOwned::new(session, stream))))
    }

    fn certificate(&self) -> Vec<u8> {
        self.0.get_ref().conn.peer_certificates().unwrap()[0].to_vec()
    }

    /// Sends a request head without its end.
    fn begin_request(&mut self) {
        let head = format!("GET {PATH} HTTP/1.1\r\nHost: {APEX}\r\n");
        self.0.get_mut().write_all(head.as_bytes()).unwrap();
    }

    fn request(&mut self) -> u16 {
        let request = format!("GET {PATH} HTTP/1.1\r\nHost: {APEX}\r\n\r\n");
        self.0.get_mut().write_all(request.as_bytes()).unwrap();
        let mut status = 0;
        let mut length = 0;
        loop {
            let mut line = String::new();
            self.0.read_line(&mut line).unwrap();
            let line = line.trim_end().to_ascii_lowercase();
            if let Some(rest) = line.strip_prefix("http/1.1 ") {
                status = rest[..3].parse().unwrap();
            } else if let Some(value) = line.strip_prefix("content-length: ") {
                length = value.parse().unwrap();
            } else if line.is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).unwrap();
        status
    }
}

#[test]
fn the_first_certificate_comes_within_seconds_and_is_renewed_without_a_dropped_connection() {
    let Some(prepared) = Prepared::new() else {
        return;
    };
    let began = Instant::now();
    let served = prepared.serve();
    let warning = "no certificate of the ACME authority yet";
    served.log.line_with(warning);
    eventually("an answer with a certificate of the authority", || {
        prepared.answers(served.address, APEX).then_some(())
    });
    let first_within = began.elapsed();
    assert!(first_within < FIRST_WITHIN, "{first_within:?}");
    assert!(prepared.answers(served.address, TENANT), "the wildcard");
    let listed = prepared.certificate(&served);
    assert_eq!(listed["status"], "valid", "{listed}");
    assert_eq!(listed["failures"], 0);
    assert_eq!(listed["names"][1], "*.eu1.example.test");

    let mut connection = Connection::open(&prepared, served.address).unwrap();
    assert_eq!(connection.request(), 200);
    let before = connection.certificate();
    prepared.command(&served, "renew");
    let after = eventually("another certificate", || {
        // The open connection and new ones are answered during the renewal.
        assert_eq!(connection.request(), 200);
        assert!(prepared.answers(served.address, TENANT));
        let now = Connection::open(&prepared, served.address)
            .unwrap()
            .certificate();
        (now != before).then_some(now)
    });
    assert_eq!(connection.request(), 200);

    // The gateway serves the stored certificate at once after a restart.
    drop(served);
    let served = prepared.serve();
    let connection = Connection::open(&prepared, served.address).unwrap();
    assert_eq!(connection.certificate(), after);
}

#[test]
fn the_service_goes_on_while_the_authority_is_away_and_renews_at_its_return() {
    let Some(mut prepared) = Prepared::new() else {
        return;
    };
    let served = prepared.serve();
    let before = prepared.await_certificate(&served, &[]);
    let old_root = fs::read(prepared.path("root.pem")).unwrap();
    prepared.pebble.stop();
    prepared.command(&served, "renew");
    let failed = eventually("two failures", || {
        let listed = prepared.certificate(&served);
        (listed["failures"].as_u64().unwrap() >= 2).then_some(listed)
    });
    let reason = failed["last_failure"].as_str().unwrap();
    assert!(reason.contains(&prepared.pebble.directory()), "{reason}");
    assert_eq!(failed["status"], "renewing");
    assert!(prepared.answers(served.address, APEX));
    assert_eq!(fs::read(prepared.path("root.pem")).unwrap(), old_root);

    // The authority has lost the account and the order, and has another root.
    prepared.pebble.start_again();
    let began = Instant::now();
    prepared.root();
    prepared.await_certificate(&served, &before);
    assert!(began.elapsed() < RENEWED_WITHIN, "{:?}", began.elapsed());
    assert_eq!(prepared.certificate(&served)["failures"], 0);
}

/// Steps of an order that are stored: the key of the account, its registration, the order, its
/// proofs, their publication, their visibility, the key of the certificate, the chain, the end.
const STEPS: usize = 9;
/// Kills at least, if `GW_TEST_KILLS` is set.
const KILLS_MIN: usize = 20;

#[test]
fn a_kill_at_any_step_loses_no_order_and_no_account() {
    // A step takes seconds, so there are fewer of these kills than of those without a wait.
    let some = |kills: String| KILLS_MIN.max(kills.parse::<usize>().unwrap() / 25);
    let kills = std::env::var("GW_TEST_KILLS").map_or(STEPS, some);
    let Some(prepared) = Prepared::new() else {
        return;
    };
    let mut issued = 0;
    let mut certificate = Vec::new();
    for kill in 0..kills {
        let mut served = prepared.serve();
        if issued > 0 {
            prepared.command(&served, "renew");
        }
        // The kill comes during the step after this one.
        for _ in 0..=kill % STEPS {
            let action = served.log.find(|line| {
                let action = line["fields"]["action"]
                    .as_str()
                    .or(line["action"].as_str())?;
                let is_step = action == "certificate.order" || action == "certificate.issue";
                is_step.then(|| action.to_owned())
            });
            if action == "certificate.issue" {
                break;
            }
        }
        served.process.signal("KILL");
        served.process.exit_code();
        let served = prepared.serve();
        certificate = prepared.await_certificate(&served, &certificate);
        issued += 1;
        prepared.await_valid(&served);
        assert_eq!(prepared.certificate(&served)["failures"], 0);
    }
    let orders = prepared.pebble.count("orders in the db");
    assert!(orders >= issued);
    // Only a kill between the answer of the authority and its storage makes a second order.
    assert!(orders <= issued + kills.div_ceil(STEPS), "{orders} orders");
    assert_eq!(prepared.pebble.count("accounts in memory"), 1);
    let record = format!("_acme-challenge.{APEX}");
    assert!(prepared.named.texts(&record).is_empty());
}

#[test]
fn init_with_a_contact_serves_a_certificate_within_seconds() {
    let address = free_address();
    let Some(prepared) = Prepared::with_handshakes(address.port(), address.port()) else {
        return;
    };
    let began = Instant::now();
    let child = gw_gateway()
        .args(["init", "--serve", "--domain", "example.test"])
        .args(["--account", "acme", "--config"])
        .arg(prepared.path("init.toml"))
        .arg("--data-dir")
        .arg(prepared.path("init-data"))
        .args(["--listen", &address.to_string()])
        .args(["--admin-listen", "127.0.0.1:0"])
        .args(["--acme-contact", "admin@example.test"])
        .args(["--acme-directory", &prepared.pebble.directory()])
        .env("GW_ACME_CA_FILE", prepared.pebble.ca_file())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let _process = Running::new(child);
    eventually("an answer with a certificate of the authority", || {
        prepared.answers(address, APEX).then_some(())
    });
    assert!(began.elapsed() < FIRST_WITHIN, "{:?}", began.elapsed());
}

#[test]
fn the_apex_is_proved_in_handshakes_of_the_listener() {
    let port = free_address().port();
    let Some(prepared) = Prepared::with_handshakes(port, port) else {
        return;
    };
    let served = prepared.serve();
    prepared.await_certificate(&served, &[]);
    assert!(prepared.answers(served.address, APEX));
    assert!(!prepared.answers(served.address, TENANT), "no wildcard");
    assert_eq!(prepared.certificate(&served)["names"][0], APEX);
}

#[test]
fn the_nodes_of_a_region_order_once_and_all_use_the_certificate() {
    if !usable(&PROGRAMS) {
        return;
    }
    let named = Named::start("");
    let pebble = Pebble::start(Options::new(named.address));
    let server = named.address;
    let configuration = format!(
        "tls = \"acme\"\nacme.directory = {:?}\nacme.ca_file = {:?}\nacme.terms_accepted = true\n\
         acme.challenge = \"dns-rfc2136\"\ndns_servers = [\"{server}\"]\n\
         acme.rfc2136.server = \"{server}\"\nacme.rfc2136.key_name = \"{KEY_NAME}\"\n\
         acme.rfc2136.key_file = {:?}\n",
        pebble.directory(),
        pebble.ca_file(),
        named.key_file(),
    );
    let Some(region) = Region::start_with(3, false, &configuration) else {
        return;
    };
    let root = region.data(0).with_file_name("root.pem");
    fs::write(&root, pebble.issuing_root()).unwrap();
    let certificates: BTreeSet<Vec<u8>> = (0..3)
        .map(|node| {
            let address = region.node(node).address;
            eventually("the certificate of the authority on each node", || {
                Some(Connection::open_to(&root, "eu1.gw.localhost", address)?.certificate())
            })
        })
        .collect();
    assert_eq!(certificates.len(), 1, "all nodes have the same");
    assert_eq!(pebble.count("orders in the db"), 1);
    assert_eq!(pebble.count("accounts in memory"), 1);
}
