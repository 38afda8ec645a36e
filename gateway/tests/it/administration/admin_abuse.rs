//! The admin listener against clients that have not authenticated.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use serde_json::Value;

use super::{Installation, assert_says, end};
use crate::support::processes::process::{Running, gw_gateway, start_demo};
use crate::support::scene::Scene;
use crate::support::{SOON, eventually};

/// Bytes that the listener sends before it closes or resets the connection.
fn answer(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    // Fails if the listener does not wait for the end.
    drop(stream.write_all(request));
    let mut answer = Vec::new();
    if let Err(error) = stream.read_to_end(&mut answer) {
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
    String::from_utf8(answer).unwrap()
}

#[test]
fn no_path_is_served_under_a_foreign_name() {
    let scene = Scene::service()
        .configuration("admin_hosts = [\"console.example.com\"]\n")
        .start();
    let ask = |path: &str, version: &str, hosts: &str| {
        let request = format!("GET {path} HTTP/{version}\r\n{hosts}Connection: close\r\n\r\n");
        answer(scene.admin_address(), request.as_bytes())
    };
    for path in [
        "/metrics",
        "/healthz",
        "/readyz",
        "/api/v1/openapi.json",
        "/api/v1/accounts",
        "/",
        "/sign-in",
        "/nothing",
    ] {
        for host in [
            "evil.example:9080",
            "127.0.0.1.evil.example",
            "demo--echo.eu1.gw.localhost.evil",
            "",
        ] {
            let refused = ask(path, "1.1", &format!("Host: {host}\r\n"));
            assert!(refused.starts_with("HTTP/1.1 421 "), "{path}: {refused}");
            assert_says(&refused, &["admin_hosts"]);
        }
        let refused = ask(path, "1.1", "Host: 127.0.0.1\r\nHost: evil.example\r\n");
        assert!(refused.starts_with("HTTP/1.1 421 "), "{path}: {refused}");
        for host in [
            "console.example.com",
            "localhost:1",
            "eu1.gw.localhost",
            "10.0.0.7:9080",
            "[::1]:9080",
        ] {
            let served = ask(path, "1.1", &format!("Host: {host}\r\n"));
            let is_served = !served.starts_with("HTTP/1.1 421 ");
            assert!(is_served, "{path} {host}: {served}");
        }
    }
    // Probes of load balancers.
    assert!(ask("/readyz", "1.0", "").starts_with("HTTP/1.0 200 "));
    assert!(ask("/metrics", "1.1", "Host: 127.0.0.1:9080\r\n").starts_with("HTTP/1.1 200 "));
}

/// Connects from this address of the loopback network.
fn connect(scene: &Scene, last: u8) -> TcpStream {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket
        .bind(&SocketAddr::from(([127, 0, 0, last], 0)).into())
        .unwrap();
    socket.connect(&scene.admin_address().into()).unwrap();
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream
}

/// Whether the listener answers a request on this connection, which stays open.
fn is_answered(stream: &mut TcpStream, path: &str, fields: &str) -> bool {
    drop(write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: localhost\r\n{fields}\r\n"
    ));
    let mut beginning = [0; 12];
    stream.read_exact(&mut beginning).is_ok() && beginning == *b"HTTP/1.1 200"
}

#[test]
fn idle_connections_of_strangers_give_way_and_those_of_administrators_stay() {
    let scene = Scene::service().start();
    let mut administrator = connect(&scene, 1);
    let token = format!("Authorization: Bearer {}\r\n", scene.about.admin_token);
    assert!(is_answered(&mut administrator, "/api/v1/accounts", &token));
    // One address has at most its share.
    let mut idle: Vec<TcpStream> = (0..=256).map(|_| connect(&scene, 2)).collect();
    assert_eq!(idle[0].read_to_end(&mut Vec::new()).unwrap(), 0);
    assert!(is_answered(&mut idle[1], "/healthz", ""));
    // Four more take all.
    for last in 3..7 {
        idle.extend((0..256).map(|_| connect(&scene, last)));
    }
    assert!(is_answered(&mut connect(&scene, 8), "/healthz", ""));
    let mut again = administrator.try_clone().unwrap();
    drop(write!(
        again,
        "GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    ));
    let mut rest = String::new();
    again.read_to_string(&mut rest).unwrap();
    assert!(rest.ends_with("\r\n\r\nok\n"), "{rest}");
}

#[test]
fn bodies_are_bounded_before_authentication() {
    const CONNECTIONS: usize = 64;
    let installation = Installation::new();
    let gateway = installation.serve();
    let address = gateway.admin_address;
    let is_ready = b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    eventually("the gateway is ready", || {
        let answer = answer(address, is_ready);
        answer.starts_with("HTTP/1.1 200 ").then_some(())
    });
    let before = peak_memory(gateway.process.id());
    // Just below what the listener accepts of forms that belong to a session.
    let length = 4 * MIB - 1;
    for path in [
        "/sign-in",
        "/accounts",
        "/requests/x/replay",
        "/api/v1/accounts",
    ] {
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n",
            length + 1
        );
        let form = [head.as_bytes(), &b"a&".repeat(length / 2)].concat();
        thread::scope(|scope| {
            for _ in 0..CONNECTIONS {
                scope.spawn(|| {
                    let answer = answer(address, &form);
                    assert!(!answer.starts_with("HTTP/1.1 200 "), "{path}: {answer}");
                });
            }
        });
    }
    let grown = peak_memory(gateway.process.id()) - before;
    assert!(
        grown < 16 * MIB,
        "{grown} bytes for {CONNECTIONS} connections"
    );
}

const MIB: usize = 1024 * 1024;

/// Whether the gateway has answered on a connection, or ended it.
fn has_answer(stream: &TcpStream) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    !recv(stream, &mut [0; 1], flags).is_err_and(|error| error == Errno::WOULDBLOCK)
}

