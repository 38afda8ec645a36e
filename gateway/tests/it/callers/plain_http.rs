//! The listener in plain HTTP: redirects to https, and nothing else.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use http::Method;
use socket2::Socket;

use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::peers::caller::HOST;
use crate::support::peers::http1_peer::{Peer, Response};
use crate::support::peers::is_open;
use crate::support::peers::proxy_protocol::{socket_from, trusted};
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::{Served, has_ended};
use crate::support::processes::successor::replace;
use crate::support::programs::usable;

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
const APEX: &str = "eu1.gw.localhost";

/// A gateway with a listener in plain HTTP.
struct Redirecting {
    prepared: Prepared,
    served: Served,
    http: SocketAddr,
    _port: Socket,
}

impl Redirecting {
    /// `settings` are further lines of the configuration.
    fn start(settings: &str) -> Self {
        Self::with_workers(2, settings)
    }

    fn with_workers(workers: usize, settings: &str) -> Self {
        let prepared = Prepared::new();
        let (port, held) = gw_local_region::hold(0).unwrap();
        let http = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let workers = format!("workers = {workers}");
        let config = prepared.config().replace("workers = 2", &workers);
        let config = format!("{config}listen_http = \"{http}\"\n{settings}");
        let served = prepared.serve_with(&config);
        Self {
            prepared,
            served,
            http,
            _port: held,
        }
    }

    fn connect(&self) -> Peer<TcpStream> {
        self.connect_from(Ipv4Addr::LOCALHOST)
    }

    fn connect_from(&self, address: Ipv4Addr) -> Peer<TcpStream> {
        connect(self.http, address)
    }

    fn answer(&self, bytes: impl AsRef<[u8]>) -> Response {
        answer(self.http, bytes)
    }

    /// `http://HOST:PORT`, as a client without a mapping of ports names the listener.
    fn origin(&self, host: &str) -> String {
        format!("{host}:{}", self.http.port())
    }

    /// The https URL of a host.
    fn secure(&self, host: &str) -> String {
        format!("https://{host}:{}", self.served.address.port())
    }
}

fn connect(to: SocketAddr, from: Ipv4Addr) -> Peer<TcpStream> {
    let stream = socket_from(from, to);
    stream.set_nodelay(true).unwrap();
    Peer::new(stream)
}

/// A request for the service.
fn get() -> String {
    format!("GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n")
}

/// The answer to `bytes`, after which the connection has to end.
fn answer(to: SocketAddr, bytes: impl AsRef<[u8]>) -> Response {
    let mut peer = connect(to, Ipv4Addr::LOCALHOST);
    let response = peer.ask(bytes);
    assert!(!response.header("x-gw-request-id").is_empty());
    assert_eq!(response.header("connection"), "close");
    assert!(peer.is_closed());
    response
}

#[test]
fn requests_for_hosts_of_the_region_are_redirected_with_path_and_query() {
    let gateway = Redirecting::start("");
    let origin = gateway.origin(HOST);
    let secure = gateway.secure(HOST);
    let host = format!("Host: {origin}\r\n");
    // The body is read and dropped, so that the client gets the answer.
    let body = "x".repeat(300_000);
    let body = format!("Content-Length: 300000\r\n\r\n{body}");
    let key = gateway.prepared.service_key();
    for (request, expected) in [
        (
            format!("GET /a%20b/../c?d=e&f HTTP/1.1\r\n{host}\r\n"),
            format!("{secure}/a%20b/../c?d=e&f"),
        ),
        (
            format!("POST /p HTTP/1.1\r\n{host}{body}"),
            format!("{secure}/p"),
        ),
        (
            format!("GET http://{origin}/x?y HTTP/1.1\r\nHost: elsewhere.example\r\n\r\n"),
            format!("{secure}/x?y"),
        ),
        (
            format!("GET /old HTTP/1.0\r\n{host}\r\n"),
            format!("{secure}/old"),
        ),
        (
            format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", APEX.to_uppercase()),
            format!("https://{APEX}/"),
        ),
        (
            format!("GET / HTTP/1.1\r\n{host}X-Gw-Service-Key: {key}\r\n\r\n"),
            format!("{secure}/"),
        ),
    ] {
        let response = gateway.answer(&request);
        assert_eq!(response.status, 308, "{request:.60}");
        assert_eq!(response.header("location"), expected, "{request:.60}");
    }
}

#[test]
fn the_response_to_head_ends_with_its_head() {
    let gateway = Redirecting::start("");
    let mut peer = gateway.connect();
    peer.send("HEAD / HTTP/1.1\r\nHost: elsewhere.example\r\n\r\n");
    assert_eq!(peer.response_to(&Method::HEAD).status, 421);
    assert!(peer.is_closed());
}

