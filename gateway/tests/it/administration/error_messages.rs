//! Mistakes of operators: each message names the object, the cause and a remedy.

mod first_day;
mod typed;

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::{Installation, assert_says, end};
use crate::support::processes::process::{Served, gw_gateway, serve_command};
use crate::support::{SOON, programs};

/// `command` without any capability, also if the tests run as root. `namespaces` are further
/// options of unshare(1).
fn without_capabilities(command: &Command, namespaces: &[&str]) -> Command {
    let mut wrapped = Command::new("unshare");
    wrapped
        .arg("--user")
        .args(namespaces)
        .arg(command.get_program())
        .args(command.get_args());
    wrapped
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn a_data_folder_that_cannot_be_used() {
    if !programs::usable(&["unshare"]) {
        return;
    }
    let installation = Installation::new();
    let data = installation.path("data");
    let named = format!("data_dir {}: ", data.display());
    let start = || {
        end(&mut without_capabilities(
            &installation.serve_command(),
            &[],
        ))
    };
    fs::create_dir(&data).unwrap();
    set_mode(&data, 0o000);
    let remedy = format!("`chmod 700 {}`", data.display());
    let says = [&*named, "Permission denied", "its mode is 0000", &remedy];
    start().assert_failed(1, &says);
    let examined = end(&mut without_capabilities(&installation.doctor(), &[]));
    assert_says(&examined.out, &["FAILED   data_dir"]);

    fs::remove_dir(&data).unwrap();
    set_mode(&installation.path(""), 0o500);
    let ended = start();
    set_mode(&installation.path(""), 0o700);
    let cause = "it cannot be created: Permission denied";
    ended.assert_failed(1, &[&named, cause, "install -d -m 0700 -o "]);

    fs::write(&data, "").unwrap();
    let ended = end(&mut installation.serve_command());
    ended.assert_failed(1, &[&named, "it is not a folder", "name a folder"]);
}

#[test]
fn a_full_disk() {
    if !programs::usable(&["unshare"]) {
        return;
    }
    let installation = Installation::new();
    let data = installation.path("data");
    fs::create_dir(&data).unwrap();
    // Mounts a file system without free space in a mount namespace that ends with the process.
    let script = r#"mount -t tmpfs -o size=64k,mode=700 none "$1" &&
                    cat /dev/zero >"$1/filler" 2>/dev/null
                    shift && exec "$@""#;
    let serve = installation.serve_command();
    let mut command = Command::new("unshare");
    command
        .args(["--user", "--map-root-user", "--mount"])
        .args(["sh", "-c", script, "sh"])
        .arg(&data)
        .arg(serve.get_program())
        .args(serve.get_args());
    let found = format!("data_dir {}: the disk is full", data.display());
    let df = format!("`df -h {}`", data.display());
    end(&mut command).assert_failed(1, &[&found, &df, "then start again"]);
}

#[test]
fn a_second_gateway_on_one_data_folder() {
    let installation = Installation::new();
    let first = installation.serve();
    let data = installation.path("data");
    let holder = first.process.id();
    let found = format!("data_dir {}: process {holder} (", data.display());
    let says = [
        &*found,
        ") uses it",
        "stop that process",
        "SIGUSR2",
        "another folder in data_dir",
    ];
    end(&mut installation.serve_command()).assert_failed(1, &says);
}

#[test]
fn an_address_that_another_program_has() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let holder = format!("process {} (", std::process::id());
    let installation = Installation::new();
    for (key, variable) in [("listen", "GW_LISTEN"), ("admin_listen", "GW_ADMIN_LISTEN")] {
        let found = format!("{key}: cannot listen on {address}: Address already in use");
        let ended = end(installation.serve_command().env(variable, &address));
        ended.assert_failed(1, &[&found, &holder, "stop it, or configure another port"]);
        let examined = end(installation.doctor().env(variable, &address));
        assert_says(&examined.out, &[&holder, "another program listens there"]);
    }
}

