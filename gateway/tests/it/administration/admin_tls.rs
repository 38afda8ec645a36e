//! The admin listener with TLS: commands, console, reload, replacement, and clients that misbehave.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use time::OffsetDateTime;

use crate::administration::console::browser::Browser;
use crate::support::doctor::examine;
use crate::support::processes::process::{Served, config_text, gw_gateway, serve, serve_command};
use crate::support::processes::successor::replace;
use crate::support::{SOON, eventually};

/// Names of the certificate. The first one resolves nowhere.
const NAMES: [&str; 2] = ["gw-admin.example.com", "127.0.0.1"];

/// A folder with an authority, a certificate of it, and the configuration of a gateway that uses
/// both.
struct Prepared {
    folder: tempfile::TempDir,
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
            folder: tempfile::tempdir().unwrap(),
            issuer: Issuer::new(params, key),
            authority,
        };
        fs::write(prepared.path("ca.crt"), &prepared.authority).unwrap();
        prepared.issue(36_500);
        let text = format!(
            "{}admin_tls_certificate = {:?}\nadmin_tls_key = {:?}\n",
            config_text(&prepared.path("data"), 0),
            prepared.path("admin.crt"),
            prepared.path("admin.key")
        );
        fs::write(prepared.path("gateway.toml"), text).unwrap();
        prepared
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
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
        serve(&mut serve_command(&self.path("gateway.toml")))
    }

    /// `gw-gateway account list`, with the token of this gateway.
    fn command(&self) -> Command {
        let mut command = gw_gateway();
        command
            .args(["account", "list", "--json", "--admin-token-file"])
            .arg(self.path("data/admin.token"));
        command
    }

    /// Status and body of a request over TLS.
    fn get(&self, address: SocketAddr, path: &str) -> (u16, String) {
        let mut browser = Browser::at(format!("https://{address}"));
        browser.authority = Some(self.path("ca.crt"));
        let reply = browser.get(path);
        (reply.status, reply.text)
    }

    fn expiry(&self, address: SocketAddr) -> String {
        let (_, metrics) = self.get(address, "/metrics");
        let name = "gw_server_certificate_expiry_timestamp_seconds ";
        metrics
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap()
            .to_owned()
    }
}

/// Exit code and standard error.
fn run(command: &mut Command) -> (i32, String) {
    let output = command.output().unwrap();
    (
        output.status.code().unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    )
}

fn done() -> (i32, String) {
    (0, String::new())
}

#[test]
fn commands_verify_the_listener_and_say_what_to_do() {
    let prepared = Prepared::new();
    let Served {
        process: _gateway,
        admin_address,
        ..
    } = prepared.serve();
    let ca = prepared.path("ca.crt");
    let url = format!("https://{admin_address}");
    commands_trust_the_authority_that_they_are_given(&prepared, &url, &ca);

    let refused = |url: &str, ca: Option<&Path>, expected: &[&str]| {
        let mut command = prepared.command();
        command.args(["--admin-url", url]);
        if let Some(ca) = ca {
            command.arg("--admin-ca").arg(ca);
        }
        let (code, message) = run(&mut command);
        assert_eq!(code, 1, "{message}");
        for part in expected.iter().chain(&[url]) {
            assert!(message.contains(part), "{part} in {message}");
        }
    };
    refused(
        &url,
        None,
        &[
            "is not trusted; name a PEM file",
            "--admin-ca or GW_ADMIN_CA",
        ],
    );
    let elsewhere = format!("https://localhost:{}", admin_address.port());
    refused(
        &elsewhere,
        Some(&ca),
        &["its certificate is for gw-admin.example.com, 127.0.0.1, not for localhost"],
    );
    refused(
        &format!("http://{admin_address}"),
        None,
        &["speaks https, not plain HTTP: use https://"],
    );

    let plain = tempfile::tempdir().unwrap();
    fs::write(
        plain.path().join("gateway.toml"),
        config_text(&plain.path().join("data"), 0),
    )
    .unwrap();
    let plain = serve(&mut serve_command(&plain.path().join("gateway.toml")));
    refused(
        &format!("https://{}", plain.admin_address),
        Some(&ca),
        &["it does not speak TLS; use http://"],
    );
}

fn commands_trust_the_authority_that_they_are_given(prepared: &Prepared, url: &str, ca: &Path) {
    assert_eq!(
        run(prepared
            .command()
            .args(["--admin-url", url, "--admin-ca"])
            .arg(ca)),
        done()
    );
    assert_eq!(
        run(prepared
            .command()
            .env("GW_ADMIN_URL", url)
            .env("GW_ADMIN_CA", ca)),
        done()
    );
    let mut backup = gw_gateway();
    backup
        .arg("backup")
        .arg(prepared.path("backup.tar.zst"))
        .args(["--admin-url", url, "--admin-ca"])
        .arg(ca);
    assert_eq!(
        run(backup
            .arg("--admin-token-file")
            .arg(prepared.path("data/admin.token"))),
        done()
    );
}

