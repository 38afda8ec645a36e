//! `gw-agent http`: one command enrolls an agent, runs it, and prints what is relayed.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::doctor::{BACKEND, OF_AGENT, examine};
use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::peers::caller::connect_to;
use crate::support::peers::http1_peer::Response;
use crate::support::processes::process::{Running, children, gw_agent};
use crate::support::scene::Scene;

const HOST: &str = "acme--api.eu1.gw.localhost";

/// A service of an account of its own beside the one of the scene, and its key.
fn with_service(scene: &Scene) -> String {
    let api = scene.api();
    api.create_service("acme", "api");
    api.create_service_key("acme", &["api"]).1
}

/// `gw-agent http` at the gateway of the demo.
fn http(scene: &Scene, backend: &str, state_dir: &Path) -> Command {
    let mut command = gw_agent();
    command.args(["http", backend, "--gateway", &scene.about.base_url]);
    command
        .arg("--ca-file")
        .arg(&scene.about.ca_file)
        .arg("--state-dir")
        .arg(state_dir);
    command.env_remove("GW_ENROLLMENT_TOKEN");
    command
}

/// Starts the agent; returns it with the first line that it prints. Closes the other end of its
/// outputs, as far as they are pipes.
fn start(command: &mut Command) -> (Running, String) {
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    drop(child.stderr.take());
    (Running::new(child), line)
}

fn call(scene: &Scene, key: &str) -> Response {
    let request = format!("GET / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n\r\n");
    connect_to(&scene.about, HOST, &[b"http/1.1"], None).ask(request)
}

/// Development servers often listen on one of the two addresses of `localhost` only.
#[test]
fn a_port_is_reached_at_each_address_of_localhost() {
    let scene = Scene::service().agent().start();
    let key = with_service(&scene);
    for address in [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()] {
        let backend = backend::start_at(address, |mut peer| {
            while peer.request().is_ok() {
                peer.send("HTTP/1.1 204 X\r\n\r\n");
            }
        });
        let port = backend.rsplit(':').next().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let token = scene.api().create_enrollment_token("acme", &["api"]);
        let (mut agent, _) = start(http(&scene, port, folder.path()).args(["--token", &token]));
        assert_eq!(call(&scene, &key).status, 204, "{address}");
        agent.stop();
    }
}

#[test]
fn one_command_enrolls_and_relays_and_goes_on_without_a_token() {
    let scene = Scene::service().agent().start();
    let key = with_service(&scene);
    let backend = backend::start(|mut peer| {
        while let Ok((head, ..)) = peer.request() {
            let host = head.authority;
            peer.send(format!(
                "HTTP/1.1 204 X\r\nX-Host: {host}\r\nLocation: //{host}/a\r\n\r\n"
            ));
        }
    });
    let port = backend.rsplit(':').next().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");

    let token = scene.api().create_enrollment_token("acme", &["api"]);
    let (mut agent, line) =
        start(http(&scene, port, &state).args(["--token", &token, "--name", "laptop"]));
    let url = format!("https://{HOST}:{}", scene.port());
    assert_eq!(line, format!("{url} -> http://localhost:{port}\n"));
    // The line is printed when the agent's tunnel is ready.
    assert_eq!(call(&scene, &key).status, 204);
    let names = || -> Vec<Value> {
        let agents = scene.api().agents("acme").into_iter();
        agents.map(|mut agent| agent["name"].take()).collect()
    };
    assert_eq!(names(), ["laptop"]);

    // A second process with the folder does not displace the first.
    let second = http(&scene, port, &state).output().unwrap();
    let message = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(
        second.status.code() == Some(2) && message.contains("in use by another gw-agent process"),
        "{message}"
    );
    agent.stop();

    // The used token is ignored, and a URL is a backend too.
    let rewrite = ["--token", &token, "--host-header", "rewrite"];
    let (_agent, line) = start(http(&scene, &backend, &state).args(rewrite));
    assert!(line.ends_with(&format!(" -> {backend}\n")), "{line}");
    let response = eventually("the agent relays again", || {
        Some(call(&scene, &key)).filter(|response| response.status == 204)
    });
    assert_eq!(
        ["x-host", "location"].map(|name| response.header(name)),
        [&backend[7..], &format!("https://{HOST}/a")]
    );
    assert_eq!(names(), ["laptop"]);
}

