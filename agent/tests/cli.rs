//! Exit codes and error messages of the agent program, as a user reads them.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests panic on unexpected errors"
)]

#[path = "../../shared/tests/programs/mod.rs"]
mod programs;
mod tls_server;

use std::fs;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, SystemTime};

use rustix::net::{AddressFamily, SocketType};
use rustix::process::geteuid;

const TOKEN: &str = "gw_et_0123456789abcdef.secret";
/// A year in which the tests do not run.
const LONG_AGO: std::ops::Range<i32> = 2020..2021;
const NOW: std::ops::Range<i32> = 2020..4000;

/// The program without the settings of this machine.
fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gw-agent"));
    for variable in [
        "GW_ENROLLMENT_TOKEN",
        "GW_STATE_DIR",
        "GW_PROXY",
        "HTTPS_PROXY",
        "https_proxy",
        "GW_LOG",
    ] {
        command.env_remove(variable);
    }
    command.args(arguments);
    command
}

/// The exit code and standard error of `command`.
fn outcome(command: &mut Command) -> (Option<i32>, String) {
    let output = command.output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    (output.status.code(), message)
}

fn gw_agent(arguments: &[&str]) -> (Option<i32>, String) {
    outcome(&mut command(arguments))
}

/// Enrolls at `gateway`, which fails. Returns the message.
fn enroll_at(gateway: &str, ca_file: Option<&Path>) -> String {
    let state = tempfile::tempdir().unwrap();
    let mut command = command(&["enroll", "--gateway", gateway, "--token", TOKEN]);
    command.arg("--state-dir").arg(state.path());
    command.env("NO_PROXY", "*");
    if let Some(ca_file) = ca_file {
        command.arg("--ca-file").arg(ca_file);
    }
    let (code, message) = outcome(&mut command);
    assert_eq!(code, Some(1), "{message}");
    assert!(message.starts_with("gw-agent: "), "{message}");
    assert!(!message.contains(TOKEN), "{message}");
    message
}

fn assert_has(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{part} is not in: {message}");
    }
}

/// A bound socket that does not listen: connections are refused and the port stays reserved.
fn refusing() -> (OwnedFd, SocketAddrV4) {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = SocketAddrV4::try_from(rustix::net::getsockname(&socket).unwrap()).unwrap();
    (socket, address)
}

/// A folder with an enrolled agent that has no key yet.
fn enrolled() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let about = serde_json::json!({
        "agent_id": "ag_0123456789abcdefghij",
        "gateway_name": "eu1.example.com",
        "gateway_host": "eu1.example.com",
        "gateway_port": 443,
        "services": ["acme--api.eu1.example.com"],
    });
    fs::write(folder.path().join("agent.json"), about.to_string()).unwrap();
    folder
}

#[test]
fn run_without_enrollment_exits_with_2() {
    let state = tempfile::tempdir().unwrap();
    let (code, message) = gw_agent(&["run", "--state-dir", state.path().to_str().unwrap()]);
    assert_eq!(code, Some(2));
    assert!(message.starts_with("gw-agent: not enrolled: "), "{message}");
    let file = state.path().join("agent.json");
    assert_has(&message, &[file.to_str().unwrap(), "gw-agent enroll"]);
}

#[test]
fn enroll_with_missing_options_exits_with_2_and_names_them() {
    let state = tempfile::tempdir().unwrap();
    let folder = state.path().to_str().unwrap();
    let (code, message) = gw_agent(&["enroll", "--state-dir", folder, "--ca-file", "/none"]);
    assert_eq!(code, Some(2));
    assert_has(
        &message,
        &["--gateway: ", "--token: ", "--ca-file: /none: "],
    );
}

#[test]
fn invalid_arguments_exit_with_2() {
    assert_eq!(gw_agent(&["walk"]).0, Some(2));
}

#[test]
fn http_checks_its_backend_before_the_token_is_used() {
    let state = tempfile::tempdir().unwrap();
    let folder = state.path().to_str().unwrap();
    let gateway = ["--gateway", "https://eu1.gw.localhost"];
    for (port, options, expected) in [
        ("65536", &gateway[..], &["1 to 65535"][..]),
        ("3000", &[], &["--gateway: missing", "--token: missing"]),
    ] {
        let arguments = ["http", port, "--state-dir", folder];
        let (code, message) = outcome(command(&arguments).args(options));
        assert_eq!(code, Some(2), "{message}");
        assert_has(&message, expected);
    }
}

