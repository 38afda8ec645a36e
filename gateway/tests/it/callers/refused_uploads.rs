//! Refused requests whose bodies are still under way: callers get the response, and the connection
//! serves the next request.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use http::Method;

use super::with_one_worker;
use crate::support::eventually;
use crate::support::peers::caller::{Caller, HOST, Tls, session};
use crate::support::peers::http2_caller::on_a_reactor;
use crate::support::peers::proxy_protocol::socket_from;
use crate::support::peers::{backend, http2_caller, is_open};
use crate::support::processes::prepared::Prepared;
use crate::support::scene::{About, Scene};

const SIZES: [usize; 3] = [1, 200_000, 3_000_000];

/// Sends a request with a body of `size` bytes as a whole, and only then reads the response.
/// Returns its status.
fn upload(caller: &mut Caller, head: &str, size: usize, is_chunked: bool) -> u16 {
    let body = vec![b'x'; size];
    let (framing, end) = if is_chunked {
        let framing = format!("Transfer-Encoding: chunked\r\n\r\n{size:x}\r\n");
        (framing, "\r\n0\r\n\r\n")
    } else {
        (format!("Content-Length: {size}\r\n\r\n"), "")
    };
    caller.send(format!("{head}{framing}"));
    caller.send(body);
    let response = caller.ask(end);
    assert_eq!(response.header("connection"), "", "{response:?}");
    response.status.as_u16()
}

/// Uploads these numbers of bytes, with and without a length. All get this status.
fn uploads_get(caller: &mut Caller, head: &str, sizes: &[usize], status: u16) {
    for size in sizes {
        for is_chunked in [false, true] {
            let answered = upload(caller, head, *size, is_chunked);
            assert_eq!(answered, status, "{head:?} {size} {is_chunked}");
        }
    }
}

/// Requests that are refused before their bodies are read: head, without framing and empty line,
/// and status.
fn refused(scene: &Scene) -> Vec<(String, u16)> {
    let (_, key) = scene.api().create_service_key("demo", &["lonely"]);
    vec![
        (format!("POST / HTTP/1.1\r\nHost: {HOST}\r\n"), 502),
        (
            format!(
                "POST / HTTP/1.1\r\nHost: demo--lonely.eu1.gw.localhost\r\n\
                 X-Gw-Service-Key: {key}\r\n"
            ),
            504,
        ),
        (
            "POST /nothing HTTP/1.1\r\nHost: eu1.gw.localhost\r\n".to_owned(),
            404,
        ),
        (
            "POST / HTTP/1.1\r\nHost: elsewhere.example\r\n".to_owned(),
            421,
        ),
    ]
}

#[test]
fn a_connection_goes_on_after_a_refused_upload() {
    let scene = Scene::service().agent().start();
    scene.api().create_service("demo", "lonely");
    let mut caller = scene.connect();
    for (head, status) in refused(&scene) {
        uploads_get(&mut caller, &head, &SIZES, status);
    }
    assert_eq!(caller.ask(scene.get("/next")).json()["target"], "/next");
}

#[test]
fn a_connection_goes_on_after_an_upload_beyond_the_rate_limit() {
    let scene = Scene::service().agent().rate(1, 1).start();
    let mut caller = scene.connect();
    assert_eq!(caller.ask(scene.get("/")).status, 200);
    uploads_get(&mut caller, &scene.request("POST /", ""), &SIZES, 429);
}

#[test]
fn uploads_to_a_backend_that_reads_nothing_leave_the_connection_usable() {
    const ANSWER: &str = "HTTP/1.1 413 Content Too Large\r\nContent-Length: 3\r\n\
                          Connection: close\r\n\r\nno!";
    let backend = backend::start(|mut peer| {
        drop(peer.request_head());
        peer.send(ANSWER);
    });
    let scene = Scene::service().agent_to(backend).start();
    let mut caller = scene.connect();
    let post = scene.request("POST /", "");
    uploads_get(&mut caller, &post, &[200_000, 30_000_000], 413);
    scene.wait_until_slots_are_free();
}

