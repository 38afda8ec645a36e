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

use super::shutdown::ask_until_closed;
use crate::support::eventually;
use crate::support::peers::held_backend::HeldBackend;
use crate::support::processes::kept_connection::KeptConnection;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process;
use crate::support::processes::process::{Running, Served, gw_gateway};
use crate::support::processes::successor::{admin, replace};

/// Number of requests during the replacements; `GW_TEST_REPLACED_REQUESTS` overrides it.
const REQUESTS: usize = 4000;
const CALLERS: usize = 8;

/// Creates an account, which requires write access to the store. Returns the status.
fn create_account(prepared: &Prepared, address: SocketAddr, id: &str) -> u16 {
    let account = serde_json::json!({ "id": id });
    let reply = prepared.api(address).ask("POST", "/accounts", &account);
    reply.status
}

fn wait_for_tunnels(admin_address: SocketAddr, count: usize) {
    eventually("all tunnels are open", || {
        let (_, metrics) = admin(admin_address, "/metrics");
        metrics
            .lines()
            .any(|line| line == format!("gw_tunnels {count}"))
            .then_some(())
    });
}

#[test]
fn running_requests_and_kept_connections_survive_a_takeover() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let (
        Served {
            mut process,
            address,
            admin_address,
            log,
        },
        mut agent,
    ) = prepared.start(&backend.url);
    let _port = process::hold(address);
    let mut running = prepared.connect(address);
    let mut kept = KeptConnection::begin(prepared.connect(address), &prepared.get("/"));
    let mut idle = prepared.connect(address);
    idle.send(prepared.get("/"));
    assert_eq!(idle.response().status, 200);
    running.send(prepared.get("/held"));
    wait_for_tunnels(admin_address, 1);

    let successor = replace(process.id(), &log);
    // The agent may not have reconnected yet: requests wait for it. The old process may still
    // accept connections.
    let mut new = eventually("the successor answers", || {
        let mut caller = prepared.connect(address);
        caller.send(prepared.get("/"));
        assert_eq!(caller.response().status, 200);
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
    assert_eq!(process.exit_code(), Some(0));

    new.send(prepared.get("/"));
    assert_eq!(new.response().status, 200);
    assert_eq!(admin(admin_address, "/readyz"), (200, "ready\n".to_owned()));
    assert_eq!(create_account(&prepared, admin_address, "later"), 201);
    drop(new);
    successor.stop();
    assert!(TcpStream::connect(address).is_err());
    agent.signal("TERM");
    assert_eq!(agent.exit_code(), Some(0));
}

#[test]
fn a_failed_takeover_leaves_the_running_process_unchanged() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let config = prepared.config();
    let (
        Served {
            mut process,
            address,
            admin_address,
            log,
        },
        _agent,
    ) = prepared.start(&backend.url);
    let mut caller = prepared.connect(address);
    let mut refused = |expected: &str, account: &str| {
        process.signal("USR2");
        let error = log.find(|line| {
            (line["message"] == "not replaced: this process goes on")
                .then(|| line["error"].as_str().unwrap().to_owned())
        });
        assert!(error.contains(expected), "{error}");
        caller.send(prepared.get("/"));
        let response = caller.response();
        assert_eq!(
            (response.status.as_u16(), response.header("connection")),
            (200, "")
        );
        assert_eq!(create_account(&prepared, admin_address, account), 201);
        assert_eq!(admin(admin_address, "/readyz").0, 200);
    };

    fs::write(
        prepared.path("gateway.toml"),
        "region = \"eu1\"\ncolour = 1\n",
    )
    .unwrap();
    refused("colour: no such key", "first");
    // A fault that the successor finds only after it has opened the store.
    fs::write(prepared.path("gateway.toml"), &config).unwrap();
    let authority = prepared.path("data/agent-ca.crt");
    let certificate = fs::read(&authority).unwrap();
    fs::write(&authority, "not a certificate").unwrap();
    refused("certificate authority", "second");
    fs::write(&authority, certificate).unwrap();

    let successor = replace(process.id(), &log);
    assert_eq!(
        create_account(&prepared, admin_address, "second"),
        200,
        "the account already exists"
    );
    assert_eq!(process.exit_code(), Some(0));
    successor.stop();
}

#[test]
fn a_replaced_process_forwards_sighup_to_its_successor() {
    let prepared = Prepared::new();
    let held = HeldBackend::start();
    let (
        Served {
            process,
            address,
            log,
            ..
        },
        _agent,
    ) = prepared.start(&held.url);
    let mut caller = prepared.connect(address);
    caller.send(prepared.get("/held"));
    held.wait_for_held();
    let successor = replace(process.id(), &log);
    // The replaced process waits for the request.
    process.signal("HUP");
    log.line_with("certificates reloaded");
    held.release();
    assert_eq!(caller.response().status, 200);
    drop(successor);
}