#[test]
fn an_unreachable_gateway_is_named_with_the_cause() {
    let (_socket, address) = refusing();
    let port = address.port();
    let refused = enroll_at(&format!("https://gw.localhost:{port}"), None);
    let gateway = format!("gw.localhost:{port}");
    assert_has(
        &refused,
        &["cannot be reached", &gateway, "refused", "check the port"],
    );
    // No resolver knows this name (RFC 6761 §6.4).
    let unknown = enroll_at("https://gw.invalid", None);
    assert_has(&unknown, &["the name gw.invalid cannot be resolved", "DNS"]);
}

#[test]
fn a_gateway_that_does_not_accept_connections_is_named_with_the_time() {
    let (listener, address) = refusing();
    rustix::net::listen(&listener, 0).unwrap();
    // Fills the queue of connections; after that the kernel drops further ones.
    let connect = || TcpStream::connect_timeout(&address.into(), Duration::from_millis(200));
    let _queue: Vec<TcpStream> = std::iter::from_fn(|| connect().ok()).take(16).collect();
    let message = enroll_at(&format!("https://{address}"), None);
    let expected = format!("{address} did not accept a connection within 9s");
    assert_has(&message, &[&expected, "firewalls"]);
}

#[test]
fn a_server_without_tls_is_named() {
    let plain = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = plain.local_addr().unwrap();
    thread::spawn(move || {
        for mut client in plain.incoming().flatten() {
            let answer = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n";
            client.write_all(answer).unwrap();
        }
    });
    let message = enroll_at(&format!("https://{address}"), None);
    let expected = format!("{address} does not speak TLS");
    assert_has(&message, &[&expected, "HTTPS port"]);
}

#[test]
fn servers_that_are_no_gateways_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let ca_file = folder.path().join("ca.pem");
    let page = "HTTP/1.1 404 Not Found\r\nContent-Length: 6\r\n\r\n<html>".to_owned();
    let port = tls_server::start("gw.localhost", NOW, page, &ca_file);
    let message = enroll_at(&format!("https://gw.localhost:{port}"), Some(&ca_file));
    assert_has(
        &message,
        &["404 Not Found", "not as a Gw gateway does", "host and port"],
    );
    let message = enroll_at(&format!("https://other.localhost:{port}"), Some(&ca_file));
    let at = format!("the server at other.localhost:{port} is not the gateway");
    assert_has(&message, &[&at, "is for gw.localhost, not", "check host"]);
    let other = folder.path().join("other.pem");
    tls_server::start("gw.localhost", NOW, String::new(), &other);
    let message = enroll_at(&format!("https://gw.localhost:{port}"), Some(&other));
    let untrusted = format!("certificate at gw.localhost:{port} is not trusted");
    let cause = "no authority in --ca-file issued it";
    let expected = format!("{untrusted}: {cause}");
    assert_has(&message, &[&expected, "give the file of the one that did"]);
}

#[test]
fn a_certificate_that_is_not_valid_now_is_explained_by_the_clocks() {
    let folder = tempfile::tempdir().unwrap();
    let ca_file = folder.path().join("ca.pem");
    let in_2020 = SystemTime::UNIX_EPOCH + Duration::from_secs(1_590_000_000);
    let ahead = "days ahead of the gateway's: synchronise both with NTP";
    let same = "shows the same time, so renew that certificate at the gateway";
    for (years, date, expected) in [
        (LONG_AGO, in_2020, ahead),
        (LONG_AGO, SystemTime::now(), same),
        (3000..3001, SystemTime::now(), same),
    ] {
        let date = httpdate::fmt_http_date(date);
        let answer = format!("HTTP/1.1 404 Not Found\r\nDate: {date}\r\nContent-Length: 0\r\n\r\n");
        let port = tls_server::start("gw.localhost", years, answer, &ca_file);
        let message = enroll_at(&format!("https://gw.localhost:{port}"), Some(&ca_file));
        let invalid = format!("certificate at gw.localhost:{port} is not valid at the time");
        assert_has(&message, &[&invalid, expected]);
    }
}

#[test]
fn misspelt_keys_are_named_with_what_was_meant() {
    let folder = enrolled();
    let config = folder.path().join("agent.toml");
    let text = "bakend = 'http://127.0.0.1:1'\nporxy = ''\n[backends]\n\
                'a' = { url = 'http://127.0.0.1:1' }\n[trace]\n";
    fs::write(&config, text).unwrap();
    let mut run = command(&["run", "--config"]);
    run.arg(&config).arg("--state-dir").arg(folder.path());
    let (code, message) = outcome(&mut run);
    assert_eq!(code, Some(2));
    for line in [
        "  bakend: no such key; did you mean `backend`?",
        "  porxy: no such key; did you mean `proxy`?",
        "  backends.a.url: no such key; did you mean `urls`?; the keys are ",
        "  trace: no such key; did you mean `traces`?",
    ] {
        let is_named = message.lines().any(|found| found.starts_with(line));
        assert!(is_named, "{line}: {message}");
    }
}

