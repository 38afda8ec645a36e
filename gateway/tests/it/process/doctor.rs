//! `doctor` of both programs, beside a running gateway and agent.

use std::net::TcpListener;
use std::process::Command;

use gw_gateway::demo::{Demo, Options};
use gw_shared::id::AgentId;
use gw_store::{AgentRecord, StoredRecord};
use serde_json::{Value, json};

use crate::support::admin_api::Api;
use crate::support::peers::caller::{connect, get};
use crate::support::peers::held_backend::HeldBackend;
use crate::support::processes::process::{
    Served, config_text, gw_agent, gw_gateway, serve, serve_command,
};
use crate::support::{demo, eventually, options, tunnels};

/// Runs a doctor. Returns a lookup from a check to its verdict and finding, and the exit code.
fn examine(command: &mut Command) -> (impl Fn(&str) -> (String, String) + use<>, i32) {
    let output = command.arg("--json").output().unwrap();
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let code = output.status.code().unwrap();
    assert_eq!(found["ok"], code == 0, "{found}");
    let look = move |check: &str| {
        let checks = found["checks"].as_array().unwrap();
        let finding = checks.iter().find(|finding| finding["check"] == check);
        let finding = finding.unwrap_or_else(|| panic!("no check of {check}: {found:#}"));
        let word = |key: &str| finding[key].as_str().unwrap().to_owned();
        (word("verdict"), word("found"))
    };
    (look, code)
}

#[test]
fn the_ports_of_a_running_gateway_are_not_reported_as_in_use() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("gateway.toml");
    let data_dir = directory.path().join("data");
    std::fs::write(&config, config_text(&data_dir, 0)).unwrap();
    let Served {
        process: _gateway,
        address,
        admin_address,
        ..
    } = serve(&mut serve_command(&config));
    let doctor = |listen: &str, admin: &str| {
        let mut command = gw_gateway();
        command
            .arg("doctor")
            .arg("--config")
            .arg(&config)
            .env("GW_LISTEN", listen)
            .env("GW_ADMIN_LISTEN", admin);
        command
    };
    let (look, code) = examine(&mut doctor(
        &address.to_string(),
        &admin_address.to_string(),
    ));
    assert_eq!(code, 0);
    for check in ["listen", "admin_listen"] {
        assert!(
            look(check).1.ends_with("a gateway has it and answers"),
            "{:?}",
            look(check)
        );
    }
    assert_eq!(look("data_dir").0, "ok");
    assert_eq!(look("certificate").0, "warning");
    // With another configuration the same ports are in use.
    let (look, code) = examine(&mut doctor(&address.to_string(), "127.0.0.1:0"));
    assert_eq!((code, look("listen").0.as_str()), (1, "failed"));
    // The admin port belongs to this gateway, the callers' port to another program.
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = other.local_addr().unwrap().to_string();
    std::thread::spawn(move || other.incoming().for_each(drop));
    let (look, code) = examine(&mut doctor(&listen, &admin_address.to_string()));
    assert_eq!(
        (
            code,
            look("listen").0.as_str(),
            look("admin_listen").0.as_str()
        ),
        (1, "failed", "ok")
    );
}

#[test]
fn a_gateway_that_requires_a_proxy_header_of_this_machine_is_recognised() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("gateway.toml");
    let data_dir = directory.path().join("data");
    let proxies =
        "trusted_proxies = [{ address = \"127.0.0.1\", proxy_protocol = \"required\" }]\n";
    std::fs::write(&config, config_text(&data_dir, 0) + proxies).unwrap();
    let Served {
        process: _gateway,
        address,
        admin_address,
        ..
    } = serve(&mut serve_command(&config));
    let mut doctor = gw_gateway();
    doctor.arg("doctor").arg("--config").arg(&config);
    doctor
        .env("GW_LISTEN", address.to_string())
        .env("GW_ADMIN_LISTEN", admin_address.to_string());
    let (look, code) = examine(&mut doctor);
    assert!(
        look("listen").1.ends_with("a gateway has it and answers"),
        "{:?}",
        look("listen")
    );
    assert_eq!((code, look("trusted_proxies").0.as_str()), (0, "ok"));
}

