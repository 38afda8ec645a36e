//! The admin listener with TLS: commands, console, reload, replacement, and clients that misbehave.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::Command;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use time::OffsetDateTime;

use super::console::browser::Browser;
use super::{Installation, assert_says, end};
use crate::support::doctor::examine;
use crate::support::processes::process::{Served, gw_gateway};
use crate::support::processes::successor::replace;
use crate::support::{SOON, eventually};

/// Names of the certificate. The first one resolves nowhere.
const NAMES: [&str; 2] = ["gw-admin.example.com", "127.0.0.1"];

/// A gateway with a certificate for the admin listener, and the authority of the certificate.
struct Prepared {
    installation: Installation,
    issuer: Issuer<'static, KeyPair>,
    authority: String,
}

impl Prepared {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, "an authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let authority = params.self_signed(&key).unwrap().pem();
        let prepared = Self {
            installation: Installation::new(),
            issuer: Issuer::new(params, key),
            authority,
        };
        fs::write(prepared.path("ca.crt"), &prepared.authority).unwrap();
        prepared.issue(36_500);
        let text = format!(
            "{}admin_tls_certificate = {:?}\nadmin_tls_key = {:?}\n",
            fs::read_to_string(prepared.path("gateway.toml")).unwrap(),
            prepared.path("admin.crt"),
            prepared.path("admin.key")
        );
        fs::write(prepared.path("gateway.toml"), text).unwrap();
        prepared
    }

    fn path(&self, name: &str) -> PathBuf {
        self.installation.path(name)
    }

    /// Writes a new certificate of this lifetime and its key. Returns its expiry, in seconds since
    /// the Unix epoch.
    fn issue(&self, days: i64) -> String {
        let mut params = CertificateParams::new(NAMES.map(str::to_owned)).unwrap();
        params.not_after = OffsetDateTime::now_utc() + time::Duration::days(days);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap().pem();
        fs::write(self.path("admin.crt"), certificate).unwrap();
        fs::write(self.path("admin.key"), key.serialize_pem()).unwrap();
        params.not_after.unix_timestamp().to_string()
    }

    fn serve(&self) -> Served {
        self.installation.serve()
    }

    /// `gw-gateway account list`, with the token of this gateway.
    fn command(&self) -> Command {
        let mut command = gw_gateway();
        command
            .args(["account", "list", "--json", "--admin-token-file"])
            .arg(self.path("data/admin.token"));
        command
    }

    /// A browser that trusts the authority.
    fn browser(&self, address: SocketAddr) -> Browser {
        let mut browser = Browser::at(format!("https://{address}"));
        browser.authority = Some(self.path("ca.crt"));
        browser
    }

    fn expiry(&self, address: SocketAddr) -> String {
        let metrics = self.browser(address).get("/metrics").text;
        let name = "gw_server_certificate_expiry_timestamp_seconds ";
        let mut lines = metrics.lines();
        let expiry = lines.find_map(|line| line.strip_prefix(name));
        expiry.unwrap().to_owned()
    }
}

/// Runs a command that must succeed without errors.
fn succeed(command: &mut Command) {
    let ended = end(command);
    assert_eq!((ended.code, ended.err.as_str()), (0, ""));
}

#[test]
fn commands_verify_the_listener_and_say_what_to_do() {
    let prepared = Prepared::new();
    let served = prepared.serve();
    let plain = Installation::new();
    let plain = plain.serve();
    let ca = prepared.path("ca.crt");
    let admin = served.admin_address;
    for (url, ca, says) in [
        (
            format!("https://{admin}"),
            None,
            &[
                "is not trusted; name a PEM file",
                "--admin-ca or GW_ADMIN_CA",
            ][..],
        ),
        (
            format!("https://localhost:{}", admin.port()),
            Some(&ca),
            &["its certificate is for gw-admin.example.com, 127.0.0.1, not for localhost"],
        ),
        (
            format!("http://{admin}"),
            None,
            &["speaks https, not plain HTTP: use https://"],
        ),
        (
            format!("https://{}", plain.admin_address),
            Some(&ca),
            &["it does not speak TLS; use http://"],
        ),
    ] {
        let mut command = prepared.command();
        command.args(["--admin-url", &url]);
        let ended = end(command.envs(ca.map(|ca| ("GW_ADMIN_CA", ca))));
        ended.assert_failed(1, says);
        assert_says(&ended.err, &[&url]);
    }
}

#[test]
fn commands_trust_the_authority_that_they_are_given() {
    let prepared = Prepared::new();
    let served = prepared.serve();
    let ca = prepared.path("ca.crt");
    let url = format!("https://{}", served.admin_address);
    let mut list = prepared.command();
    succeed(list.args(["--admin-url", &url, "--admin-ca"]).arg(&ca));
    let mut list = prepared.command();
    succeed(list.env("GW_ADMIN_URL", &url).env("GW_ADMIN_CA", &ca));
    let mut backup = gw_gateway();
    backup
        .arg("backup")
        .arg(prepared.path("backup.tar.zst"))
        .args(["--admin-url", &url, "--admin-ca"])
        .arg(&ca)
        .arg("--admin-token-file")
        .arg(prepared.path("data/admin.token"));
    succeed(&mut backup);
}