#[test]
fn other_hosts_and_heads_that_are_not_valid_are_refused() {
    let gateway = Redirecting::start("");
    let misdirected = [
        "GET / HTTP/1.1\r\nHost: elsewhere.example\r\n\r\n".to_owned(),
        format!("GET / HTTP/1.1\r\nHost: {APEX}.elsewhere.example\r\n\r\n"),
        format!("GET //{APEX}/ HTTP/1.1\r\nHost: elsewhere.example\r\n\r\n"),
    ];
    let malformed = [
        "GET / HTTP/1.1\r\n\r\n".to_owned(),
        "GET / HTTP/1.0\r\n\r\n".to_owned(),
        format!("GET / HTTP/1.1\r\nHost: {APEX}\r\nHost: {APEX}\r\n\r\n"),
        format!("GET / HTTP/1.1\r\nHost: {APEX}\r\n folded\r\n\r\n"),
        format!("GET /\rSet-Cookie:a HTTP/1.1\r\nHost: {APEX}\r\n\r\n"),
        format!("GET / HTTP/1.1\r\nHost: {APEX}/evil.example\r\n\r\n"),
        format!("GET / HTTP/1.1\r\nHost: evil@{APEX}\r\n\r\n"),
        format!("CONNECT {APEX}:443 HTTP/1.1\r\nHost: {APEX}\r\n\r\n"),
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned(),
    ];
    let field = "x".repeat(20_000);
    let large = [format!(
        "GET / HTTP/1.1\r\nHost: {APEX}\r\nA: {field}\r\n\r\n"
    )];
    let cases: [(u16, &str, &[String]); 3] = [
        (421, "GW_MISDIRECTED", &misdirected),
        (400, "GW_BAD_REQUEST", &malformed),
        (502, "GW_HEADERS_TOO_LARGE", &large),
    ];
    for (status, code, requests) in cases {
        for request in requests {
            let response = gateway.answer(request);
            assert_eq!(response.status, status, "{request:.60}");
            assert_eq!(response.code(), code, "{request:.60}");
            assert_eq!(response.header("location"), "", "{request:.60}");
        }
    }
}

#[test]
fn no_challenge_is_answered_that_is_not_open() {
    const CHALLENGES: &str = "/.well-known/acme-challenge/";
    const TOKEN: &str = "evaGxfADs6pSRb2LAv9IZf17Dt3juxGJ-PCt92wr-oA";
    let gateway = Redirecting::start("");
    for (host, token, expected) in [
        (HOST, TOKEN, 404),
        (HOST, "", 404),
        (HOST, "a/../b", 404),
        ("elsewhere.example", TOKEN, 421),
    ] {
        let get = format!("GET {CHALLENGES}{token} HTTP/1.1\r\nHost: {host}\r\n\r\n");
        assert_eq!(gateway.answer(&get).status, expected, "{get}");
    }
}