/// A demo in a process of its own.
struct Process {
    running: Running,
    admin: SocketAddr,
    about: Value,
}

impl Process {
    fn start() -> Self {
        let (running, about) = start_demo(gw_gateway().arg("demo"));
        let admin = about["admin_url"].as_str().unwrap();
        let admin = admin.strip_prefix("http://").unwrap().parse().unwrap();
        Self {
            running,
            admin,
            about,
        }
    }

    fn text(&self, name: &str) -> &str {
        self.about[name].as_str().unwrap()
    }

    /// Makes a service key and deletes it with `gw-gateway key delete`.
    fn revokes(&self) {
        let command = |line: &str| {
            let mut command = gw_gateway();
            command
                .args(line.split(' '))
                .args(["--admin-url", self.text("admin_url")])
                .env("GW_ADMIN_TOKEN", self.text("admin_token"));
            end(&mut command).done()
        };
        let made: Value = command("key create demo --service echo --json")
            .parse()
            .unwrap();
        command(&format!(
            "key delete demo {}",
            made["key_id"].as_str().unwrap()
        ));
    }
}

#[test]
fn large_bodies_that_are_not_whole_share_a_room_and_a_revocation_does_not_wait() {
    const CLIENTS: usize = 60;
    const BODY: usize = 4 * MIB;
    const ROOM: usize = 24 * MIB;
    let scene = Process::start();
    scene.revokes();
    let before = peak_memory(scene.running.id());
    let streams: Vec<TcpStream> = (0..CLIENTS)
        .map(|_| TcpStream::connect(scene.admin).unwrap())
        .collect();
    let sent = AtomicUsize::new(0);
    let may_end = AtomicBool::new(false);
    thread::scope(|scope| {
        let client = |mut stream: &TcpStream| {
            let head = format!(
                "POST /api/v1/requests/0123456789abcdef0123456789abcdef/replay HTTP/1.1\r\n\
                 Host: localhost\r\nConnection: close\r\nAuthorization: Bearer {}\r\n\
                 Content-Type: application/json\r\nContent-Length: {BODY}\r\n\r\n",
                scene.text("admin_token")
            );
            // Fails if the time of the body ends before, as it may on a busy machine.
            let _ = stream.write_all(&[head.as_bytes(), &vec![b' '; BODY - 1]].concat());
            sent.fetch_add(1, Ordering::SeqCst);
            eventually("the body may end", || {
                may_end.load(Ordering::SeqCst).then_some(())
            });
            let _ = stream.write_all(b" ");
            let mut answer = String::new();
            stream.read_to_string(&mut answer).map(|_| answer)
        };
        let clients: Vec<_> = streams
            .iter()
            .map(|stream| scope.spawn(move || client(stream)))
            .collect();
        eventually("the room is full", || {
            (sent.load(Ordering::SeqCst) >= ROOM / BODY).then_some(())
        });
        scene.revokes();
        // No body has been given the room of another one meanwhile.
        assert!(
            !streams.iter().any(has_answer),
            "the revocation waited for room"
        );
        may_end.store(true, Ordering::SeqCst);
        let answers: Vec<String> = clients
            .into_iter()
            .filter_map(|client| client.join().unwrap().ok())
            .collect();
        // The bodies have no JSON, or had to wait for too long.
        for answer in &answers {
            let starts = ["HTTP/1.1 400 ", "HTTP/1.1 503 "];
            let is_refused = starts.iter().any(|start| answer.starts_with(start));
            assert!(is_refused, "{answer}");
        }
        let whole = answers.iter().filter(|it| it.contains("JSON")).count();
        assert!(whole >= ROOM / BODY, "{answers:?}");
    });
    let grown = peak_memory(scene.running.id()) - before;
    assert!(
        grown < ROOM + 24 * MIB,
        "{grown} bytes for {CLIENTS} clients"
    );
}

#[test]
fn bodies_in_tiny_pieces_take_no_more_memory_than_whole_ones() {
    const CLIENTS: usize = 60;
    const BODY: usize = 8000;
    let scene = Process::start();
    scene.revokes();
    let before = peak_memory(scene.running.id());
    let send = || {
        let mut stream = TcpStream::connect(scene.admin).unwrap();
        stream.set_nodelay(true).unwrap();
        let head = format!(
            "POST /sign-in HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
             Content-Type: application/x-www-form-urlencoded\r\nContent-Length: {BODY}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream
    };
    // On a busy machine the time of the bodies may end before.
    let are_sent = (0..5).any(|_| {
        let mut clients: Vec<TcpStream> = (0..CLIENTS).map(|_| send()).collect();
        for _ in 0..BODY - 1 {
            for client in &mut clients {
                let _ = client.write_all(b"a");
            }
        }
        scene.revokes();
        let are_waiting = !clients.iter().any(has_answer);
        for mut client in clients {
            let _ = client.write_all(b"a");
            let _ = client.read_to_end(&mut Vec::new());
        }
        are_waiting
    });
    assert!(are_sent, "no revocation beside bodies that are not whole");
    let grown = peak_memory(scene.running.id()) - before;
    assert!(grown < 16 * MIB, "{grown} bytes for {CLIENTS} clients");
}

/// The largest resident memory that the process has had.
fn peak_memory(process: u32) -> usize {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let mut lines = status.lines();
    let peak = lines.find_map(|line| line.strip_prefix("VmHWM:"));
    let peak = peak.unwrap().trim().trim_end_matches(" kB");
    peak.parse::<usize>().unwrap() * 1024
}
