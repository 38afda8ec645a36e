//! Errors of a running agent, in its log and in its admin endpoints. agent/tests/cli.rs has those
//! of its commands.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use serde_json::Value;

use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::{Log, start_logged};

/// Status and body of `/readyz`.
fn readiness(address: SocketAddr) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream
        .write_all(b"GET /readyz HTTP/1.1\r\nHost: agent\r\n\r\n")
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (
        head.split(' ').nth(1).unwrap().parse().unwrap(),
        body.trim().to_owned(),
    )
}

/// The address of the admin endpoints, from the agent's log.
fn admin_address(log: &Log) -> SocketAddr {
    log.find(|line| {
        let is_listening = line["message"] == "serving metrics";
        is_listening.then(|| line["address"].as_str().unwrap().parse().unwrap())
    })
}

#[test]
fn a_backend_that_is_down_is_logged_once_and_shown_by_readyz_until_it_is_up() {
    let prepared = Prepared::new();
    let (_gateway, address) = prepared.serve(0);
    let (socket, down) = backend::refusing();
    let url = format!("http://{down}");
    let mut command = prepared.agent_command("agent", address.port(), &url);
    command
        .env("GW_AGENT_METRICS_LISTEN", "127.0.0.1:0")
        .env("GW_LOG_FORMAT", "json")
        .env("GW_BAKEND", "misspelt");
    let (_agent, log) = start_logged(&mut command);
    log.line_with("did you mean `GW_BACKEND`?");
    let admin = admin_address(&log);
    let ask = || {
        let mut caller = prepared.connect(address);
        caller.send(prepared.get("/"));
        caller.response()
    };
    // A backend without any attempt is not known to be down.
    eventually("the agent is ready", || {
        (readiness(admin).0 == 200).then_some(())
    });
    for _ in 0..3 {
        assert_eq!(ask().code(), "GW_BACKEND_UNREACHABLE");
    }
    let (status, body) = readiness(admin);
    assert_eq!(
        (status, body.as_str()),
        (
            503,
            &*format!("all backends down: demo--echo.eu1.gw.localhost ({url})")
        )
    );

    socket.listen(16).unwrap();
    std::thread::spawn(move || while socket.accept().is_ok() {});
    // The attempt of the agent's own is enough: no request is made.
    eventually("the agent is ready again", || {
        (readiness(admin).0 == 200).then_some(())
    });
    let mut changes = Vec::new();
    log.find(|line: &Value| {
        if line["backend"] == url.as_str() {
            changes.push(
                line["message"]
                    .as_str()
                    .unwrap()
                    .split(':')
                    .next()
                    .unwrap()
                    .to_owned(),
            );
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
    let mut command = prepared.agent_command("agent", address.port(), &url);
    command
        .env("GW_AGENT_METRICS_LISTEN", "127.0.0.1:0")
        .env("GW_LOG_FORMAT", "json")
        .env("GW_HEALTH_CHECK", "/up");
    let (_agent, log) = start_logged(&mut command);
    let admin = admin_address(&log);
    // One failed check is not enough.
    eventually("the agent is ready", || {
        (readiness(admin).0 == 200).then_some(())
    });
    let error = log.find(|line: &Value| {
        let is_down = line["message"]
            .as_str()?
            .starts_with("the backend is down: its health check fails");
        is_down.then(|| line["error"].as_str().unwrap().to_owned())
    });
    assert_eq!(error, "the status is 503 Service Unavailable");
    let all_down = (
        503,
        format!("all backends down: demo--echo.eu1.gw.localhost ({url})"),
    );
    assert_eq!(readiness(admin), all_down);
    // There is no other backend, so it gets the request. Its connection does not make it healthy.
    let mut caller = prepared.connect(address);
    caller.send(prepared.get("/"));
    assert_eq!(caller.response().status, 503);
    assert_eq!(readiness(admin), all_down);
}

#[test]
fn a_second_process_names_the_folder_and_the_first_process() {
    let prepared = Prepared::new();
    let (_gateway, address) = prepared.serve(0);
    let url = backend::answering("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    let _agent = prepared.run_agent(address.port(), &url);
    prepared.wait_for_tunnel(address);
    let second = prepared
        .agent_command("agent", address.port(), &url)
        .output()
        .unwrap();
    let message = String::from_utf8(second.stderr).unwrap();
    assert_eq!(second.status.code(), Some(2), "{message}");
    let folder = prepared.path("agent").display().to_string();
    let (_, rest) = message
        .split_once(&format!(
            "{folder} is in use by another gw-agent process (pid "
        ))
        .unwrap_or_else(|| panic!("{message}"));
    let pid = rest.split(')').next().unwrap();
    assert_eq!(
        std::fs::read_to_string(format!("/proc/{pid}/comm"))
            .unwrap()
            .trim(),
        "gw-agent"
    );
}
