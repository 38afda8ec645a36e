//! Errors of a running agent, in its log and in its admin endpoints. agent/tests/cli.rs has those
//! of its commands.

use std::net::SocketAddr;

use serde_json::Value;

use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::{Log, Running, start_logged};
use crate::support::processes::successor::admin;

/// Status and body of `/readyz`.
fn readiness(address: SocketAddr) -> (u16, String) {
    let (status, body) = admin(address, "/readyz");
    (status, body.trim().to_owned())
}

/// The address of the admin endpoints, from the agent's log.
fn admin_address(log: &Log) -> SocketAddr {
    log.find(|line| {
        let is_listening = line["message"] == "serving metrics";
        is_listening.then(|| line["address"].as_str().unwrap().parse().unwrap())
    })
}

/// Starts the agent with its admin endpoints, a log in JSON, and this environment variable.
fn start(
    prepared: &Prepared,
    gateway: SocketAddr,
    backend: &str,
    variable: (&str, &str),
) -> (Running, Log) {
    let mut command = prepared.agent_command("agent", gateway.port(), backend);
    command
        .env("GW_AGENT_METRICS_LISTEN", "127.0.0.1:0")
        .env("GW_LOG_FORMAT", "json")
        .env(variable.0, variable.1);
    start_logged(&mut command)
}

fn wait_until_ready(admin: SocketAddr) {
    eventually("the agent is ready", || {
        (readiness(admin).0 == 200).then_some(())
    });
}

/// The answer of `/readyz` if the only backend is down.
fn all_down(backend: &str) -> (u16, String) {
    let service = "demo--echo.eu1.gw.localhost";
    (503, format!("all backends down: {service} ({backend})"))
}

#[test]
fn a_misspelt_variable_is_logged_with_the_name_that_was_meant() {
    let prepared = Prepared::new();
    let (_gateway, address) = prepared.serve(0);
    let url = backend::answering("HTTP/1.1 204 X\r\n\r\n");
    let (_agent, log) = start(&prepared, address, &url, ("GW_BAKEND", "misspelt"));
    log.line_with("did you mean `GW_BACKEND`?");
}

#[test]
fn a_backend_that_is_down_is_logged_once_and_shown_by_readyz_until_it_is_up() {
    let prepared = Prepared::new();
    let (_gateway, address) = prepared.serve(0);
    let (socket, down) = backend::refusing();
    let url = format!("http://{down}");
    let (_agent, log) = start(&prepared, address, &url, ("GW_STANDBY", "false"));
    let admin = admin_address(&log);
    // A backend without any attempt is not known to be down.
    wait_until_ready(admin);
    for _ in 0..3 {
        let refused = prepared.connect(address).ask(prepared.get("/"));
        assert_eq!(refused.code(), "GW_BACKEND_UNREACHABLE");
    }
    assert_eq!(readiness(admin), all_down(&url));

    socket.listen(16).unwrap();
    std::thread::spawn(move || while socket.accept().is_ok() {});
    // The attempt of the agent's own is enough: no request is made.
    wait_until_ready(admin);
    let mut changes = Vec::new();
    log.find(|line: &Value| {
        if line["backend"] == url.as_str() {
            let message = line["message"].as_str().unwrap();
            changes.push(message.split(':').next().unwrap().to_owned());
        }
        (changes.last()? == "the backend is up again").then_some(())
    });
    assert_eq!(changes, ["the backend is down", "the backend is up again"]);
}

#[test]
fn a_backend_that_fails_its_health_check_is_down_although_it_takes_connections() {
    let prepared = Prepared::new();
    let (_gateway, address) = prepared.serve(0);
    let url = backend::answering("HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n");
    let (_agent, log) = start(&prepared, address, &url, ("GW_HEALTH_CHECK", "/up"));
    let admin = admin_address(&log);
    // One failed check is not enough.
    wait_until_ready(admin);
    let error = log.find(|line: &Value| {
        let is_down = line["message"]
            .as_str()?
            .starts_with("the backend is down: its health check fails");
        is_down.then(|| line["error"].as_str().unwrap().to_owned())
    });
    assert_eq!(error, "the status is 503 Service Unavailable");
    assert_eq!(readiness(admin), all_down(&url));
    // There is no other backend, so it gets the request. Its connection does not make it healthy.
    let response = prepared.connect(address).ask(prepared.get("/"));
    assert_eq!(response.status, 503);
    assert_eq!(readiness(admin), all_down(&url));
}
