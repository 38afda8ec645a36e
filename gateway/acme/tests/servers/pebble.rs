//! Pebble, an ACME authority for tests, with a TLS certificate of an authority of the test.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{Server, free_address};

/// Starts of Pebble until one succeeds.
const STARTS_MAX: usize = 5;

/// A running Pebble.
pub(crate) struct Pebble {
    server: Server,
    folder: TempDir,
    options: Options,
    address: SocketAddr,
    management: SocketAddr,
}

/// What a test changes.
#[derive(Clone)]
pub(crate) struct Options {
    /// DNS server that it asks.
    pub(crate) dns: SocketAddr,
    /// Port of TLS-ALPN-01.
    pub(crate) tls_port: u16,
    /// Port of HTTP-01.
    pub(crate) http_port: u16,
    /// Identifier and key of external accounts. With one, an account needs it.
    pub(crate) external_account: Option<(&'static str, &'static str)>,
    /// Lifetime of certificates.
    pub(crate) lifetime_seconds: u64,
    /// Environment variables.
    pub(crate) variables: Vec<(&'static str, &'static str)>,
}

impl Options {
    /// Answers of `dns`, no artificial waits, and new proofs for all but one order in a hundred.
    pub(crate) fn new(dns: SocketAddr) -> Self {
        Self {
            dns,
            tls_port: 5001,
            http_port: 5002,
            external_account: None,
            lifetime_seconds: 7_776_000,
            variables: vec![
                ("PEBBLE_VA_NOSLEEP", "1"),
                ("PEBBLE_WFE_NONCEREJECT", "0"),
                ("PEBBLE_AUTHZREUSE", "0"),
            ],
        }
    }

    /// Sets an environment variable.
    pub(crate) fn variable(mut self, name: &'static str, value: &'static str) -> Self {
        self.variables.push((name, value));
        self
    }
}

impl Pebble {
    /// Starts Pebble.
    pub(crate) fn start(options: Options) -> Self {
        let folder = tempfile::tempdir().unwrap();
        make_certificates(&folder);
        let started = (0..STARTS_MAX).find_map(|_| {
            let [address, management] = [free_address(), free_address()];
            let server = run(&folder, &options, address, management)?;
            Some((server, address, management))
        });
        let (server, address, management) = started.expect("Pebble runs");
        Self {
            server,
            folder,
            options,
            address,
            management,
        }
    }

    /// URL of the directory.
    pub(crate) fn directory(&self) -> String {
        format!("https://{}/dir", self.address)
    }

    /// PEM file with the authority of its TLS certificate.
    pub(crate) fn ca_file(&self) -> PathBuf {
        self.folder.path().join("ca.pem")
    }

    /// The root of the certificates that it issues, PEM.
    pub(crate) fn issuing_root(&self) -> String {
        self.management_resource("roots/0")
    }

    fn management_resource(&self, path: &str) -> String {
        let url = format!("https://{}/{path}", self.management);
        let output = Command::new("curl")
            .args(["--silent", "--show-error", "--fail", "--cacert"])
            .arg(self.ca_file())
            .arg(url)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// The last number before `what` in the log, such as that of the orders.
    pub(crate) fn count(&self, what: &str) -> usize {
        let log = fs::read_to_string(self.folder.path().join("pebble.log")).unwrap();
        let number = |line: &str| {
            line.split_once(what)?
                .0
                .trim()
                .rsplit(' ')
                .next()?
                .parse()
                .ok()
        };
        log.lines().rev().find_map(number).unwrap_or_default()
    }

    /// Ends the process.
    pub(crate) fn stop(&mut self) {
        self.server.stop();
    }

    /// Starts it again, at the same address. It has forgotten accounts and orders.
    pub(crate) fn start_again(&mut self) {
        let server = run(&self.folder, &self.options, self.address, self.management);
        self.server = server.expect("Pebble runs");
    }
}

fn run(
    folder: &TempDir,
    options: &Options,
    address: SocketAddr,
    management: SocketAddr,
) -> Option<Server> {
    let path = |name: &str| folder.path().join(name);
    let mut pebble = json!({
        "listenAddress": address.to_string(),
        "managementListenAddress": management.to_string(),
        "certificate": path("server.pem"),
        "privateKey": path("server.key"),
        "httpPort": options.http_port,
        "tlsPort": options.tls_port,
        "ocspResponderURL": "",
        "externalAccountBindingRequired": options.external_account.is_some(),
        "certificateValidityPeriod": options.lifetime_seconds,
    });
    if let Some((id, key)) = options.external_account {
        pebble["externalAccountMACKeys"] =
            Value::Object([(id.to_owned(), key.into())].into_iter().collect());
    }
    fs::write(path("pebble.json"), json!({ "pebble": pebble }).to_string()).unwrap();
    let log = fs::File::create(path("pebble.log")).unwrap();
    let child = Command::new("pebble")
        .arg("-config")
        .arg(path("pebble.json"))
        .args(["-dnsserver", &options.dns.to_string()])
        .envs(options.variables.iter().copied())
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .unwrap();
    Server::accepting(child, &[address, management])
}

fn make_certificates(folder: &TempDir) {
    let mut authority = CertificateParams::default();
    // OpenSSL takes a certificate whose issuer has its own name for a self-signed one.
    authority
        .distinguished_name
        .push(DnType::CommonName, "authority of the directory");
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let root = authority.self_signed(&key).unwrap();
    let issuer = Issuer::new(authority, key);
    let server_key = KeyPair::generate().unwrap();
    let server = CertificateParams::new(["127.0.0.1".to_owned(), "localhost".to_owned()])
        .unwrap()
        .signed_by(&server_key, &issuer)
        .unwrap();
    let write = |name: &str, text: String| fs::write(folder.path().join(name), text).unwrap();
    write("ca.pem", root.pem());
    write("server.pem", server.pem());
    write("server.key", server_key.serialize_pem());
}