#[test]
fn curl_follows_a_redirect_to_the_service() {
    if !usable(&["curl"]) {
        return;
    }
    let gateway = Redirecting::start("");
    let _agent = gateway
        .prepared
        .run_agent(gateway.served.address.port(), &backend::answering(OK));
    gateway.prepared.wait_for_tunnel(gateway.served.address);
    let key = format!("X-Gw-Service-Key: {}", gateway.prepared.service_key());
    let counts = " %{http_code} %{num_redirects}";
    let curl = |options: &[&str]| {
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--show-error", "--location", "--cacert"])
            .arg(gateway.prepared.path("data/dev-ca.crt"))
            .args(["--connect-to", "::127.0.0.1:", "--write-out", counts])
            .args(["--header", &key])
            .args(options)
            .arg(format!("http://{}/path", gateway.origin(HOST)));
        let output = curl.output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{stderr}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(curl(&[]), "ok 200 1");
    // 308 keeps the method and the body.
    assert_eq!(curl(&["--data", "body"]), "ok 200 1");
}

#[test]
fn a_slow_head_ends_and_does_not_keep_others_out() {
    let gateway = Redirecting::start("");
    let mut silent = gateway.connect();
    let mut slow = gateway.connect();
    slow.send("GET / HTTP/1.1\r\nHost: ");
    // More than one address may have on a worker without a request.
    let held: Vec<_> = (0..300)
        .map(|_| {
            let mut peer = gateway.connect_from(Ipv4Addr::new(127, 0, 0, 9));
            // Fails if it had to give way already.
            let _ = peer.stream.write_all(b"GET /");
            peer
        })
        .collect();
    for address in [Ipv4Addr::LOCALHOST, Ipv4Addr::new(127, 0, 0, 9)] {
        let response = gateway.connect_from(address).ask(get());
        assert_eq!(response.status, 308, "{address}");
    }
    // Each of two workers keeps 64 of them.
    eventually("the oldest have given way", || {
        let metrics = gateway.served.metrics();
        let ended = metrics.count_with("gw_connections_ended_early_total", "handshake");
        (ended >= 300 - 2 * 64).then_some(())
    });
    drop(held);
    assert!(silent.is_closed());
    assert!(slow.is_closed());
}

#[test]
fn requests_in_plain_http_that_do_not_arrive_are_bounded() {
    /// Requests of one worker, and of one address (docs/limits.md).
    const MOST: usize = 256;
    const PER_ADDRESS: usize = 64;
    /// Bytes of a head, and most memory of such a connection.
    const HEAD: usize = 16_000;
    const EACH: usize = 112 * 1024;
    let gateway = Redirecting::with_workers(1, "");
    let head = format!("GET / HTTP/1.1\r\nHost: {HOST}\r\nA: ");
    let head = format!("{head}{}", "v".repeat(HEAD - head.len()));
    let begin = |last| {
        let mut peer = gateway.connect_from(Ipv4Addr::new(127, 0, 0, last));
        // Fails if it had to give way already.
        let _ = peer.stream.write_all(head.as_bytes());
        peer.stream
    };
    drop(begin(2));
    let mut before = usize::MAX;
    // On a busy machine the time of the heads may end meanwhile. The heads may use memory that the
    // process has kept since its start, or since an earlier attempt.
    let growth = (0..5).find_map(|_| {
        eventually("no connection of an earlier attempt is left", || {
            (gateway.served.metrics().count("gw_connections") == 0).then_some(())
        });
        before = before.min(gateway.served.resident());
        // One more of the first address ends its first one, and the one of a fifth address the
        // oldest of all.
        let firsts = (0..=PER_ADDRESS).map(|_| 2);
        let others = (PER_ADDRESS..=MOST).map(|number| 2 + (number / PER_ADDRESS) as u8);
        let all: Vec<TcpStream> = firsts.chain(others).map(begin).collect();
        eventually("the oldest have given way", || {
            (all.iter().filter(|stream| is_open(stream)).count() <= MOST).then_some(())
        });
        // The worker reads in the order of arrival.
        let mut caller = gateway.prepared.connect(gateway.served.address);
        assert_eq!(caller.ask(get()).code(), "GW_AUTH_REQUIRED");
        let growth = gateway.served.resident().saturating_sub(before);
        let are_held = all[2..].iter().all(is_open) && !all[..2].iter().any(is_open);
        are_held.then_some(growth)
    });
    let growth = growth
        .expect("all heads are held, but for the oldest of the address and the oldest of all");
    eprintln!("{} KiB for {MOST} heads", growth / 1024);
    assert!(growth <= MOST * EACH, "{growth}");
}

#[test]
fn connections_count_for_their_address() {
    let gateway = Redirecting::start("connections_per_address = 4\n");
    let from = Ipv4Addr::new(127, 0, 0, 9);
    // The kernel chooses the worker of each at random. Of so many, each worker gets at least four.
    let held: Vec<_> = (0..60).map(|_| gateway.connect_from(from)).collect();
    let refused = || {
        let metrics = gateway.served.metrics();
        metrics.count_with("gw_connections_turned_away_total", "address_connections")
    };
    // Two workers hold four each.
    eventually("further connections are refused", || {
        (refused() == 60 - 2 * 4).then_some(())
    });
    drop(held);
}

#[test]
fn a_proxy_has_to_announce_its_clients() {
    let gateway = Redirecting::start(&trusted(&[("127.0.0.1", "required")]));
    let announced = format!("PROXY TCP4 198.51.100.7 192.0.2.1 4660 80\r\n{}", get());
    assert_eq!(gateway.connect().ask(announced).status, 308);
    let mut without = gateway.connect();
    without.send(get());
    let mut said = Vec::new();
    match without.stream.read_to_end(&mut said) {
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        Ok(_) => assert!(said.is_empty()),
    }
}

#[test]
fn redirects_go_on_while_the_process_is_replaced() {
    let gateway = Redirecting::start("");
    let get = get();
    let mut begun = gateway.connect();
    begun.send(&get[..20]);
    let is_replaced = AtomicBool::new(false);
    let predecessor = gateway.served.process.id();
    let http = gateway.http;
    let _successor = thread::scope(|scope| {
        let requests = scope.spawn(|| {
            let mut after = 0;
            while after < 20 {
                after += usize::from(is_replaced.load(Ordering::Relaxed));
                assert_eq!(answer(http, &get).status, 308);
            }
        });
        let successor = replace(predecessor, &gateway.served.log);
        // The predecessor has read the beginning.
        begun.send(&get[20..]);
        assert_eq!(begun.response().status, 308);
        is_replaced.store(true, Ordering::Relaxed);
        requests.join().unwrap();
        successor
    });
    eventually("the predecessor has ended", || {
        has_ended(predecessor).then_some(())
    });
    assert_eq!(gateway.answer(&get).status, 308);
}
