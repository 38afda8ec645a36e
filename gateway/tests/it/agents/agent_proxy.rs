//! Agents that reach their gateway through an HTTP proxy: tinyproxy, a proxy of the tests, and
//! peers that are none.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::mpsc::{self, Receiver};
use std::{fs, thread};

use serde_json::Value;

use crate::support::agents::in_process;
use crate::support::doctor::examine;
use crate::support::peers::backend;
use crate::support::peers::caller::connect_to;
use crate::support::peers::tinyproxy::Tinyproxy;
use crate::support::processes::process::{gw_agent, start_logged};
use crate::support::scene::Scene;
use crate::support::{SOON, eventually, programs};

const SERVICE: &str = "demo--proxied.eu1.gw.localhost";
const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// A gateway with a service `proxied`, and a service key for it. The agent of the scene does not
/// serve it.
fn gateway() -> (Scene, String) {
    let scene = Scene::service().agent().start();
    scene.api().create_service("demo", "proxied");
    let (_, key) = scene.api().create_service_key("demo", &["proxied"]);
    (scene, key)
}

/// Enrolls an agent for `proxied` into `state`; the gateway's address is 127.0.0.1.
fn enroll(scene: &Scene, state: &Path, proxy: Option<&str>) {
    let ca_file = &scene.about.ca_file;
    in_process::enroll_through(proxy, token(scene), scene.address(), ca_file, state);
}

fn token(scene: &Scene) -> String {
    scene.api().create_enrollment_token("demo", &["proxied"])
}

/// Runs `gw-agent enroll` through a proxy.
fn enroll_through(scene: &Scene, state: &Path, proxy: SocketAddr) -> Output {
    agent("enroll", state)
        .args(["--gateway", &scene.about.base_url, "--ca-file"])
        .arg(&scene.about.ca_file)
        .env("GW_ENROLLMENT_TOKEN", token(scene))
        .env("GW_PROXY", format!("http://{proxy}"))
        .output()
        .unwrap()
}

/// A command of the agent's program, without the proxy variables of this machine.
fn agent(name: &str, state: &Path) -> Command {
    let mut command = gw_agent();
    for variable in ["HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy"] {
        command.env_remove(variable);
    }
    command.arg(name).arg("--state-dir").arg(state);
    command
}

fn run_command(state: &Path) -> Command {
    let mut command = agent("run", state);
    command.args(["--backend", &backend::answering(OK)]);
    command
}

/// Waits until a request of the service is answered by its backend.
fn wait_for_answer(scene: &Scene, key: &str) {
    let request = format!("GET / HTTP/1.1\r\nHost: {SERVICE}\r\nX-Gw-Service-Key: {key}\r\n\r\n");
    eventually("requests are answered", || {
        let response = connect_to(&scene.about, SERVICE, &[b"http/1.1"], None).ask(&request);
        (response.status == 200).then_some(())
    });
}

#[test]
fn an_agent_enrolls_and_serves_through_a_proxy_that_may_be_restarted() {
    if !programs::usable(&["tinyproxy"]) {
        return;
    }
    let (scene, key) = gateway();
    let mut proxy = Tinyproxy::start(Some(("agent", "p_ss.word")));
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let url = format!("http://agent:p%5fss%2eword@{}", proxy.address);
    enroll(&scene, &state, Some(&url));
    let target = format!("CONNECT 127.0.0.1:{}", scene.port());
    let enrolled = proxy.log().matches(&target).count();
    assert!(
        enrolled >= 3,
        "enrollment, status and certificate: {}",
        proxy.log()
    );

    // The password in a file, as in a configuration.
    let config = folder.path().join("agent.toml");
    let password = folder.path().join("password");
    fs::write(&password, "p_ss.word\n").unwrap();
    let text = format!(
        "proxy = \"http://agent@{}\"\nproxy_password_file = \"{}\"\n",
        proxy.address,
        password.display()
    );
    fs::write(&config, text).unwrap();
    let (_agent, log) = start_logged(run_command(&state).arg("--config").arg(&config));
    wait_for_answer(&scene, &key);
    assert!(
        proxy.log().matches(&target).count() > enrolled,
        "{}",
        proxy.log()
    );

    proxy.kill();
    let line = log.line_with(&format!("the proxy at {} cannot be reached", proxy.address));
    assert!(line.contains("`proxy`"), "{line}");
    proxy.run();
    wait_for_answer(&scene, &key);

    doctor_looks_at_the_proxy(proxy.address, &url, &state);
}