#[test]
fn doctor_does_not_disturb_a_running_agent() {
    let demo = demo(None);
    let before = tunnels(&demo);
    let backend = TcpListener::bind("127.0.0.1:0").unwrap();
    let state = demo.about.ca_file.with_file_name("agent");
    let doctor = |backend: &str| {
        let mut command = gw_agent();
        command
            .arg("doctor")
            .arg("--state-dir")
            .arg(&state)
            .args(["--backend", backend]);
        command
    };
    let (look, code) = examine(&mut doctor(&format!(
        "http://{}",
        backend.local_addr().unwrap()
    )));
    for check in [
        "state folder",
        "certificate",
        "gateway",
        "clock of the gateway",
    ] {
        assert_eq!(look(check).0, "ok", "{:?}", look(check));
    }
    let tunnel = look("tunnel of demo--echo.eu1.gw.localhost");
    assert_eq!((tunnel.0.as_str(), code), ("ok", 0), "{tunnel:?}");
    let after = tunnels(&demo);
    assert_eq!(
        (after.len(), after[0].generation, after[0].draining),
        (1, before[0].generation, false)
    );
    let mut caller = connect(&demo);
    caller.send(get(&demo, "/status/204"));
    assert_eq!(caller.response().status, 204);

    drop(backend);
    let (look, code) = examine(&mut doctor("http://127.0.0.1:1"));
    assert_eq!(
        (
            look("backend of demo--echo.eu1.gw.localhost").0.as_str(),
            code
        ),
        ("failed", 1)
    );
    demo.stop();
}

#[test]
fn a_service_with_one_ready_agent_of_several_has_a_warning() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("gateway.toml");
    let data_dir = directory.path().join("data");
    std::fs::write(&config, config_text(&data_dir, 0)).unwrap();
    let demo = Demo::start(&Options {
        data_dir: Some(data_dir),
        ..options(None)
    })
    .unwrap();
    let control = demo.gateway().control();
    let api = Api(&demo.about);
    let admin = demo
        .about
        .admin_url
        .trim_start_matches("http://")
        .to_owned();
    let doctor = || {
        let mut command = gw_gateway();
        command
            .arg("doctor")
            .arg("--config")
            .arg(&config)
            .env("GW_ADMIN_LISTEN", &admin);
        examine(&mut command).0
    };
    assert_eq!(api.get("/warnings").body, json!({ "items": [] }));
    let look = doctor();
    let all_well = (
        "ok".to_owned(),
        "no service with several agents depends on one of them, no tunnel was full, and no own \
         domain needs attention"
            .to_owned(),
    );
    assert_eq!(look("services"), all_well);
    let (verdict, found) = look("audit log");
    assert!(
        verdict == "ok" && found.ends_with(" entries, as written"),
        "{found}"
    );

    let ready = control.records().agents.into_values().next().unwrap();
    let lost = AgentRecord {
        id: AgentId::random(),
        name: "lost".to_owned(),
        key: None,
        ..ready.clone()
    };
    control.put(&StoredRecord::Agent(lost.clone())).unwrap();
    let found = format!(
        "1 of 2 agents is ready, {} ({}); {} (lost): no tunnel",
        ready.id, ready.name, lost.id
    );
    let warning = &api.get("/warnings").body["items"][0];
    assert_eq!(
        (&warning["account"], &warning["service"]),
        (&json!("demo"), &json!("echo"))
    );
    assert_eq!(warning["found"], found);
    let look = doctor();
    assert_eq!(look("service demo/echo"), ("warning".to_owned(), found));
    demo.stop();
    let look = doctor();
    assert_eq!(look("services").1, "not checked: the gateway does not run");
}

#[test]
fn a_service_whose_tunnel_was_full_has_a_warning() {
    let backend = HeldBackend::start();
    let demo = Demo::start(&Options {
        slots: Some(1),
        ..options(Some(backend.url.clone()))
    })
    .unwrap();
    let api = Api(&demo.about);
    assert_eq!(api.get("/warnings").body, json!({ "items": [] }));
    let mut caller = connect(&demo);
    caller.send(get(&demo, "/held"));
    let warning = || api.get("/warnings").body["items"].get(0).cloned();
    let full = eventually("the tunnel is full", warning);
    let found = full["found"].as_str().unwrap();
    assert!(found.contains(" is full now: all 1 slots"), "{full}");
    let remedy = full["remedy"].as_str().unwrap();
    assert!(
        remedy.contains("GW_AGENT_MAX_CONCURRENT_BACKEND_REQUESTS"),
        "{full}"
    );
    // Also once it has room again.
    backend.release();
    assert_eq!(caller.response().status, 200);
    let was_full = |warning: Value| {
        let found = warning["found"].as_str().unwrap();
        found.contains(" was full ").then_some(())
    };
    eventually("the tunnel was full", || warning().and_then(was_full));
    demo.stop();
}
