//! Processes of gateway and agent: configuration errors, signals, exit codes and crashes.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::support::peers::caller::Caller;
use crate::support::peers::held_backend::HeldBackend;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process;
use crate::support::processes::process::{
    config_text, gw_agent, gw_gateway, send_signal, start_demo,
};
use crate::support::stopwatch::{within, within_a_second};
use crate::support::{eventually, programs};

#[test]
fn a_wrong_configuration_exits_with_2_and_names_every_mistake() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gateway.toml");
    fs::write(&path, "region = \"EU\"\ncolour = 1\n").unwrap();
    let output = gw_gateway()
        .args(["serve", "--check", "--config"])
        .arg(&path)
        .output()
        .unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2));
    for key in ["region", "domain", "data_dir", "colour"] {
        assert!(
            message.contains(&format!("\n  {key}: ")),
            "{key} in {message}"
        );
    }
    fs::write(&path, config_text(directory.path(), 0)).unwrap();
    let output = gw_gateway()
        .args(["serve", "--check", "--config"])
        .arg(&path)
        .output()
        .unwrap();
    assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0));
    let missing = gw_gateway()
        .args(["serve", "--config", "nowhere.toml"])
        .output()
        .unwrap();
    assert_eq!(missing.status.code(), Some(2));
}

#[test]
fn a_log_that_cannot_be_written_ends_no_thread() {
    let directory = tempfile::tempdir().unwrap();
    let full = || {
        fs::OpenOptions::new()
            .write(true)
            .open("/dev/full")
            .unwrap()
    };
    let mut command = gw_gateway();
    command
        .args(["demo", "--data-dir"])
        .arg(directory.path())
        .stderr(full());
    let (mut demo, about) = start_demo(&mut command);
    // Each refused request is logged.
    let url = format!("{}/", about["tenant_url"].as_str().unwrap());
    let authority = about["ca_file"].as_str().unwrap();
    if programs::usable(&["curl"]) {
        for key in ["wrong", about["service_key"].as_str().unwrap()] {
            let field = format!("X-Gw-Service-Key: {key}");
            let output = Command::new("curl")
                .args(["--silent", "--cacert", authority, "-H", &field, &url])
                .output();
            assert!(output.unwrap().status.success());
        }
    }
    demo.signal("TERM");
    assert_eq!(demo.exit_code(), Some(0));
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
        let output = gw_gateway()
            .arg("serve")
            .args(arguments)
            .arg("--config")
            .arg(file("gateway.toml"))
            .output();
        let output = output.unwrap();
        (
            output.status.code().unwrap(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    assert_eq!(
        check(&["--check"], "good.crt", "good.key", ""),
        (0, String::new())
    );
    let wrong = wrong_files(|name| file(name).display().to_string());
    for (certificate, key, more, expected) in wrong {
        // A start reports the same errors and does not serve.
        for arguments in [&["--check"][..], &[]] {
            let (code, message) = check(arguments, certificate, key, more);
            assert_eq!(code, 2, "{message}");
            for part in &expected {
                assert!(message.contains(part), "{part} in {message}");
            }
        }
    }
    // An expired certificate is only a warning, because the clock may be wrong.
    let (code, message) = check(&["--check"], "expired.crt", "expired.key", "");
    assert!(
        code == 0 && message.contains("tls_certificate") && message.contains("expired"),
        "{code} {message}"
    );
}

#[test]
fn the_demo_prints_one_line_of_json_and_exits_with_0() {
    let (mut running, about) = start_demo(gw_gateway().arg("demo"));
    let keys: Vec<&str> = about
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    let mut expected = [
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
    expected.sort_unstable();
    let mut found = keys.clone();
    found.sort_unstable();
    assert_eq!(found, expected);
    // The curl command that the demo prints.
    if programs::usable(&["curl"]) {
        let tenant = about["tenant_url"].as_str().unwrap();
        let key = about["service_key"].as_str().unwrap();
        let port = tenant.rsplit(':').next().unwrap();
        let host = tenant.trim_start_matches("https://");
        let curl = Command::new("curl")
            .args([
                "--silent",
                "--show-error",
                "--cacert",
                about["ca_file"].as_str().unwrap(),
            ])
            .args([
                "--resolve",
                &format!("{}:{port}:127.0.0.1", host.split(':').next().unwrap()),
            ])
            .args([
                "-H",
                &format!("X-Gw-Service-Key: {key}"),
                &format!("{tenant}/hello?name=you"),
            ])
            .output()
            .unwrap();
        let echoed: serde_json::Value = serde_json::from_slice(&curl.stdout).unwrap();
        assert_eq!(echoed["target"], "/hello?name=you");
    }
    running.signal("TERM");
    assert_eq!(running.exit_code(), Some(0));
    assert!(
        !Path::new(about["ca_file"].as_str().unwrap()).exists(),
        "the temporary folder is removed"
    );
}

#[test]
fn crashes_are_reported_at_once_and_recovered_from() {
    let prepared = Prepared::new();
    let backend = crate::support::peers::backend::start(|mut peer| {
        while let Ok((head, _, _)) = peer.request() {
            if head.target == "/hang" {
                // Waits until the agent has ended.
                peer.is_closed();
                return;
            }
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        }
    });
    let (gateway, address) = prepared.serve(0);
    let _port = process::hold(address);
    let mut caller = prepared.connect(address);
    caller.send(prepared.get("/"));
    assert_eq!(caller.response().code(), "AGENT_UNAVAILABLE");

    let mut agent = prepared.run_agent(address.port(), &backend);
    prepared.wait_for_tunnel(address);
    caller.send(prepared.get("/hang"));
    let mut watcher = prepared.connect(address);
    watcher.send(prepared.get("/"));
    assert_eq!(watcher.response().status, 200);
    assert!(
        process::children(agent.id())
            .into_iter()
            .all(|worker| send_signal(worker, "KILL"))
    );
    assert_eq!(caller.response().code(), "GW_RELAY_ERROR");
    caller.send(prepared.get("/"));
    assert_eq!(caller.response().code(), "AGENT_UNAVAILABLE");
    // The service manager starts it again.
    assert_eq!(agent.exit_code(), Some(1));

    let _agent = prepared.run_agent(address.port(), &backend);
    prepared.wait_for_tunnel(address);
    // After a gateway crash, the agent reconnects to a new gateway on the same port.
    gateway.signal("KILL");
    drop(gateway);
    let (mut gateway, address) = prepared.serve(address.port());
    prepared.wait_for_tunnel(address);
    gateway.signal("TERM");
    assert_eq!(gateway.exit_code(), Some(0));
}

#[test]
fn a_drain_finishes_requests_and_a_reload_keeps_connections() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let (mut gateway, address) = prepared.serve(0);
    let _agent = prepared.run_agent(address.port(), &backend.url);
    prepared.wait_for_tunnel(address);

    let mut kept = prepared.connect(address);
    kept.send(prepared.get("/"));
    assert_eq!(kept.response().status, 200);
    let certificate = |caller: &Caller| caller.stream.conn.peer_certificates().unwrap()[0].clone();
    let before = certificate(&kept);
    gateway.signal("HUP");
    // Each reload issues a new development certificate, which new connections get.
    eventually("new connections get another certificate", || {
        let mut caller = prepared.connect(address);
        caller.send(prepared.get("/"));
        assert_eq!(caller.response().status, 200);
        (certificate(&caller) != before).then_some(())
    });
    kept.send(prepared.get("/"));
    assert_eq!(kept.response().status, 200);

    kept.send(prepared.get("/held"));
    backend.wait_for_held();
    let mut idle = prepared.connect(address);
    idle.send(prepared.get("/"));
    assert_eq!(idle.response().status, 200);
    gateway.signal("TERM");
    assert!(idle.is_closed());
    // The listener is closed; the running request continues.
    backend.release();
    let response = kept.response();
    assert_eq!(
        (response.status.as_u16(), response.header("connection")),
        (200, "close")
    );
    assert!(kept.is_closed());
    assert_eq!(gateway.exit_code(), Some(0));
}

#[test]
fn a_second_signal_ends_a_drain_at_once() {
    let prepared = Prepared::new();
    let (seen, requests) = std::sync::mpsc::channel();
    let backend = crate::support::peers::backend::start(move |mut peer| {
        while let Ok((head, _, _)) = peer.request() {
            if head.target == "/for-ever" {
                seen.send(()).unwrap();
                peer.is_closed();
                return;
            }
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        }
    });
    let (mut gateway, address) = prepared.serve(0);
    let _agent = prepared.run_agent(address.port(), &backend);
    prepared.wait_for_tunnel(address);
    let mut caller = prepared.connect(address);
    let mut idle = prepared.connect(address);
    idle.send(prepared.get("/"));
    assert_eq!(idle.response().status, 200);
    caller.send(prepared.get("/for-ever"));
    requests.recv_timeout(crate::support::SOON).unwrap();
    gateway.signal("TERM");
    // The closed idle connection shows that the drain has begun.
    assert!(idle.is_closed());
    gateway.signal("TERM");
    assert_eq!(gateway.exit_code(), Some(1));
}

#[test]
fn a_state_folder_is_used_by_one_agent_process_at_a_time() {
    let prepared = Prepared::new();
    let backend =
        crate::support::peers::backend::answering("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    let (_gateway, address) = prepared.serve(0);
    let mut agent = prepared.run_agent(address.port(), &backend);
    prepared.wait_for_tunnel(address);
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
    let enroll = [
        "enroll",
        "--force",
        "--gateway",
        "https://127.0.0.1:1",
        "--token",
        token,
    ];
    for second in [&["run", "--backend", &backend][..], &enroll] {
        let (code, message) = in_folder(second);
        assert_eq!(code, Some(2), "{message}");
        let folder = folder.to_str().unwrap();
        assert!(
            message.contains(&format!("{folder} is in use by another gw-agent process")),
            "{message}"
        );
    }
    let (code, found) = in_folder(&["doctor", "--backend", &backend]);
    assert!(
        found.contains("the gateway accepts it"),
        "{code:?}: {found}"
    );
    // The running agent is not disturbed.
    let mut caller = prepared.connect(address);
    caller.send(prepared.get("/"));
    assert_eq!(caller.response().status, 200);
    agent.signal("TERM");
    assert_eq!(agent.exit_code(), Some(0));
    let _agent = prepared.run_agent(address.port(), &backend);
    prepared.wait_for_tunnel(address);
}

#[test]
fn an_agent_stops_after_its_last_request_with_or_without_a_gateway() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let (gateway, address) = prepared.serve(0);
    let mut agent = prepared.run_agent(address.port(), &backend.url);
    prepared.wait_for_tunnel(address);
    let mut caller = prepared.connect(address);
    caller.send(prepared.get("/held"));
    backend.wait_for_held();
    agent.signal("TERM");
    let mut other = prepared.connect(address);
    eventually("the gateway sends no more requests to the agent", || {
        other.send(prepared.get("/"));
        let response = other.response();
        (response.status != 200).then(|| assert_eq!(response.code(), "AGENT_UNAVAILABLE"))
    });
    within_a_second("the stop of an agent after its last request", || {
        backend.release();
        assert_eq!(caller.response().status, 200);
        assert_eq!(agent.exit_code(), Some(0));
    });

    let mut agent = prepared.run_agent(address.port(), &backend.url);
    prepared.wait_for_tunnel(address);
    gateway.signal("STOP");
    // At most 5 seconds for the confirmation that no request is in flight, and one second for
    // GOAWAY.
    within(Duration::from_secs(10), "the stop of an agent", || {
        agent.signal("TERM");
        assert_eq!(agent.exit_code(), Some(0));
    });
}
