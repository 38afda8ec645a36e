//! Takeover by a new process while callers send requests: no request fails.

use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use std::{fs, thread};

use http::Method;
use serde_json::json;

use crate::support::eventually;
use crate::support::peers::caller::{Caller, HOST};
use crate::support::peers::held_backend::HeldBackend;
use crate::support::processes::kept_connection::KeptConnection;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process;
use crate::support::processes::process::{Served, gw_gateway};
use crate::support::processes::successor::{admin, replace};

/// Number of requests during the replacements; `GW_TEST_REPLACED_REQUESTS` overrides it.
const REQUESTS: usize = 4000;
const CALLERS: usize = 8;

/// Creates an account, which requires write access to the store. Returns the status.
fn create_account(prepared: &Prepared, served: &Served, id: &str) -> u16 {
    let api = prepared.api(served.admin_address);
    api.ask("POST", "/accounts", &json!({ "id": id })).status
}

fn wait_for_tunnels(served: &Served, count: u64) {
    eventually("all tunnels are open", || {
        (served.metrics().count("gw_tunnels") == count).then_some(())
    });
}

#[test]
fn running_requests_and_kept_connections_survive_a_takeover() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let (mut served, mut agent) = prepared.start(&backend.url);
    let _port = process::hold(served.address);
    let mut running = prepared.connect(served.address);
    let mut kept = KeptConnection::begin(prepared.connect(served.address), &prepared.get("/"));
    let mut idle = prepared.connect(served.address);
    assert_eq!(idle.ask(prepared.get("/")).status, 200);
    running.send(prepared.get("/held"));
    wait_for_tunnels(&served, 1);

    let successor = replace(served.process.id(), &served.log);
    // The agent may not have reconnected yet: requests wait for it. The old process may still
    // accept connections.
    let mut new = eventually("the successor answers", || {
        let mut caller = prepared.connect(served.address);
        assert_eq!(caller.ask(prepared.get("/")).status, 200);
        // Each process issues its own development certificate.
        (caller.stream.conn.peer_certificates() != kept.caller.stream.conn.peer_certificates())
            .then_some(caller)
    });
    // The old process serves its existing connections and closes them after the next response.
    let response = kept.ask(&prepared.get("/"));
    assert_eq!(
        (response.status.as_u16(), response.header("connection")),
        (200, "close")
    );
    assert!(kept.caller.is_closed() && idle.is_closed());
    backend.release();
    assert_eq!(running.response().status, 200);
    drop(running);
    assert_eq!(served.process.exit_code(), Some(0));

    assert_eq!(new.ask(prepared.get("/")).status, 200);
    assert_eq!(
        admin(served.admin_address, "/readyz"),
        (200, "ready\n".to_owned())
    );
    assert_eq!(create_account(&prepared, &served, "later"), 201);
    drop(new);
    successor.stop();
    assert!(TcpStream::connect(served.address).is_err());
    agent.stop();
}

#[test]
fn a_failed_takeover_leaves_the_running_process_unchanged() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let (mut served, _agent) = prepared.start(&backend.url);
    let mut caller = prepared.connect(served.address);
    let mut refused = |expected: &str, account: &str| {
        served.process.signal("USR2");
        let error = served.log.find(|line| {
            (line["message"] == "not replaced: this process goes on")
                .then(|| line["error"].as_str().unwrap().to_owned())
        });
        assert!(error.contains(expected), "{error}");
        let response = caller.ask(prepared.get("/"));
        assert_eq!(
            (response.status.as_u16(), response.header("connection")),
            (200, "")
        );
        assert_eq!(create_account(&prepared, &served, account), 201);
        assert_eq!(admin(served.admin_address, "/readyz").0, 200);
    };

    let config = prepared.path("gateway.toml");
    let valid = fs::read(&config).unwrap();
    fs::write(&config, "region = \"eu1\"\ncolour = 1\n").unwrap();
    refused("colour: no such key", "first");
    // A fault that the successor finds only after it has opened the store.
    fs::write(&config, valid).unwrap();
    let authority = prepared.path("data/agent-ca.crt");
    let certificate = fs::read(&authority).unwrap();
    fs::write(&authority, "not a certificate").unwrap();
    refused("certificate authority", "second");
    fs::write(&authority, certificate).unwrap();

    let successor = replace(served.process.id(), &served.log);
    assert_eq!(
        create_account(&prepared, &served, "second"),
        200,
        "the account already exists"
    );
    assert_eq!(served.process.exit_code(), Some(0));
    successor.stop();
}