fn doctor_looks_at_the_proxy(proxy: SocketAddr, url: &str, state: &Path) {
    let mut doctor = agent("doctor", state);
    doctor.args(["--backend", &backend::answering(OK)]);
    let found = examine(doctor.env("GW_PROXY", url));
    let through = &found.of("proxy").found;
    let expected = format!("{proxy}, from GW_PROXY");
    assert!(through.starts_with(&expected), "{through}");
    found.assert_complaints(&[]);
    let shown = format!("{found:?}");
    assert!(
        !shown.contains("p_ss") && !shown.contains("p%5fss"),
        "{shown}"
    );
}

#[test]
fn a_refused_password_of_a_proxy_is_named_in_the_log() {
    if !programs::usable(&["tinyproxy"]) {
        return;
    }
    let (scene, _) = gateway();
    let proxy = Tinyproxy::start(Some(("agent", "right")));
    let folder = tempfile::tempdir().unwrap();
    enroll(&scene, folder.path(), None);
    let at = format!("the proxy at {}", proxy.address);
    for (userinfo, expected) in [
        ("", "requires a user and password"),
        ("agent:hunter2@", "does not accept the user and password"),
    ] {
        let url = format!("http://{userinfo}{}", proxy.address);
        let (_agent, log) = start_logged(run_command(folder.path()).env("GW_PROXY", url));
        let line = log.line_with(&format!("{at} {expected}"));
        assert!(
            line.contains("GW_PROXY") && !line.contains("hunter2"),
            "{line}"
        );
    }
}

#[test]
fn an_unreachable_proxy_is_named_in_the_log_and_not_used_for_hosts_in_no_proxy() {
    let (scene, key) = gateway();
    let folder = tempfile::tempdir().unwrap();
    enroll(&scene, folder.path(), None);
    let (_refusing, refusing) = backend::refusing();
    let mut through_nothing = run_command(folder.path());
    through_nothing.env("GW_PROXY", format!("http://{refusing}"));
    let (agent, log) = start_logged(&mut through_nothing);
    log.line_with(&format!("the proxy at {refusing} cannot be reached"));
    drop(agent);
    through_nothing.env("NO_PROXY", "example.com,127.0.0.0/8");
    let (_agent, _log) = start_logged(&mut through_nothing);
    wait_for_answer(&scene, &key);
}

/// A proxy that connects every target to `gateway`, as if it resolved all names. Returns its
/// address, and the targets.
fn proxy_to(gateway: SocketAddr) -> (SocketAddr, Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, targets) = mpsc::channel();
    thread::spawn(move || {
        for mut client in listener.incoming().flatten() {
            let head = head_of(&mut client);
            // Fails once the test has ended.
            let _ = sender.send(head.split(' ').nth(1).unwrap_or_default().to_owned());
            client
                .write_all(b"HTTP/1.1 200 Connection established\r\n\r\n")
                .unwrap();
            let server = TcpStream::connect(gateway).unwrap();
            let from_client = client.try_clone().unwrap();
            let from_server = server.try_clone().unwrap();
            thread::spawn(move || carry(from_client, server));
            thread::spawn(move || carry(from_server, client));
        }
    });
    (address, targets)
}

fn carry(mut from: TcpStream, mut to: TcpStream) {
    // An error of either connection ends both.
    let _ = io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Both);
}

/// Reads a request head; empty if the peer sends none.
fn head_of(client: &mut TcpStream) -> String {
    client.set_read_timeout(Some(SOON)).unwrap();
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && matches!(client.read(&mut byte), Ok(1)) {
        head.push(byte[0]);
    }
    client.set_read_timeout(None).unwrap();
    String::from_utf8(head).unwrap()
}