#[test]
fn an_address_that_the_gateway_or_the_machine_cannot_have() {
    let installation = Installation::new();
    let both = ["GW_LISTEN", "GW_ADMIN_LISTEN"].map(|name| (name, "127.0.0.1:4433"));
    let says = [
        "admin_listen: ",
        " is taken by listen (",
        "give it another port",
    ];
    let ended = end(installation.serve_command().envs(both));
    ended.assert_failed(2, &says);
    let foreign = "192.0.2.1:4433";
    let ended = end(installation.serve_command().env("GW_LISTEN", foreign));
    let found = format!("listen: cannot listen on {foreign}");
    ended.assert_failed(1, &[&found, "an address of this machine"]);
}

#[test]
fn a_port_that_needs_a_capability() {
    if !programs::usable(&["unshare"]) {
        return;
    }
    let installation = Installation::new();
    // A network namespace of its own, where low ports need a capability whatever the settings of
    // this machine are.
    let mut command = without_capabilities(&installation.serve_command(), &["--net"]);
    command.env("GW_LISTEN", "0.0.0.0:443");
    let ended = end(command.env("GW_ADMIN_LISTEN", "0.0.0.0:9080"));
    let says = [
        "listen: cannot listen on 0.0.0.0:443: Permission denied",
        "AmbientCapabilities=CAP_NET_BIND_SERVICE",
        "setcap cap_net_bind_service=+ep",
        "a port from 1024 on",
    ];
    ended.assert_failed(1, &says);
}

#[test]
fn a_configuration_that_cannot_be_read() {
    let installation = Installation::new();
    fs::remove_file(installation.config()).unwrap();
    let path = installation.config();
    let found = format!(
        "{}: cannot be read: No such file or directory",
        path.display()
    );
    for mut command in [installation.serve_command(), installation.doctor()] {
        let ended = end(&mut command);
        let text = ended.out + &ended.err;
        assert_says(&text, &[&found, "--config", "`gw-gateway init`"]);
    }
    let ended = end(&mut serve_command(&installation.path("")));
    ended.assert_failed(2, &["Is a directory", "name a file with --config"]);
}

#[test]
fn a_variable_that_does_not_exist() {
    let installation = Installation::new();
    let mut check = installation.serve_command();
    let ended = end(check
        .arg("--check")
        .env("GW_LISTNE", "x")
        .env("GW_WORKERS", "1"));
    assert_eq!(ended.code, 0);
    let warning = "warning: GW_LISTNE: no such variable; did you mean `GW_LISTEN`?";
    assert_says(&ended.err, &[warning]);
    assert!(!ended.err.contains("GW_WORKERS"), "{}", ended.err);
    // A start logs it before anything else can fail.
    let mut start = installation.serve_command();
    let log = end(start
        .env("GW_LISTNE", "x")
        .env("GW_LISTEN", "192.0.2.1:4433"))
    .err;
    assert_says(&log, &["\"level\":\"WARN\"", "GW_LISTNE: no such variable"]);
}

/// Writes a certificate for the region and its key, valid from `from` to `until`; returns the keys
/// of the configuration.
fn certificate(folder: &Path, from: i32, until: i32) -> String {
    let mut params = region_certificate();
    params.not_before = rcgen::date_time_ymd(from, 1, 1);
    params.not_after = rcgen::date_time_ymd(until, 1, 1);
    self_signed(folder, &params)
}

/// A certificate for the names of the region.
fn region_certificate() -> rcgen::CertificateParams {
    let names = ["eu1.gw.localhost", "*.eu1.gw.localhost"];
    rcgen::CertificateParams::new(names.map(str::to_owned)).unwrap()
}

/// Writes a self-signed certificate and its key; returns the keys of the configuration.
fn self_signed(folder: &Path, params: &rcgen::CertificateParams) -> String {
    let key = rcgen::KeyPair::generate().unwrap();
    let [certificate_file, key_file] = ["server.crt", "server.key"].map(|name| folder.join(name));
    fs::write(&certificate_file, params.self_signed(&key).unwrap().pem()).unwrap();
    fs::write(&key_file, key.serialize_pem()).unwrap();
    format!("tls_certificate = {certificate_file:?}\ntls_key = {key_file:?}\n")
}

