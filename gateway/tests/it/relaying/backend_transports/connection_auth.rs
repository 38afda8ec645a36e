//! Backends that authenticate connections in place of requests (NTLM and Negotiate, RFC 4559 §6).

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use http::{Method, StatusCode};

use crate::support::eventually;
use crate::support::peers::caller::{Caller, HOST, connect_to};
use crate::support::peers::http1_peer::Response;
use crate::support::peers::{backend, http2_caller};
use crate::support::processes::nodes::Nodes;
use crate::support::scene::{About, Scene};

const OFFER: &str = "WWW-Authenticate: Negotiate\r\nWWW-Authenticate: NTLM\r\n";

/// Starts a backend that takes all requests of a connection for those of one user, once a handshake
/// has authenticated it. One of NTLM has two requests on one connection; one of Negotiate has one,
/// and no token in its response. Answers name user and connection.
fn authenticating(name: &'static str) -> String {
    let connections = AtomicUsize::new(0);
    backend::start(move |mut peer| {
        let connection = format!("{name}{}", connections.fetch_add(1, Ordering::Relaxed));
        let mut user = None;
        let mut challenge = None;
        let mut challenges = 0;
        while let Ok((head, _, _)) = peer.request() {
            assert!(!head.headers.contains("x-gw-caller-connection"));
            let credentials = head.headers.get("authorization");
            let credentials = credentials.map(|value| value.to_str().unwrap());
            let (status, fields) = match credentials.and_then(|value| value.split_once(' ')) {
                Some(("NTLM", "hello")) => {
                    challenges += 1;
                    let new = format!("{connection}-{challenges}");
                    let field = format!("WWW-Authenticate: NTLM {new}\r\n");
                    (user, challenge) = (None, Some(new));
                    (401, field)
                }
                Some(("NTLM", answer)) => {
                    let (name, answered) = answer.split_once(':').unwrap();
                    user = (challenge.take().as_deref() == Some(answered)).then(|| name.to_owned());
                    if user.is_some() {
                        (200, String::new())
                    } else {
                        (401, OFFER.to_owned())
                    }
                }
                Some(("Negotiate", name)) => {
                    user = Some(name.to_owned());
                    (200, String::new())
                }
                _ if user.is_some() => (200, String::new()),
                _ => (401, OFFER.to_owned()),
            };
            let body = user.as_deref().unwrap_or("nobody");
            if head.upgrade.is_some() && status == 200 {
                peer.send("HTTP/1.1 101 X\r\nConnection: Upgrade\r\nUpgrade: name\r\n\r\n");
                return peer.send(body);
            }
            peer.send(format!(
                "HTTP/1.1 {status} X\r\nX-Connection: {connection}\r\n\
                 {fields}Content-Length: {}\r\n\r\n{body}",
                body.len()
            ));
            if head.target == "/leave" {
                return;
            }
        }
    })
}

/// A caller on one connection.
struct User {
    caller: Caller,
    key: String,
}

impl User {
    fn connect(about: &About) -> Self {
        Self {
            caller: connect_to(about, HOST, &[b"http/1.1"], None),
            key: about.service_key.clone(),
        }
    }

    /// Sends a request with these fields, each with its end.
    fn send(&mut self, target: &str, fields: &str) {
        let key = &self.key;
        let head = format!("GET {target} HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n");
        self.caller.send(format!("{head}{fields}\r\n"));
    }

    fn get(&mut self, target: &str, fields: &str) -> Response {
        self.send(target, fields);
        self.caller.response()
    }

    /// Begins a handshake. Returns the challenge.
    fn begin(&mut self, target: &str) -> String {
        let response = self.get(target, "Authorization: NTLM hello\r\n");
        assert_eq!(response.status, StatusCode::UNAUTHORIZED);
        let challenge = response.header("www-authenticate");
        challenge.strip_prefix("NTLM ").unwrap().to_owned()
    }

    fn finish(&mut self, name: &str, challenge: &str) -> Response {
        self.get("/", &format!("Authorization: NTLM {name}:{challenge}\r\n"))
    }

    /// Authenticates the connection. Returns which one it is at the backend.
    fn log_in(&mut self, name: &str) -> String {
        let challenge = self.begin("/");
        let response = self.finish(name, &challenge);
        served(&response, name);
        response.header("x-connection").to_owned()
    }

    fn is_served_as(&mut self, name: &str) -> String {
        let response = self.get("/", "");
        served(&response, name);
        response.header("x-connection").to_owned()
    }

    fn is_asked(&mut self) {
        let response = self.get("/", "");
        assert_eq!(response.status, StatusCode::UNAUTHORIZED);
        assert_eq!(response.body, b"nobody");
    }
}

fn served(response: &Response, name: &str) {
    let body = String::from_utf8_lossy(&response.body);
    assert_eq!((response.status.as_u16(), &*body), (200, name));
}