#[test]
fn the_proxy_resolves_the_gateway() {
    let (scene, key) = gateway();
    let (proxy, targets) = proxy_to(scene.address());
    let folder = tempfile::tempdir().unwrap();
    let enrolled = enroll_through(&scene, folder.path(), proxy);
    assert!(enrolled.status.success(), "{enrolled:?}");
    let port = scene.port();
    assert_eq!(
        targets.recv_timeout(SOON).unwrap(),
        format!("eu1.gw.localhost:{port}")
    );

    // A host that only the proxy knows, and a proxy of all programs.
    let path = folder.path().join("agent.json");
    let mut about: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    about["gateway_host"] = "gateway.test".into();
    fs::write(&path, about.to_string()).unwrap();
    let mut run = run_command(folder.path());
    let (_agent, _log) = start_logged(run.env("HTTPS_PROXY", format!("http://{proxy}")));
    wait_for_answer(&scene, &key);
    let expected = format!("gateway.test:{port}");
    assert!(targets.try_iter().any(|target| target == expected));
}

#[test]
fn certificates_are_checked_behind_a_proxy() {
    let (scene, _) = gateway();
    let (other_gateway, _) = gateway();
    let (elsewhere, _) = proxy_to(other_gateway.address());
    let folder = tempfile::tempdir().unwrap();
    let refused = enroll_through(&scene, folder.path(), elsewhere);
    let refused = String::from_utf8(refused.stderr).unwrap();
    assert!(
        refused.contains("not trusted") && refused.contains("--ca-file"),
        "{refused}"
    );
}

/// A peer that answers each connection by `answer`. Returns its address.
fn peer(answer: impl Fn(&mut TcpStream) -> io::Result<()> + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for mut client in listener.incoming().flatten() {
            head_of(&mut client);
            // The agent may close first.
            let _ = answer(&mut client);
        }
    });
    address
}

#[test]
fn peers_that_are_no_proxies_are_errors_that_name_them() {
    let scene = Scene::service().agent().start();
    scene.api().create_service("demo", "proxied");
    let endless = |client: &mut TcpStream| {
        client.write_all(b"HTTP/1.1 200 OK\r\n")?;
        loop {
            client.write_all(b"X-More: of the same\r\n")?;
        }
    };
    let saying = |text: &'static str| peer(move |client| client.write_all(text.as_bytes()));
    for (address, expected) in [
        (peer(endless), "larger than 8192 bytes"),
        (saying("SSH-2.0-OpenSSH_9.2p1\r\n\r\n"), "valid HTTP"),
        (saying(""), "closed the connection"),
        (saying("HTTP/1.1 200 OK\r\n\r\n<html>"), "sent bytes before"),
        (
            saying("HTTP/1.1 502 Bad Gateway\r\n\r\n"),
            "502 Bad Gateway",
        ),
        // Accepts and never answers; the head of the next connection is not read either.
        (
            peer(|client| client.read(&mut [0; 1024]).map(drop)),
            "within 9s",
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let output = enroll_through(&scene, folder.path(), address);
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(
            message.contains(&format!("the proxy at {address}")) && message.contains(expected),
            "{expected}: {message}"
        );
    }
}

#[test]
fn a_proxy_that_cannot_be_used_is_refused_before_anything_is_sent() {
    let folder = tempfile::tempdir().unwrap();
    for (variable, url, expected) in [
        (
            "GW_PROXY",
            "https://u:hunter2@proxy:443",
            "GW_PROXY: https:// proxies are not supported",
        ),
        (
            "HTTPS_PROXY",
            "socks5://u:hunter2@proxy:1080",
            "HTTPS_PROXY: SOCKS proxies are not supported",
        ),
    ] {
        let output = agent("enroll", folder.path())
            .env(variable, url)
            .output()
            .unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(
            message.contains(expected) && !message.contains("hunter2"),
            "{message}"
        );
    }
}