#[test]
fn misspelt_variables_are_named_with_what_was_meant() {
    let state = tempfile::tempdir().unwrap();
    let path = state.path().to_str().unwrap();
    let mut enroll = command(&["enroll", "--state-dir", path]);
    enroll
        .env("GW_BAKEND", "x")
        .env("GW_ADMIN_TOKEN_FILE", "x")
        .env("GW_TEST_KILLS", "1")
        .env("GW_GATEWAY", "x");
    let (_, message) = outcome(&mut enroll);
    let expected = "GW_BAKEND: no such variable; did you mean `GW_BACKEND`?";
    assert_has(&message, &[expected]);
    assert_eq!(message.matches("no such variable").count(), 1, "{message}");
    let mut doctor = command(&["doctor", "--state-dir", path]);
    let output = doctor.env("GW_BAKEND", "x").output().unwrap();
    let findings = String::from_utf8(output.stdout).unwrap();
    assert_has(&findings, &["did you mean `GW_BACKEND`?"]);
}

#[test]
fn a_state_folder_of_another_user_is_named_with_both_users() {
    let folder = enrolled();
    let path = folder.path().to_str().unwrap();
    for arguments in [
        &["run", "--backend", "http://127.0.0.1:1"][..],
        &[
            "enroll",
            "--gateway",
            "https://gw.invalid",
            "--token",
            TOKEN,
        ],
    ] {
        let mut command = command(arguments);
        command.args(["--state-dir", path]);
        let user = geteuid();
        let (mode, runs_as, remedy) = if user.is_root() {
            // Permissions do not apply to root.
            command.uid(65_534).gid(65_534);
            (0o700, 65_534, "sudo -u gw-agent")
        } else {
            (0o000, user.as_raw(), "`chmod 700` it")
        };
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        let (code, message) = outcome(&mut command);
        fs::set_permissions(path, fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(code, Some(2), "{message}");
        let owner = user.as_raw();
        let process = format!("this process runs as user {runs_as}");
        let users = format!("{process}, and {path} belongs to user {owner}");
        assert_has(&message, &["permission denied", &users, remedy]);
    }
}

#[test]
fn a_state_folder_of_another_user_is_refused_to_root() {
    if !programs::is_root() {
        return;
    }
    let state = enrolled();
    let path = state.path().to_str().unwrap();
    std::os::unix::fs::chown(path, Some(65_534), None).unwrap();
    let enroll = [
        "enroll",
        "--gateway",
        "https://gw.invalid",
        "--token",
        TOKEN,
    ];
    for arguments in [
        &["run", "--backend", "http://127.0.0.1:9"][..],
        &["http", "9"],
        &[&enroll[..], &["--force"]].concat(),
    ] {
        let (code, message) = outcome(command(arguments).args(["--state-dir", path]));
        assert_eq!(code, Some(2), "{message}");
        let found = format!("{path}: it belongs to user 65534, and this process runs as user 0");
        assert_has(&message, &[&found, "sudo -u '#65534'", "--state-dir"]);
    }
}

#[test]
fn only_terminals_get_colours() {
    let state = tempfile::tempdir().unwrap();
    let path = state.path().to_str().unwrap();
    let mut enroll = command(&["enroll", "--state-dir", path]);
    let (_, piped) = outcome(enroll.env("GW_BAKEND", "x").env("TERM", "xterm"));
    assert!(piped.contains("WARN"), "{piped:?}");
    assert!(!piped.contains('\x1b'), "{piped:?}");
    if !programs::usable(&["script"]) {
        return;
    }
    let program = env!("CARGO_BIN_EXE_gw-agent");
    for (no_color, has_colours) in [("", true), ("1", false)] {
        let mut script = Command::new("script");
        script.arg("-qec");
        script.arg(format!("{program} enroll --state-dir {path}"));
        script.arg("/dev/null");
        script.env("NO_COLOR", no_color).env("GW_BAKEND", "x");
        script.env_remove("GW_LOG");
        let shown = String::from_utf8(script.output().unwrap().stdout).unwrap();
        assert!(shown.contains("WARN"), "{shown:?}");
        assert_eq!(shown.contains('\x1b'), has_colours, "{shown:?}");
    }
}