#[test]
fn a_replaced_process_forwards_sighup_to_its_successor() {
    let prepared = Prepared::new();
    let held = HeldBackend::start();
    let (served, _agent) = prepared.start(&held.url);
    let mut caller = prepared.connect(served.address);
    caller.send(prepared.get("/held"));
    held.wait_for_held();
    let successor = replace(served.process.id(), &served.log);
    // The replaced process waits for the request.
    served.process.signal("HUP");
    served.log.line_with("certificates reloaded");
    held.release();
    assert_eq!(caller.response().status, 200);
    drop(successor);
}

#[test]
fn a_successor_may_have_a_different_number_of_workers() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let config = prepared.config();
    let (served, _agent) = prepared.start(&backend.url);
    let mut id = served.process.id();
    let mut successors = Vec::new();
    for workers in [4, 1, 3] {
        let text = config.replace("workers = 2", &format!("workers = {workers}"));
        fs::write(prepared.path("gateway.toml"), text).unwrap();
        let successor = replace(id, &served.log);
        id = successor.0;
        successors.push(successor);
        // Enough connections for the kernel to choose every queue.
        for _ in 0..24 {
            let mut caller = prepared.connect(served.address);
            assert_eq!(caller.ask(prepared.get("/")).status, 200);
        }
        let (_, metrics) = admin(served.admin_address, "/metrics");
        let of_workers = metrics
            .lines()
            .filter(|line| line.starts_with("gw_connections{"));
        assert_eq!(of_workers.count(), workers);
    }
}

#[test]
fn sockets_of_a_service_manager_outlive_the_gateway() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let [callers, administrators] = [0, 1].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
    let expected = (
        callers.local_addr().unwrap(),
        administrators.local_addr().unwrap(),
    );
    fs::write(prepared.path("gateway.toml"), prepared.config()).unwrap();
    // A service manager passes sockets from descriptor 3 on and names the receiving process.
    let script = concat!(
        r#"LISTEN_PID=$$ LISTEN_FDS=2 LISTEN_FDNAMES=callers:admin "#,
        r#"exec "$0" "$@" 3<&0 4<&1 0</dev/null 1>&2"#
    );
    let mut command = Command::new("sh");
    command
        .args(["-c", script])
        .arg(gw_gateway().get_program())
        .args(["serve", "--config"])
        .arg(prepared.path("gateway.toml"))
        .stdin(Stdio::from(OwnedFd::from(callers.try_clone().unwrap())))
        .stdout(Stdio::from(OwnedFd::from(administrators)));
    let mut served = process::serve(&mut command);
    drop(command);
    assert_eq!((served.address, served.admin_address), expected);
    let _agent = prepared.run_agent(served.address.port(), &backend.url);
    prepared.wait_for_tunnel(served.address);
    let successor = replace(served.process.id(), &served.log);
    prepared.wait_for_tunnel(served.address);
    assert_eq!(admin(served.admin_address, "/readyz").0, 200);
    assert_eq!(served.process.exit_code(), Some(0));
    successor.stop();
    // A connection made now waits for the next start.
    let mut waiting = TcpStream::connect(served.address).unwrap();
    waiting.write_all(b"x").unwrap();
    assert!(callers.accept().is_ok());
}