#[test]
fn an_endless_refused_upload_does_not_delay_other_callers() {
    let scene = Scene::service().agent().workers(1).start();
    let mut endless = scene.connect();
    let head = format!("POST / HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\n\r\n");
    assert_eq!(endless.ask(head).code(), "GW_AUTH_REQUIRED");
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let chunk = [&b"10000\r\n"[..], &[b'x'; 0x10000], b"\r\n"].concat();
            while !is_over.load(Ordering::Relaxed) {
                if endless.stream.write_all(&chunk).is_err() {
                    // The gateway discards no more.
                    return;
                }
            }
        });
        let mut other = scene.connect();
        for _ in 0..100 {
            assert_eq!(other.ask(scene.get("/")).status, 200);
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_refused_upload_over_http2_is_reset_without_an_error() {
    let scene = Scene::service().agent().start();
    on_a_reactor(async {
        let connection = http2_caller::connect(&scene).await;
        let unauthenticated = http::Request::builder()
            .method(Method::POST)
            .uri(format!("https://{HOST}/"));
        let (response, mut sent) = connection.begin(unauthenticated, false).await;
        let response = http2_caller::whole(response).await;
        assert_eq!(response.json()["error"]["code"], "GW_AUTH_REQUIRED");
        // The caller sends nothing, which the gateway waits for only so long.
        let reset = std::future::poll_fn(|cx| sent.poll_reset(cx)).await;
        assert_eq!(reset.unwrap(), h2::Reason::NO_ERROR);
        assert_eq!(connection.get("/next").await.json()["target"], "/next");
    });
}

/// A caller from an address of the loopback network that was refused once, and whose connection
/// goes on.
fn refused_caller(about: &About, from: Ipv4Addr) -> Caller {
    let port: u16 = about.base_url.rsplit(':').next().unwrap().parse().unwrap();
    let socket = socket_from(from, SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    socket.set_nodelay(true).unwrap();
    let mut caller = Caller::new(Tls::new(session(about, HOST, &[b"http/1.1"], None), socket));
    let refused = caller.ask(format!("GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n"));
    assert_eq!(refused.status, 502);
    caller
}

#[test]
fn rests_of_refused_requests_are_bounded() {
    /// Requests of one worker, and of one address (docs/limits.md).
    const MOST: usize = 1024;
    const PER_ADDRESS: usize = 64;
    /// Most memory of a rest.
    const EACH: usize = 64 * 1024;
    let prepared = Prepared::new();
    let gateway = with_one_worker(&prepared);
    let about = prepared.about(gateway.address);
    // A trailer section and a TLS record, of nearly the largest size and without their ends.
    let trailers = format!("4\r\nbody\r\n0\r\nX: {}", "t".repeat(15 * 1024));
    let head = format!("POST / HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\n\r\n");
    let send_rest = |caller: &mut Caller| {
        let Tls { conn, sock } = &mut caller.stream;
        let mut records = Vec::new();
        for part in [trailers.as_bytes(), &[b't'; 16 * 1024]] {
            conn.writer().write_all(part).unwrap();
            conn.write_tls(&mut records).unwrap();
        }
        // Fails if it had to give way already.
        let _ = sock.write_all(&records[..records.len() - 1]);
    };
    let is_held = |caller: &Caller| is_open(&caller.stream.sock);
    let mut before = usize::MAX;
    // On a busy machine the time of the rests may end meanwhile. The rests may use memory that the
    // process has kept since its start, or since an earlier attempt.
    let growth = (0..5).find_map(|_| {
        // One more of the first address ends its first one, and the one of the last address the
        // oldest of all.
        let firsts = (0..=PER_ADDRESS).map(|_| 2);
        let others = (PER_ADDRESS..=MOST).map(|number| 2 + (number / PER_ADDRESS) as u8);
        let addresses = firsts
            .chain(others)
            .map(|last| Ipv4Addr::new(127, 0, 0, last));
        let mut all: Vec<Caller> = addresses.map(|from| refused_caller(&about, from)).collect();
        before = before.min(gateway.resident());
        for caller in &mut all {
            assert_ne!(caller.ask(&head).status, 200);
            send_rest(caller);
        }
        eventually("the oldest have given way", || {
            (all.iter().filter(|caller| is_held(caller)).count() <= MOST).then_some(())
        });
        // The worker reads in the order of arrival.
        refused_caller(&about, Ipv4Addr::LOCALHOST);
        let growth = gateway.resident().saturating_sub(before);
        let are_held = all[2..].iter().all(is_held) && !all[..2].iter().any(is_held);
        are_held.then_some(growth)
    });
    let growth = growth
        .expect("all rests are held, but for the oldest of the address and the oldest of all");
    eprintln!("{} KiB for {MOST} rests", growth / 1024);
    assert!(growth <= MOST * EACH, "{growth}");
}