#[test]
fn commands_find_the_listener_in_the_configuration() {
    let prepared = Prepared::new();
    let Served {
        process: _gateway,
        admin_address,
        ..
    } = prepared.serve();
    // The configuration with the port that the kernel chose.
    let with_config = || {
        let mut command = gw_gateway();
        command
            .args(["account", "list", "--json", "--config"])
            .arg(prepared.path("gateway.toml"));
        command.env("GW_ADMIN_LISTEN", admin_address.to_string());
        command
    };
    assert_eq!(
        run(with_config().arg("--admin-ca").arg(prepared.path("ca.crt"))),
        done()
    );
    // The certificate in the file of the listener is enough, also behind another one.
    assert_eq!(run(&mut with_config()), done());
    let leaf = fs::read_to_string(prepared.path("admin.crt")).unwrap();
    fs::write(prepared.path("admin.crt"), leaf + &prepared.authority).unwrap();
    assert_eq!(run(&mut with_config()), done());

    let mut doctor = gw_gateway();
    doctor.args(["doctor", "--config"]);
    doctor.arg(prepared.path("gateway.toml"));
    let found = examine(doctor.env("GW_ADMIN_LISTEN", admin_address.to_string()));
    let listener = &found.of("admin_listen").found;
    assert!(
        listener.ends_with("a gateway has it and answers"),
        "{listener}"
    );
    let names = &found.of("admin certificate: names").found;
    assert_eq!(names, "valid for gw-admin.example.com, 127.0.0.1");
    found.assert_complaints(&[("certificate", "warning")]);
}

#[test]
fn the_console_sets_secure_cookies() {
    let prepared = Prepared::new();
    let Served {
        process: _gateway,
        admin_address,
        ..
    } = prepared.serve();
    let mut browser = Browser::at(format!("https://{admin_address}"));
    browser.authority = Some(prepared.path("ca.crt"));
    let token = fs::read_to_string(prepared.path("data/admin.token")).unwrap();
    let right = browser.sign_in(&token, "/");
    let (_, flags) = right.cookie("__Host-gw_session").unwrap();
    assert_eq!(
        flags,
        "Path=/; HttpOnly; SameSite=Strict; Max-Age=43200; Secure"
    );
    assert_eq!(browser.get("/").status, 200);
    let created = browser.fill("/accounts", "/accounts", |form| form.set("id", "acme"));
    assert_eq!(created.status, 303);
    assert_eq!(browser.get("/accounts/acme").status, 200);
}

#[test]
fn a_reload_replaces_the_certificate_and_keeps_it_on_errors() {
    let prepared = Prepared::new();
    let Served {
        process: gateway,
        admin_address,
        log,
        ..
    } = prepared.serve();
    // Earlier than the expiry of the development certificate of callers, which is the first until
    // then.
    let before = prepared.expiry(admin_address);
    let expiry = prepared.issue(30);
    assert_ne!(before, expiry);
    gateway.signal("HUP");
    eventually("the new certificate", || {
        (prepared.expiry(admin_address) == expiry).then_some(())
    });
    for (file, text, expected) in [
        ("admin.key", "not a key", "admin_tls_key: "),
        ("admin.crt", "nothing", "admin_tls_certificate: "),
    ] {
        fs::write(prepared.path(file), text).unwrap();
        gateway.signal("HUP");
        let error = log.find(|line| line["error"].as_str().map(str::to_owned));
        assert!(error.contains(expected) && error.contains(file), "{error}");
    }
    assert_eq!(prepared.expiry(admin_address), expiry);
    // A check and a start name the mistakes.
    for arguments in [&["--check"][..], &[]] {
        let (code, message) = run(gw_gateway()
            .arg("serve")
            .args(arguments)
            .arg("--config")
            .arg(prepared.path("gateway.toml")));
        assert!(
            code == 2 && message.contains("\n  admin_tls_certificate: "),
            "{message}"
        );
        assert!(message.contains("\n  admin_tls_key: "), "{message}");
    }
}

#[test]
fn a_successor_serves_the_listener_with_tls() {
    let prepared = Prepared::new();
    let Served {
        mut process,
        admin_address,
        log,
        ..
    } = prepared.serve();
    assert_eq!(prepared.get(admin_address, "/readyz").0, 200);
    let expiry = prepared.issue(30);
    let successor = replace(process.id(), &log);
    assert_eq!(process.exit_code(), Some(0));
    assert_eq!(prepared.get(admin_address, "/readyz").0, 200);
    assert_eq!(prepared.expiry(admin_address), expiry);
    successor.stop();
}

/// What the server sends until it closes the connection.
fn answer(mut stream: TcpStream, request: &[u8]) -> String {
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.write_all(request).unwrap();
    let mut answer = Vec::new();
    // A reset is an end too.
    drop(stream.read_to_end(&mut answer));
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn clients_that_do_not_speak_tls_are_answered_or_cut() {
    let prepared = Prepared::new();
    let Served {
        process: gateway,
        admin_address,
        ..
    } = prepared.serve();
    let connect = || TcpStream::connect(admin_address).unwrap();
    let told = answer(connect(), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(
        told.starts_with("HTTP/1.1 400 ") && told.ends_with("This port speaks https, not http.\n"),
        "{told}"
    );
    // A ClientHello that never ends, and a client that sends nothing, until the time for the
    // handshake is over.
    let silent =
        std::thread::spawn(move || answer(TcpStream::connect(admin_address).unwrap(), b""));
    assert_eq!(answer(connect(), &[22, 3, 1, 2, 0]), "");
    assert_eq!(silent.join().unwrap(), "");
    drop(gateway);
}

#[test]
fn request_heads_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(
        folder.path().join("gateway.toml"),
        config_text(&folder.path().join("data"), 0),
    )
    .unwrap();
    let Served {
        process: _gateway,
        admin_address,
        ..
    } = serve(&mut serve_command(&folder.path().join("gateway.toml")));
    let head = format!(
        "GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: {}\r\n\r\n",
        "x".repeat(64 * 1024)
    );
    let refused = answer(TcpStream::connect(admin_address).unwrap(), head.as_bytes());
    assert!(
        refused.is_empty() || refused.starts_with("HTTP/1.1 431 "),
        "{refused}"
    );
}