#[test]
fn the_state_of_another_gateway_is_refused() {
    let scene = Scene::service().enrolled(&["agent"]).start();
    let mut elsewhere = gw_agent();
    elsewhere
        .args(["http", "3000", "--gateway", "https://us1.gw.localhost"])
        .arg("--state-dir")
        .arg(scene.state_dir("agent"));
    let output = elsewhere.output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{message}");
    let both = [
        "https://us1.gw.localhost:443".to_owned(),
        scene.about.base_url.clone(),
    ];
    assert!(both.iter().all(|url| message.contains(url)), "{message}");
}

#[test]
fn doctor_needs_no_options_after_http() {
    let scene = Scene::service().start();
    let backend = backend::answering("HTTP/1.1 204 X\r\n\r\n");
    let home = tempfile::tempdir().unwrap();
    // For root the folder of the user is that of the machine.
    let user = |command: &mut Command| {
        command
            .env("HOME", home.path())
            .env_remove("XDG_STATE_HOME")
            .env_remove("GW_STATE_DIR")
            .env_remove("GW_BACKEND");
        if rustix::process::geteuid().is_root() {
            command.env("GW_STATE_DIR", home.path().join("state"));
        }
    };
    let token = scene.api().create_enrollment_token("demo", &["echo"]);
    let mut command = gw_agent();
    command
        .args(["http", &backend, "--gateway", &scene.about.base_url])
        .args(["--token", &token, "--ca-file"])
        .arg(&scene.about.ca_file);
    user(&mut command);
    let (mut agent, _) = start(&mut command);
    assert_eq!(scene.connect().ask(scene.get("/")).status, 204);
    let examine = || {
        let mut doctor = gw_agent();
        user(doctor.arg("doctor"));
        examine(&mut doctor)
    };
    let found = examine();
    found.assert(&OF_AGENT, &[]);
    let of_last = |url: &str| format!("the last `gw-agent http`, for {url}");
    let configured = &found.of("configuration").found;
    assert!(configured.starts_with(&of_last(&backend)), "{configured}");
    let speaks = &found.of(BACKEND).found;
    assert!(speaks.contains(&format!("{backend} speaks ")), "{speaks}");
    agent.stop();

    // Another backend, which does not listen, is checked in its place.
    let (_held, closed) = backend::refusing();
    let mut command = gw_agent();
    command.args(["http", &closed.to_string()]);
    user(&mut command);
    let (_agent, _) = start(&mut command);
    let found = examine();
    found.assert(&OF_AGENT, &[(BACKEND, "failed")]);
    let configured = &found.of("configuration").found;
    let url = format!("http://{closed}");
    assert!(configured.starts_with(&of_last(&url)), "{configured}");
}

#[test]
fn a_token_of_standard_input_is_in_the_arguments_of_no_process() {
    let scene = Scene::service().agent().start();
    let folder = tempfile::tempdir().unwrap();
    let token = scene.api().create_enrollment_token("demo", &["echo"]);
    let mut command = http(&scene, "localhost:1", folder.path());
    let mut child = command
        .args(["--token-file", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // Standard input stays open, as on a terminal.
    let mut input = child.stdin.take().unwrap();
    writeln!(input, "{token}").unwrap();
    let mut line = String::new();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let agent = Running::new(child);
    output.read_line(&mut line).unwrap();
    assert_eq!(
        line,
        format!("{} -> http://localhost:1\n", scene.about.tenant_url)
    );
    for process in children(agent.id()).into_iter().chain([agent.id()]) {
        let arguments = fs::read(format!("/proc/{process}/cmdline")).unwrap();
        let arguments = String::from_utf8(arguments).unwrap();
        assert!(!arguments.contains("gw_et_"), "{arguments:?}");
    }
}

#[test]
fn the_token_may_be_in_the_environment_and_a_closed_terminal_stops_the_agent() {
    let scene = Scene::service().agent().start();
    let folder = tempfile::tempdir().unwrap();
    let token = scene.api().create_enrollment_token("demo", &["echo"]);
    let mut command = http(&scene, "localhost:1", folder.path());
    command
        .env("GW_ENROLLMENT_TOKEN", token)
        .stderr(Stdio::piped());
    let (mut agent, line) = start(&mut command);
    assert_eq!(
        line,
        format!("{} -> http://localhost:1\n", scene.about.tenant_url)
    );
    // Neither standard output nor standard error can be written any more.
    agent.signal("HUP");
    assert_eq!(agent.exit_code(), Some(0));
}