/// Callers that send requests back to back, keep their connections as long as allowed, and do not
/// retry.
struct Load<'a> {
    prepared: &'a Prepared,
    address: SocketAddr,
    stop: AtomicBool,
    answered: AtomicUsize,
    failures: Mutex<Vec<String>>,
}

impl Load<'_> {
    fn run(&self, caller: usize) {
        let mut connection = None;
        for number in caller.. {
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            match self.ask(&mut connection, number) {
                Ok(()) => drop(self.answered.fetch_add(1, Ordering::Relaxed)),
                Err(failure) => {
                    connection = None;
                    self.failures
                        .lock()
                        .unwrap()
                        .push(format!("request {number} of caller {caller}: {failure}"));
                }
            }
        }
    }

    fn ask(&self, connection: &mut Option<Caller>, number: usize) -> Result<(), String> {
        let connect = || self.prepared.connect(self.address);
        let mut peer = connection.take().unwrap_or_else(connect);
        let key = self.prepared.service_key();
        let (method, path, body) = match number % 10 {
            0 => (Method::GET, "/slow", ""),
            1 | 2 => (Method::POST, "/", "some body"),
            _ => (Method::GET, "/", ""),
        };
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        peer.try_send(request)
            .map_err(|error| format!("sending: {error}"))?;
        let response = peer
            .try_response(&method)
            .map_err(|error| format!("receiving: {error}"))?;
        if response.status != 200 || response.body != format!("{:08}", body.len()).as_bytes() {
            return Err(format!(
                "{} {}",
                response.status,
                String::from_utf8_lossy(&response.body)
            ));
        }
        if response.header("connection") != "close" {
            *connection = Some(peer);
        }
        Ok(())
    }

    fn wait_for(&self, answered: usize) {
        let mut before = 0;
        while self.answered.load(Ordering::Relaxed) < answered {
            assert!(
                self.failures.lock().unwrap().len() < 100,
                "{:?}",
                self.failures
            );
            let now = eventually("requests are answered", || {
                let now = self.answered.load(Ordering::Relaxed);
                (now > before).then_some(now)
            });
            before = now;
            thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn no_request_fails_while_gateway_and_agents_are_replaced() {
    let requests = std::env::var("GW_TEST_REPLACED_REQUESTS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(REQUESTS);
    let prepared = Prepared::with_agents(&["first", "second"]);
    let backend = HeldBackend::start();
    let served = prepared.serve_with(&prepared.config());
    let start_agent = |name: &str| prepared.run_agent_of(name, served.address.port(), &backend.url);
    let mut agents = ["first", "second"].map(|name| (name, start_agent(name)));
    wait_for_tunnels(&served, 2);
    let load = Load {
        prepared: &prepared,
        address: served.address,
        stop: AtomicBool::new(false),
        answered: AtomicUsize::new(0),
        failures: Mutex::default(),
    };
    let mut successors = Vec::new();
    thread::scope(|scope| {
        let stop = StopAtEnd(&load.stop);
        for caller in 0..CALLERS {
            let load = &load;
            scope.spawn(move || load.run(caller));
        }
        let mut id = served.process.id();
        for round in 1..=2 {
            load.wait_for(requests * round / 5);
            let successor = replace(id, &served.log);
            id = successor.0;
            successors.push(successor);
            wait_for_tunnels(&served, 2);
        }
        for (round, (name, agent)) in (3..).zip(&mut agents) {
            load.wait_for(requests * round / 5);
            // As `systemctl restart` does.
            agent.stop();
            *agent = start_agent(name);
            wait_for_tunnels(&served, 2);
        }
        load.wait_for(requests);
        drop(stop);
    });
    let failures = load.failures.into_inner().unwrap();
    let answered = load.answered.into_inner();
    assert!(
        failures.is_empty(),
        "{} of {} failed: {failures:#?}",
        failures.len(),
        answered + failures.len()
    );
    assert!(answered >= requests);
    eprintln!("0 failed of {answered} requests");
}

struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
