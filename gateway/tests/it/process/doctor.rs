//! `doctor` of both programs, beside a running gateway and agent.

mod faults;
mod healthy;

use std::net::TcpListener;

use serde_json::{Value, json};

use self::healthy::agent;
use crate::support::doctor::{OF_AGENT, doctor_of, examine};
use crate::support::eventually;
use crate::support::peers::held_backend::HeldBackend;
use crate::support::processes::process::{config_text, gw_gateway, serve, serve_command};
use crate::support::scene::Scene;

#[test]
fn a_gateway_that_requires_a_proxy_header_of_this_machine_is_recognised() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("gateway.toml");
    let proxies =
        "trusted_proxies = [{ address = \"127.0.0.1\", proxy_protocol = \"required\" }]\n";
    let text = config_text(&directory.path().join("data"), 0) + proxies;
    std::fs::write(&config, text).unwrap();
    let served = serve(&mut serve_command(&config));
    let found = examine(&mut doctor_of(&config, &served));
    let listener = &found.of("listen").found;
    assert!(
        listener.ends_with("a gateway has it and answers"),
        "{listener}"
    );
    assert_eq!(found.of("trusted_proxies").verdict, "ok");
    found.assert_complaints(&[("certificate", "warning")]);
}

#[test]
fn doctor_does_not_disturb_a_running_agent() {
    let scene = Scene::service().agent().start();
    let before = scene.tunnels();
    let backend = TcpListener::bind("127.0.0.1:0").unwrap();
    let backend = format!("http://{}", backend.local_addr().unwrap());
    let mut doctor = agent("doctor", &scene.state_dir("agent"));
    examine(doctor.args(["--backend", &backend])).assert(&OF_AGENT, &[]);
    let after = scene.tunnels();
    assert_eq!(
        (after.len(), after[0].generation, after[0].draining),
        (1, before[0].generation, false)
    );
    assert_eq!(scene.connect().ask(scene.get("/status/204")).status, 204);
    scene.stop();
}

#[test]
fn a_service_with_one_ready_agent_of_several_has_a_warning() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("gateway.toml");
    let data_dir = directory.path().join("data");
    std::fs::write(&config, config_text(&data_dir, 0)).unwrap();
    let scene = Scene::service().agent().data_dir(&data_dir).start();
    let api = scene.api();
    let admin = scene.admin_address().to_string();
    let doctor = || {
        let mut command = gw_gateway();
        command.args(["doctor", "--config"]).arg(&config);
        examine(command.env("GW_ADMIN_LISTEN", &admin))
    };
    assert_eq!(api.get("/warnings").body, json!({ "items": [] }));
    let found = doctor();
    let all_well = "no service with several agents depends on one of them, no tunnel was full, and \
                    no own domain needs attention";
    assert_eq!(found.of("services").found, all_well);
    let entries = &found.of("audit log").found;
    assert!(entries.ends_with(" entries, as written"), "{entries}");
    found.assert_complaints(&[("certificate", "warning")]);

    let ready = api.agents("demo").remove(0);
    let id = ready["agent_id"].as_str().unwrap();
    let name = ready["name"].as_str().unwrap();
    let lost = scene.enroll("demo", &["echo"], &directory.path().join("lost"));
    let found = format!("1 of 2 agents is ready, {id} ({name}); {lost} (lost): no tunnel");
    let warning = &api.get("/warnings").body["items"][0];
    assert_eq!(
        (&warning["account"], &warning["service"]),
        (&json!("demo"), &json!("echo"))
    );
    assert_eq!(warning["found"], found);
    let looked = doctor();
    assert_eq!(looked.of("service demo/echo").found, found);
    looked.assert_complaints(&[("certificate", "warning"), ("service demo/echo", "warning")]);
    scene.stop();
    let not_checked = "not checked: the gateway does not run";
    assert_eq!(doctor().of("services").found, not_checked);
}

#[test]
fn a_service_whose_tunnel_was_full_has_a_warning() {
    let backend = HeldBackend::start();
    let scene = Scene::service()
        .agent_to(backend.url.clone())
        .slots(1)
        .start();
    let api = scene.api();
    assert_eq!(api.get("/warnings").body, json!({ "items": [] }));
    let mut caller = scene.connect();
    caller.send(scene.get("/held"));
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
    scene.stop();
}
