//! Processes of gateway and agent: configuration errors, signals, exit codes and crashes.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use serde_json::Value;

use crate::support::peers::backend;
use crate::support::peers::caller::Caller;
use crate::support::peers::held_backend::HeldBackend;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process;
use crate::support::processes::process::{
    config_text, gw_agent, gw_gateway, send_signal, start_demo,
};
use crate::support::stopwatch::{within, within_a_second};
use crate::support::{eventually, programs};

/// Exit code and messages of `gw-gateway serve` with this configuration file, which does not serve.
fn serve(options: &[&str], config: &Path) -> (Option<i32>, String) {
    let output = gw_gateway()
        .arg("serve")
        .args(options)
        .arg("--config")
        .arg(config)
        .output()
        .unwrap();
    (
        output.status.code(),
        String::from_utf8(output.stderr).unwrap(),
    )
}

#[test]
fn a_wrong_configuration_exits_with_2_and_names_every_mistake() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gateway.toml");
    fs::write(&path, "region = \"EU\"\ncolour = 1\n").unwrap();
    let (code, message) = serve(&["--check"], &path);
    assert_eq!(code, Some(2));
    for key in ["region", "domain", "data_dir", "colour"] {
        let mistake = format!("\n  {key}: ");
        assert!(message.contains(&mistake), "{key} in {message}");
    }
}

#[test]
fn a_missing_configuration_exits_with_2() {
    assert_eq!(serve(&[], Path::new("nowhere.toml")).0, Some(2));
}

/// Sends a GET with curl, as the demo prints it. `None` if curl is not installed.
fn curl(about: &Value, key: &str, target: &str) -> Option<Output> {
    if !programs::usable(&["curl"]) {
        return None;
    }
    let url = about["tenant_url"].as_str().unwrap();
    let (host, port) = url[8..].split_once(':').unwrap();
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--show-error", "--cacert"])
        .arg(about["ca_file"].as_str().unwrap())
        .args(["--resolve", &format!("{host}:{port}:127.0.0.1")])
        .args(["-H", &format!("X-Gw-Service-Key: {key}")])
        .arg(format!("{url}{target}"));
    Some(curl.output().unwrap())
}

#[test]
fn a_log_that_cannot_be_written_ends_no_thread() {
    let directory = tempfile::tempdir().unwrap();
    let full = || fs::File::create("/dev/full").unwrap();
    let mut command = gw_gateway();
    command
        .args(["demo", "--data-dir"])
        .arg(directory.path())
        .stderr(full());
    let (mut demo, about) = start_demo(&mut command);
    // Each refused request is logged.
    for key in ["wrong", about["service_key"].as_str().unwrap()] {
        let answered = curl(&about, key, "/");
        assert!(answered.is_none_or(|output| output.status.success()));
    }
    demo.stop();
    let output = gw_agent()
        .args(["run", "--state-dir"])
        .arg(directory.path().join("none"))
        .stderr(full())
        .output();
    assert_eq!(output.unwrap().status.code(), Some(2));
}