#[test]
fn a_successor_may_have_a_different_number_of_workers() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let config = prepared.config();
    let (
        Served {
            process,
            address,
            admin_address,
            log,
        },
        _agent,
    ) = prepared.start(&backend.url);
    let mut id = process.id();
    let mut successors = Vec::new();
    for workers in [4, 1, 3] {
        fs::write(
            prepared.path("gateway.toml"),
            config.replace("workers = 2", &format!("workers = {workers}")),
        )
        .unwrap();
        let successor = replace(id, &log);
        id = successor.0;
        successors.push(successor);
        // Enough connections for the kernel to choose every queue.
        for _ in 0..24 {
            let mut caller = prepared.connect(address);
            caller.send(prepared.get("/"));
            assert_eq!(caller.response().status, 200);
        }
        let (_, metrics) = admin(admin_address, "/metrics");
        assert_eq!(
            metrics
                .lines()
                .filter(|line| line.starts_with("gw_connections{"))
                .count(),
            workers
        );
    }
}

#[test]
fn a_stop_without_a_successor_finishes_requests_and_refuses_new_connections() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let (
        Served {
            mut process,
            address,
            admin_address,
            ..
        },
        _agent,
    ) = prepared.start(&backend.url);
    let _port = process::hold(address);
    let mut running = prepared.connect(address);
    let mut kept = prepared.connect(address);
    kept.send(prepared.get("/"));
    assert_eq!(kept.response().status, 200);
    running.send(prepared.get("/held"));
    backend.wait_for_held();
    process.signal("TERM");
    ask_until_closed(&prepared, &mut kept);
    eventually("the drain has begun", || {
        (admin(admin_address, "/readyz") == (503, "draining\n".into())).then_some(())
    });
    eventually("new connections are refused", || {
        TcpStream::connect(address).is_err().then_some(())
    });
    backend.release();
    assert_eq!(running.response().status, 200);
    assert_eq!(process.exit_code(), Some(0));
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
        .arg("serve")
        .arg("--config");
    command.arg(prepared.path("gateway.toml"));
    command.stdin(Stdio::from(OwnedFd::from(callers.try_clone().unwrap())));
    command.stdout(Stdio::from(OwnedFd::from(administrators)));
    let Served {
        mut process,
        address,
        admin_address,
        log,
    } = process::serve(&mut command);
    drop(command);
    assert_eq!((address, admin_address), expected);
    let _agent = prepared.run_agent(address.port(), &backend.url);
    prepared.wait_for_tunnel(address);
    let successor = replace(process.id(), &log);
    prepared.wait_for_tunnel(address);
    assert_eq!(admin(admin_address, "/readyz").0, 200);
    assert_eq!(process.exit_code(), Some(0));
    successor.stop();
    // A connection made now waits for the next start.
    let mut waiting = TcpStream::connect(address).unwrap();
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

    fn ask(
        &self,
        connection: &mut Option<crate::support::peers::caller::Caller>,
        number: usize,
    ) -> Result<(), String> {
        let mut peer = connection
            .take()
            .unwrap_or_else(|| self.prepared.connect(self.address));
        let key = self
            .prepared
            .get("")
            .split("X-Gw-Service-Key: ")
            .nth(1)
            .unwrap()
            .trim()
            .to_owned();
        let (method, path, body) = match number % 10 {
            0 => (Method::GET, "/slow", ""),
            1 | 2 => (Method::POST, "/", "some body"),
            _ => (Method::GET, "/", ""),
        };
        let host = crate::support::peers::caller::HOST;
        let fields = format!(
            "Host: {host}\r\nX-Gw-Service-Key: {key}\r\nContent-Length: {}",
            body.len()
        );
        let request = format!("{method} {path} HTTP/1.1\r\n{fields}\r\n\r\n{body}");
        peer.stream
            .write_all(request.as_bytes())
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
    let Served {
        process,
        address,
        admin_address,
        log,
    } = prepared.serve_with(&prepared.config());
    let start_agent = |name: &str| prepared.run_agent_of(name, address.port(), &backend.url);
    let mut agents = ["first", "second"].map(|name| (name, start_agent(name)));
    wait_for_tunnels(admin_address, 2);
    let load = Load {
        prepared: &prepared,
        address,
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
        let mut id = process.id();
        for round in 1..=2 {
            load.wait_for(requests * round / 5);
            let successor = replace(id, &log);
            id = successor.0;
            successors.push(successor);
            wait_for_tunnels(admin_address, 2);
        }
        for (round, (name, agent)) in (3..).zip(&mut agents) {
            load.wait_for(requests * round / 5);
            restart(agent, || start_agent(name));
            wait_for_tunnels(admin_address, 2);
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

/// Stops and starts a process, like `systemctl restart`.
fn restart(agent: &mut Running, start: impl FnOnce() -> Running) {
    agent.signal("TERM");
    assert_eq!(agent.exit_code(), Some(0));
    *agent = start();
}

struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