#[test]
fn callers_are_never_served_as_another_user() {
    for hand_over in ["always", "never"] {
        let scene = Scene::service()
            .agent_to(authenticating("c"))
            .workers(4)
            .hand_over(hand_over)
            .start();
        // Enough for some connections to reach each worker.
        let connect = || User::connect(&scene.about);
        let mut users: Vec<_> = (0..8).map(|_| connect()).collect();
        for user in &mut users {
            user.is_asked();
        }
        let mut connections = Vec::new();
        for (number, user) in users.iter_mut().enumerate() {
            connections.push(user.log_in(&format!("user{number}")));
            connect().is_asked();
        }
        for (number, user) in users.iter_mut().enumerate() {
            let connection = user.is_served_as(&format!("user{number}"));
            assert_eq!(connection, connections[number]);
            connect().is_asked();
        }
        // Another user on the same connection of a caller.
        users[0].log_in("user100");
        users[0].is_served_as("user100");
        users[1].is_served_as("user1");
    }
}

/// Handshakes of 8 users at once, each on several connections; at each of these gateways in turn.
fn handshakes_at_once(gateways: &[About], of_each: usize) {
    thread::scope(|scope| {
        for number in 0..8 {
            scope.spawn(move || {
                let name = format!("user{number}");
                for round in 0..of_each.div_ceil(10) {
                    let mut user = User::connect(&gateways[(number + round) % gateways.len()]);
                    user.is_asked();
                    for _ in 0..10 {
                        let connection = user.log_in(&name);
                        assert_eq!(user.is_served_as(&name), connection);
                    }
                }
            });
        }
    });
}

#[test]
fn handshakes_of_many_users_are_all_right_with_two_agents() {
    let scene = Scene::service().enrolled(&["one", "two"]).start();
    let _one = scene.run("one", 128, &authenticating("one"));
    let _two = scene.run("two", 128, &authenticating("two"));
    handshakes_at_once(std::slice::from_ref(&scene.about), 200);
    scene.wait_until_idle();
}

#[test]
fn handshakes_are_all_right_from_every_node() {
    let nodes = Nodes::start_with_agents(2, &["one", "two"]);
    let (owner, _) = nodes.owner_and_other();
    let _one = nodes.run_agent_of("one", 0, &authenticating("one"));
    let _two = nodes.run_agent_of("two", 1, &authenticating("two"));
    eventually("both tunnels are open", || {
        (nodes.tunnels(owner).len() == 2).then_some(())
    });
    handshakes_at_once(&[nodes.about(0), nodes.about(1)], 40);
}

#[test]
fn a_handshake_whose_connection_ends_begins_again() {
    let scene = Scene::service().agent_to(authenticating("c")).start();
    let mut user = User::connect(&scene.about);
    for _ in 0..20 {
        let challenge = user.begin("/leave");
        let response = user.finish("alice", &challenge);
        assert_eq!(response.status, StatusCode::UNAUTHORIZED);
        let offers = response.headers.get_all("www-authenticate");
        assert!(offers.eq(["Negotiate", "NTLM"]));
        user.log_in("alice");
        user.is_served_as("alice");
    }
}

#[test]
fn requests_of_a_connection_go_to_its_agent_until_the_tunnel_ends() {
    let scene = Scene::service().enrolled(&["one", "two"]).start();
    let mut agents = [
        Some(scene.run("one", 128, &authenticating("one"))),
        Some(scene.run("two", 128, &authenticating("two"))),
    ];
    let mut user = User::connect(&scene.about);
    let connection = user.log_in("alice");
    for _ in 0..50 {
        assert_eq!(user.is_served_as("alice"), connection);
    }
    drop(agents[usize::from(connection.starts_with("two"))].take());
    scene.wait_for_tunnels(1);
    user.is_asked();
    let other = user.log_in("alice");
    assert_ne!(other[..3], connection[..3]);
    for _ in 0..10 {
        assert_eq!(user.is_served_as("alice"), other);
    }
}

#[test]
fn an_upgrade_uses_the_connection_of_its_user() {
    let scene = Scene::service().agent_to(authenticating("c")).start();
    let mut alice = User::connect(&scene.about);
    alice.log_in("alice");
    let upgrade = "Connection: Upgrade\r\nUpgrade: name\r\n";
    let mut stranger = User::connect(&scene.about);
    assert_eq!(stranger.get("/", upgrade).status, StatusCode::UNAUTHORIZED);
    alice.send("/", upgrade);
    let head = alice.caller.response_head(&Method::GET).unwrap();
    assert_eq!(head.status, StatusCode::SWITCHING_PROTOCOLS);
    assert_eq!(alice.caller.bytes(5).unwrap(), b"alice");
}

#[test]
fn a_request_of_http2_with_credentials_has_a_connection_for_itself() {
    let scene = Scene::service().agent_to(authenticating("c")).start();
    let mut stranger = User::connect(&scene.about);
    stranger.is_asked();
    http2_caller::on_a_reactor(async {
        let caller = http2_caller::connect(&scene).await;
        let mut connections = Vec::new();
        for name in ["alice", "bob", "alice"] {
            let request = caller.request(&Method::GET, "/");
            let request = request.header("authorization", format!("Negotiate {name}"));
            let response = caller.fetch(request).await;
            assert_eq!(response.status, StatusCode::OK);
            assert_eq!(response.body, name.as_bytes());
            connections.push(response.header("x-connection").to_owned());
            let response = caller.get("/").await;
            assert_eq!(response.status, StatusCode::UNAUTHORIZED);
            assert!(!connections.contains(&response.header("x-connection").to_owned()));
        }
        connections.sort();
        connections.dedup();
        assert_eq!(connections.len(), 3);
    });
    stranger.is_asked();
}