/// A self-signed certificate for these names and its key, in PEM.
fn issue(names: &[&str], not_after: (i32, u8, u8)) -> (String, String) {
    let key = rcgen::KeyPair::generate().unwrap();
    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
    let mut params = rcgen::CertificateParams::new(names).unwrap();
    params.not_after = rcgen::date_time_ymd(not_after.0, not_after.1, not_after.2);
    (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
}

/// Files of a certificate and a key, more configuration, and parts of the message about them.
type WrongFiles = (&'static str, &'static str, &'static str, Vec<String>);

fn wrong_files(path: impl Fn(&str) -> String) -> [WrongFiles; 6] {
    [
        (
            "good.crt",
            "elsewhere.key",
            "",
            vec![
                format!("\n  tls_key: {}: ", path("elsewhere.key")),
                path("good.crt"),
            ],
        ),
        (
            "elsewhere.crt",
            "good.key",
            "colour = 1\n",
            vec![
                format!("\n  tls_key: {}: ", path("good.key")),
                format!("\n  tls_certificate: {}: ", path("elsewhere.crt")),
                "eu1.gw.localhost and *.eu1.gw.localhost".to_owned(),
                "example.com".to_owned(),
                "\n  colour: ".to_owned(),
            ],
        ),
        (
            "empty.pem",
            "good.key",
            "",
            vec![format!(
                "\n  tls_certificate: {}: no certificate",
                path("empty.pem")
            )],
        ),
        (
            "good.crt",
            "empty.pem",
            "",
            vec![format!(
                "\n  tls_key: {}: no private key",
                path("empty.pem")
            )],
        ),
        (
            "missing.crt",
            "missing.key",
            "",
            vec![
                format!("tls_certificate: {}: ", path("missing.crt")),
                format!("tls_key: {}: ", path("missing.key")),
            ],
        ),
        (
            "good.key",
            "good.crt",
            "",
            vec!["no certificate".to_owned(), "no private key".to_owned()],
        ),
    ]
}

#[test]
fn a_check_reports_certificate_errors_with_all_other_mistakes() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name);
    let (good, key) = issue(&["eu1.gw.localhost", "*.eu1.gw.localhost"], (2100, 1, 1));
    let (elsewhere, other_key) = issue(&["example.com"], (2100, 1, 1));
    let (expired, expired_key) = issue(&["eu1.gw.localhost", "*.eu1.gw.localhost"], (2001, 1, 1));
    for (name, contents) in [
        ("good.crt", &good),
        ("good.key", &key),
        ("elsewhere.crt", &elsewhere),
        ("elsewhere.key", &other_key),
        ("expired.crt", &expired),
        ("expired.key", &expired_key),
        ("empty.pem", &"nothing\n".to_owned()),
    ] {
        fs::write(file(name), contents).unwrap();
    }
    let check = |arguments: &[&str], certificate: &str, key: &str, more: &str| {
        let text = format!(
            "{}tls_certificate = \"{}\"\ntls_key = \"{}\"\n{more}",
            config_text(&file("data"), 0),
            file(certificate).display(),
            file(key).display()
        );
        fs::write(file("gateway.toml"), text).unwrap();
        serve(arguments, &file("gateway.toml"))
    };
    let found = check(&["--check"], "good.crt", "good.key", "");
    assert_eq!(found, (Some(0), String::new()));
    let wrong = wrong_files(|name| file(name).display().to_string());
    for (certificate, key, more, expected) in wrong {
        // A start reports the same errors and does not serve.
        for arguments in [&["--check"][..], &[]] {
            let (code, message) = check(arguments, certificate, key, more);
            assert_eq!(code, Some(2), "{message}");
            for part in &expected {
                assert!(message.contains(part), "{part} in {message}");
            }
        }
    }
    // An expired certificate is only a warning, because the clock may be wrong.
    let (code, message) = check(&["--check"], "expired.crt", "expired.key", "");
    assert!(
        code == Some(0) && message.contains("tls_certificate") && message.contains("expired"),
        "{code:?} {message}"
    );
}

#[test]
fn the_demo_prints_one_line_of_json_and_exits_with_0() {
    let (mut running, about) = start_demo(gw_gateway().arg("demo"));
    let keys: BTreeSet<&str> = about
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    let expected = [
        "base_url",
        "tenant_url",
        "account",
        "service",
        "client_id",
        "client_secret",
        "service_key",
        "ca_file",
        "admin_url",
        "console_url",
        "admin_token",
    ];
    assert_eq!(keys, expected.into());
    let key = about["service_key"].as_str().unwrap();
    if let Some(output) = curl(&about, key, "/hello?name=you") {
        let echoed: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(echoed["target"], "/hello?name=you");
    }
    running.stop();
    assert!(
        !Path::new(about["ca_file"].as_str().unwrap()).exists(),
        "the temporary folder is removed"
    );
}

#[test]
fn the_crash_of_an_agent_is_reported_at_once() {
    let prepared = Prepared::new();
    let backend = backend::start(|mut peer| {
        while let Ok((head, _, _)) = peer.request() {
            if head.target == "/hang" {
                // Waits until the agent has ended.
                peer.is_closed();
                return;
            }
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        }
    });
    let (_gateway, address) = prepared.serve(0);
    let mut caller = prepared.connect(address);
    assert_eq!(caller.ask(prepared.get("/")).code(), "AGENT_UNAVAILABLE");

    let mut agent = prepared.run_agent(address.port(), &backend);
    prepared.wait_for_tunnel(address);
    caller.send(prepared.get("/hang"));
    let mut watcher = prepared.connect(address);
    assert_eq!(watcher.ask(prepared.get("/")).status, 200);
    assert!(
        process::children(agent.id())
            .into_iter()
            .all(|worker| send_signal(worker, "KILL"))
    );
    assert_eq!(caller.response().code(), "GW_RELAY_ERROR");
    assert_eq!(caller.ask(prepared.get("/")).code(), "AGENT_UNAVAILABLE");
    // The service manager starts it again.
    assert_eq!(agent.exit_code(), Some(1));
    let _agent = prepared.run_agent(address.port(), &backend);
    prepared.wait_for_tunnel(address);
}