#[test]
fn a_certificate_and_a_clock_that_disagree() {
    let files = tempfile::tempdir().unwrap();
    for (from, until, found) in [
        (1990, 2001, "expired on 2001-01-01"),
        (2190, 2200, "not valid before 2190-01-01"),
    ] {
        let installation = Installation::with(&certificate(files.path(), from, until));
        let says = [
            "tls_certificate: ",
            "server.crt: ",
            found,
            "and the clock says 20",
            "set the clock",
        ];
        assert_says(&end(installation.serve_command().arg("--check")).err, &says);
    }
}

#[test]
fn a_key_that_may_not_be_read() {
    if !programs::usable(&["unshare"]) {
        return;
    }
    let files = tempfile::tempdir().unwrap();
    let installation = Installation::with(&certificate(files.path(), 1990, 2190));
    let key = files.path().join("server.key");
    set_mode(&key, 0o000);
    let found = format!(
        "tls_key: {}: cannot be read: Permission denied",
        key.display()
    );
    for arguments in [&["--check"][..], &[]] {
        let mut command = installation.serve_command();
        let ended = end(&mut without_capabilities(command.args(arguments), &[]));
        ended.assert_failed(2, &[&found, "has to be able to read it"]);
    }
}

/// Sends `request` in plain HTTP; returns head and body of the answer.
fn plain_http(address: SocketAddr, request: &[u8]) -> (String, Value) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.write_all(request).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.to_ascii_lowercase(), body.parse().unwrap())
}

#[test]
fn plain_http_at_the_port_for_callers() {
    let installation = Installation::new();
    let served = installation.serve();
    let head = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 50000\r\n\r\n";
    let post = [&head[..], &[b'x'; 50_000]].concat();
    for request in [&b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"[..], &post] {
        let (head, body) = plain_http(served.address, request);
        assert!(head.starts_with("http/1.1 400 "), "{head}");
        let id = body["error"]["request_id"].as_str().unwrap();
        let id = format!("x-gw-request-id: {id}");
        assert_says(
            &head,
            &[&id, "x-gw-status: badrequest", "connection: close"],
        );
        assert_eq!(body["error"]["code"], "GW_BAD_REQUEST");
        assert_says(body["error"]["message"].as_str().unwrap(), &["https"]);
    }
}

#[test]
fn tls_at_the_admin_port_that_speaks_plain_http() {
    let installation = Installation::new();
    let served = installation.serve();
    let url = format!("https://{}", served.admin_address);
    let mut list = gw_gateway();
    list.args(["account", "list", "--admin-url", &url]);
    let ended = end(list.env("GW_ADMIN_TOKEN", "x"));
    ended.assert_failed(1, &[&url, "it does not speak TLS; use http://"]);
}

#[test]
fn a_changed_configuration_is_named_on_a_reload() {
    let installation = Installation::new();
    let config = installation.config();
    let Served { process, log, .. } = installation.serve();
    let line = |level: &str, text: &str| {
        log.find(|line| {
            let is_it = line["level"] == level && line["message"].as_str()?.contains(text);
            is_it.then(|| line.clone())
        })
    };
    let used = fs::read_to_string(&config).unwrap();
    let other = used.replace("workers = 2", "workers = 1") + "drain_seconds = 3\n";
    fs::write(&config, other).unwrap();
    process.signal("HUP");
    let changed = line(
        "WARN",
        "the configuration file has changed: SIGHUP reads only certificates, SIGUSR2 applies",
    );
    assert_eq!(changed["keys"], "drain_seconds, workers");
    assert_eq!(changed["path"], config.display().to_string());
    line("INFO", "certificates reloaded");

    fs::write(&config, format!("{used}wrokers = 1\n")).unwrap();
    process.signal("HUP");
    let unused = line(
        "ERROR",
        "has mistakes: the one read at the start stays in use",
    );
    assert_says(
        unused["mistakes"].as_str().unwrap(),
        &["wrokers: no such key"],
    );
    line("INFO", "certificates reloaded");

    fs::remove_file(&config).unwrap();
    process.signal("HUP");
    line("ERROR", "gateway.toml: cannot be read: No such file");
    line("INFO", "certificates reloaded");

    // No line is logged about a file that is the same again.
    fs::write(&config, &used).unwrap();
    process.signal("HUP");
    log.find(|line| {
        let message = line["message"].as_str()?;
        assert!(!message.contains("configuration"), "{message}");
        (message == "certificates reloaded").then_some(())
    });
}