#[test]
fn commands_find_the_listener_in_the_configuration() {
    let prepared = Prepared::new();
    let served = prepared.serve();
    // The configuration with the port that the kernel chose.
    let with_config = || {
        let mut command = gw_gateway();
        command
            .args(["account", "list", "--json", "--config"])
            .arg(prepared.path("gateway.toml"))
            .env("GW_ADMIN_LISTEN", served.admin_address.to_string());
        command
    };
    succeed(with_config().arg("--admin-ca").arg(prepared.path("ca.crt")));
    // The certificate in the file of the listener is enough, also behind another one.
    succeed(&mut with_config());
    let leaf = fs::read_to_string(prepared.path("admin.crt")).unwrap();
    fs::write(prepared.path("admin.crt"), leaf + &prepared.authority).unwrap();
    succeed(&mut with_config());
}

#[test]
fn doctor_examines_the_listener() {
    let prepared = Prepared::new();
    let served = prepared.serve();
    let mut doctor = prepared.installation.doctor();
    let found = examine(doctor.env("GW_ADMIN_LISTEN", served.admin_address.to_string()));
    let listener = &found.of("admin_listen").found;
    let answers = "a gateway has it and answers";
    assert!(listener.ends_with(answers), "{listener}");
    let names = &found.of("admin certificate: names").found;
    assert_eq!(names, "valid for gw-admin.example.com, 127.0.0.1");
    let chain = ("admin certificate: chain", "warning");
    found.assert_complaints(&[("certificate", "warning"), chain]);
}

#[test]
fn the_console_sets_secure_cookies() {
    let prepared = Prepared::new();
    let served = prepared.serve();
    let mut browser = prepared.browser(served.admin_address);
    let token = fs::read_to_string(prepared.path("data/admin.token")).unwrap();
    let right = browser.sign_in(&token, "/");
    let (_, flags) = right.cookie("__Host-gw_session").unwrap();
    let expected = "Path=/; HttpOnly; SameSite=Strict; Max-Age=43200; Secure";
    assert_eq!(flags, expected);
    assert_eq!(browser.get("/").status, 200);
    let created = browser.fill("/accounts", "/accounts", |form| form.set("id", "acme"));
    assert_eq!(created.status, 303);
    assert_eq!(browser.get("/accounts/acme").status, 200);
}

#[test]
fn a_reload_replaces_the_certificate_and_keeps_it_on_errors() {
    let prepared = Prepared::new();
    let served = prepared.serve();
    let expiry_now = || prepared.expiry(served.admin_address);
    // Earlier than the expiry of the development certificate of callers, which is the first until
    // then.
    let before = expiry_now();
    let expiry = prepared.issue(30);
    assert_ne!(before, expiry);
    served.process.signal("HUP");
    eventually("the new certificate", || {
        (expiry_now() == expiry).then_some(())
    });
    for (file, text, expected) in [
        ("admin.key", "not a key", "admin_tls_key: "),
        ("admin.crt", "nothing", "admin_tls_certificate: "),
    ] {
        fs::write(prepared.path(file), text).unwrap();
        served.process.signal("HUP");
        let found = |line: &serde_json::Value| line["error"].as_str().map(str::to_owned);
        assert_says(&served.log.find(found), &[expected, file]);
    }
    assert_eq!(expiry_now(), expiry);
    // A check and a start name the mistakes.
    for arguments in [&["--check"][..], &[]] {
        let ended = end(prepared.installation.serve_command().args(arguments));
        let says = ["\n  admin_tls_certificate: ", "\n  admin_tls_key: "];
        ended.assert_failed(2, &says);
    }
}

#[test]
fn a_successor_serves_the_listener_with_tls() {
    let prepared = Prepared::new();
    let mut served = prepared.serve();
    let admin_address = served.admin_address;
    let status = || prepared.browser(admin_address).get("/readyz").status;
    assert_eq!(status(), 200);
    let expiry = prepared.issue(30);
    let successor = replace(served.process.id(), &served.log);
    assert_eq!(served.process.exit_code(), Some(0));
    assert_eq!(status(), 200);
    assert_eq!(prepared.expiry(admin_address), expiry);
    successor.stop();
}

/// Bytes that the server sends on a new connection until it ends the connection, also by a reset.
fn answer(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.write_all(request).unwrap();
    let mut answer = Vec::new();
    drop(stream.read_to_end(&mut answer));
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn clients_that_do_not_speak_tls_are_answered_or_cut() {
    let prepared = Prepared::new();
    let served = prepared.serve();
    let admin = served.admin_address;
    let told = answer(admin, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(told.starts_with("HTTP/1.1 400 "), "{told}");
    assert!(
        told.ends_with("This port speaks https, not http.\n"),
        "{told}"
    );
    // A ClientHello that never ends, and a client that sends nothing, until the time for the
    // handshake is over.
    let silent = std::thread::spawn(move || answer(admin, b""));
    assert_eq!(answer(admin, &[22, 3, 1, 2, 0]), "");
    assert_eq!(silent.join().unwrap(), "");
}

#[test]
fn request_heads_are_bounded() {
    let installation = Installation::new();
    let served = installation.serve();
    let long = "x".repeat(64 * 1024);
    let head = format!("GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: {long}\r\n\r\n");
    let refused = answer(served.admin_address, head.as_bytes());
    let is_refused = refused.is_empty() || refused.starts_with("HTTP/1.1 431 ");
    assert!(is_refused, "{refused}");
}