#[test]
fn an_agent_reconnects_after_a_crash_of_its_gateway() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let (gateway, _agent) = prepared.start(&backend.url);
    let address = gateway.address;
    let _port = process::hold(address);
    gateway.process.signal("KILL");
    drop(gateway);
    let (mut gateway, _) = prepared.serve(address.port());
    prepared.wait_for_tunnel(address);
    gateway.stop();
}

#[test]
fn a_reload_keeps_connections() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let (gateway, _agent) = prepared.start(&backend.url);
    let mut kept = prepared.connect(gateway.address);
    assert_eq!(kept.ask(prepared.get("/")).status, 200);
    let certificate = |caller: &Caller| caller.stream.conn.peer_certificates().unwrap()[0].clone();
    let before = certificate(&kept);
    gateway.process.signal("HUP");
    // Each reload issues a new development certificate, which new connections get.
    eventually("new connections get another certificate", || {
        let mut caller = prepared.connect(gateway.address);
        assert_eq!(caller.ask(prepared.get("/")).status, 200);
        (certificate(&caller) != before).then_some(())
    });
    assert_eq!(kept.ask(prepared.get("/")).status, 200);
}

#[test]
fn a_second_signal_ends_a_drain_at_once() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let (mut gateway, _agent) = prepared.start(&backend.url);
    let mut caller = prepared.connect(gateway.address);
    let mut idle = prepared.connect(gateway.address);
    assert_eq!(idle.ask(prepared.get("/")).status, 200);
    caller.send(prepared.get("/held"));
    backend.wait_for_held();
    gateway.process.signal("TERM");
    // The closed idle connection shows that the drain has begun.
    assert!(idle.is_closed());
    gateway.process.signal("TERM");
    assert_eq!(gateway.process.exit_code(), Some(1));
}

#[test]
fn a_state_folder_is_used_by_one_agent_process_at_a_time() {
    let prepared = Prepared::new();
    let backend = backend::answering("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    let (gateway, mut agent) = prepared.start(&backend);
    let folder = prepared.path("agent");
    let in_folder = |arguments: &[&str]| {
        let output = gw_agent()
            .args(arguments)
            .arg("--state-dir")
            .arg(&folder)
            .output()
            .unwrap();
        (
            output.status.code(),
            String::from_utf8(output.stderr).unwrap() + &String::from_utf8_lossy(&output.stdout),
        )
    };
    let token = "gw_et_0123456789abcdef.secret";
    let gateway_url = "https://127.0.0.1:1";
    for second in [
        &["run", "--backend", &backend][..],
        &[
            "enroll",
            "--force",
            "--gateway",
            gateway_url,
            "--token",
            token,
        ],
    ] {
        let (code, message) = in_folder(second);
        assert_eq!(code, Some(2), "{message}");
        let owner = format!(
            "{} is in use by another gw-agent process (pid ",
            folder.display()
        );
        let (_, rest) = message
            .split_once(&owner)
            .unwrap_or_else(|| panic!("{message}"));
        let pid = rest.split(')').next().unwrap();
        let program = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap();
        assert_eq!(program.trim(), "gw-agent");
    }
    let (code, found) = in_folder(&["doctor", "--backend", &backend]);
    assert!(
        found.contains("the gateway accepts it"),
        "{code:?}: {found}"
    );
    // The running agent is not disturbed.
    let mut caller = prepared.connect(gateway.address);
    assert_eq!(caller.ask(prepared.get("/")).status, 200);
    agent.stop();
    let _agent = prepared.run_agent(gateway.address.port(), &backend);
    prepared.wait_for_tunnel(gateway.address);
}

#[test]
fn an_agent_stops_after_its_last_request() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let (gateway, mut agent) = prepared.start(&backend.url);
    let mut caller = prepared.connect(gateway.address);
    caller.send(prepared.get("/held"));
    backend.wait_for_held();
    agent.signal("TERM");
    let mut other = prepared.connect(gateway.address);
    eventually("the gateway sends no more requests to the agent", || {
        let response = other.ask(prepared.get("/"));
        (response.status != 200).then(|| assert_eq!(response.code(), "AGENT_UNAVAILABLE"))
    });
    within_a_second("the stop of an agent after its last request", || {
        backend.release();
        assert_eq!(caller.response().status, 200);
        assert_eq!(agent.exit_code(), Some(0));
    });
}

#[test]
fn an_agent_stops_although_its_gateway_is_silent() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let (gateway, mut agent) = prepared.start(&backend.url);
    gateway.process.signal("STOP");
    // At most 5 seconds for the confirmation that no request is in flight, and one second for
    // GOAWAY.
    within(Duration::from_secs(10), "the stop of an agent", || {
        agent.stop();
    });
}
