//! Request smuggling: bytes that one party takes for the body of a message, and another for the
//! next message.

use std::io::ErrorKind;
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, PoisonError};

use gw_shared::http::Framing;
use http::Method;

use super::{OK, assert_answered};
use crate::support::SOON;
use crate::support::peers::backend;
use crate::support::peers::caller::{Caller, HOST};
use crate::support::peers::http1_peer::{Peer, Response};
use crate::support::scene::Scene;

/// A request as the backend received it.
#[derive(Debug, PartialEq)]
struct Seen {
    connection: usize,
    target: String,
    body: Vec<u8>,
}

/// What a backend does behind a forged response.
#[derive(Clone, Copy, PartialEq)]
enum Then {
    Reads,
    Closes,
}

/// A response that a caller takes for the next one if it reads another framing than the gateway.
const FORGED: &str = "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged";

/// A scene whose backend reads bodies by their framing and reports every request. It answers with
/// [`OK`]; for the targets of `heads`, with what is beside the target and [`FORGED`].
fn recording(
    heads: &'static [(&'static str, &'static str)],
    then: Then,
) -> (Scene, Receiver<Seen>) {
    let (sender, receiver) = mpsc::channel();
    let connections = AtomicUsize::new(0);
    let url = backend::start(move |mut peer| {
        let connection = connections.fetch_add(1, Ordering::Relaxed);
        while let Ok((head, body, _)) = peer.request() {
            let target = head.target.to_string();
            let head = heads.iter().find(|(forged, _)| *forged == target);
            let seen = Seen {
                connection,
                target,
                body,
            };
            sender.send(seen).unwrap();
            let Some((_, head)) = head else {
                peer.send(OK);
                continue;
            };
            peer.send(format!("{head}{FORGED}"));
            if then == Then::Closes {
                return;
            }
        }
    });
    (Scene::service().agent_to(url).start(), receiver)
}

/// As [`recording`], with [`OK`] for all targets.
fn recording_ok() -> (Scene, Receiver<Seen>) {
    recording(&[], Then::Reads)
}

/// A request that the gateway would serve if it took it for one.
fn smuggled(scene: &Scene) -> String {
    scene.get("/smuggled")
}

/// Sends `request` on a new connection. Asserts that the response announces the end of the
/// connection and that nothing follows it.
#[track_caller]
fn last_response(scene: &Scene, request: &str) -> Response {
    let mut caller = scene.connect();
    let response = caller.ask(request);
    assert_last(&mut caller, &response, request);
    response
}

#[track_caller]
fn assert_last(caller: &mut Caller, response: &Response, what: &str) {
    assert_eq!(response.header("connection"), "close", "{what}");
    assert!(caller.is_closed(), "{what}");
}

/// Asserts that a request is refused for its framing, and nothing of it served.
#[track_caller]
fn assert_refused(scene: &Scene, request: &str) {
    let response = last_response(scene, request);
    let (status, code) = (response.status.as_u16(), response.code());
    assert_eq!((status, &*code), (400, "GW_BAD_REQUEST"), "{request}");
}

/// Asserts that the backend gets nothing but `expected`, each with this body, and the request of
/// this function. That one follows on a connection of the pool whatever was sent there.
#[track_caller]
fn assert_seen(scene: &Scene, seen: &Receiver<Seen>, expected: &[(&str, &str)], what: &str) {
    let last = scene.connect().ask(scene.get("/last"));
    assert_eq!(last.body, b"ok", "{what}");
    let requests: Vec<Seen> = seen.try_iter().collect();
    let requests: Vec<(&str, &[u8])> = requests
        .iter()
        .map(|seen| (&*seen.target, &*seen.body))
        .collect();
    let expected: Vec<(&str, &[u8])> = expected
        .iter()
        .chain(&[("/last", "")])
        .map(|(target, body)| (*target, body.as_bytes()))
        .collect();
    assert_eq!(requests, expected, "{what}");
}

/// A request to switch protocols with this content.
fn upgrade_with(scene: &Scene, target: &str, content: &str) -> String {
    let length = content.len();
    let fields = format!(
        "Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: {length}\r\n\r\n{content}"
    );
    scene.request(&format!("GET {target}"), &fields)
}

#[test]
fn bytes_behind_an_upgrade_that_the_backend_declines_are_dropped() {
    let (sender, seen) = mpsc::channel();
    let backend = backend::start(move |mut peer| {
        let (head, content, _) = peer.request().unwrap();
        let target = head.target.to_string();
        let status = &target[1..4];
        let upgrade = if target.ends_with("/upgrade") {
            "Upgrade: websocket\r\n"
        } else {
            ""
        };
        let fields = format!("{upgrade}Content-Length: 2\r\n");
        peer.send(format!("HTTP/1.1 {status} X\r\n{fields}\r\nok"));
        // The rest of the connection, up to its end.
        let rest = peer.bytes(1).map_err(|error| error.kind());
        sender.send((target, content, rest)).unwrap();
    });
    let scene = Scene::service().agent_to(backend).start();
    for (target, content) in [
        ("/200/", ""),
        ("/200/upgrade", "content"),
        ("/403/", "content"),
        ("/426/upgrade", ""),
        ("/501/", "content"),
    ] {
        // At once, so that the gateway has read all before it has an answer.
        let request = upgrade_with(&scene, target, content) + &smuggled(&scene);
        let response = last_response(&scene, &request);
        assert_eq!(response.status.as_str(), &target[1..4]);
        assert_eq!(response.body, b"ok", "{target}");
        let end = Err(ErrorKind::UnexpectedEof);
        let expected = (target.to_owned(), content.as_bytes().to_vec(), end);
        assert_eq!(seen.recv_timeout(SOON), Ok(expected));
    }
    scene.wait_until_slots_are_free();
    let more = seen.try_recv();
    assert!(more.is_err(), "a second request reached the backend");
}

#[test]
fn bytes_behind_an_upgrade_that_the_gateway_declines_are_dropped() {
    let (scene, seen) = recording_ok();
    let unauthenticated = format!(
        "GET / HTTP/1.1\r\nHost: {HOST}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    );
    let elsewhere = "demo--echo.eu2.gw.localhost";
    let misdirected = upgrade_with(&scene, "/", "").replace(HOST, elsewhere);
    for (declined, code) in [
        (unauthenticated, "GW_AUTH_REQUIRED"),
        (misdirected, "GW_MISDIRECTED"),
    ] {
        let response = last_response(&scene, &(declined + &smuggled(&scene)));
        assert_eq!(response.code(), code);
    }
    assert_seen(&scene, &seen, &[], "declined by the gateway");
}

/// What arrives at a backend that has not answered an upgrade, then behind its answer.
type Arrived = Result<Vec<u8>, ErrorKind>;

/// Answers with [`OK`]; switches protocols once `released`. The request says what to answer and how
/// many bytes to report then.
fn switch(mut peer: Peer<TcpStream>, arrived: &Sender<Arrived>, released: &Mutex<Receiver<()>>) {
    while let Ok(head) = peer.request_head() {
        if head.upgrade.is_none() {
            peer.send(OK);
            continue;
        }
        arrived.send(Ok(Vec::new())).unwrap();
        let released = released.lock().unwrap_or_else(PoisonError::into_inner);
        released.recv_timeout(SOON).unwrap();
        peer.stream.set_nonblocking(true).unwrap();
        let early = peer.stream.peek(&mut [0]).map_err(|error| error.kind());
        peer.stream.set_nonblocking(false).unwrap();
        arrived.send(early.map(|_| b"early".to_vec())).unwrap();
        let value = |name: &str| head.headers[name].to_str().unwrap();
        let accept = value("x-accept");
        peer.send(format!(
            "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\
             Sec-WebSocket-Accept: {accept}\r\n\r\n"
        ));
        let count = value("x-count").parse().unwrap();
        let behind = peer.bytes(count).map_err(|error| error.kind());
        arrived.send(behind).unwrap();
        return peer.send("switched");
    }
}

#[test]
fn bytes_behind_an_upgrade_wait_for_the_backend_to_switch() {
    let (arrived, arrivals) = mpsc::channel();
    let (release, released) = mpsc::channel();
    let released = Mutex::new(released);
    let backend = backend::start(move |peer| switch(peer, &arrived, &released));
    let scene = Scene::service().agent_to(backend).start();
    let smuggled = smuggled(&scene);
    let count = smuggled.len();
    let fields = format!(
        "Connection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nX-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\
         X-Count: {count}\r\n\r\n"
    );
    let mut caller = scene.connect();
    caller.send(scene.request("GET /", &fields) + &smuggled);
    assert_eq!(arrivals.recv_timeout(SOON), Ok(Ok(Vec::new())));
    // A whole exchange on the same tunnel passes by what the gateway had sent before.
    assert_answered(&scene);
    release.send(()).unwrap();
    let early = arrivals.recv_timeout(SOON).unwrap();
    let nothing = Err(ErrorKind::WouldBlock);
    assert_eq!(early, nothing, "bytes came before the 101");
    // Now they are bytes of the other protocol.
    assert_eq!(caller.response_head(&Method::GET).unwrap().status, 101);
    let behind = arrivals.recv_timeout(SOON).unwrap();
    assert_eq!(behind, Ok(smuggled.into_bytes()));
    assert_eq!(caller.bytes(8).unwrap(), b"switched");
    assert!(caller.is_closed());
}

#[test]
fn a_request_with_content_length_and_transfer_encoding_is_refused() {
    let (scene, seen) = recording_ok();
    let smuggled = smuggled(&scene);
    // For a reader of the length the smuggled request is of the body, for a reader of the coding it
    // follows, or the other way round.
    let behind = format!("\r\n0\r\n\r\n{smuggled}");
    let all = format!("Content-Length: {}\r\n", behind.len() - 2);
    let chunk = format!("\r\n{:x}\r\n{smuggled}\r\n0\r\n\r\n", smuggled.len());
    let chunked = "Transfer-Encoding: chunked\r\n";
    for rest in [
        format!("{all}{chunked}{behind}"),
        format!("{chunked}{all}{behind}"),
        format!("Content-Length: 4\r\n{chunked}{chunk}"),
        format!("Content-Length: 0\r\n{chunked}{chunk}"),
        format!("{all}Transfer-Encoding: identity\r\n{behind}"),
        format!("{all}Transfer-Encoding: identity, chunked\r\n{behind}"),
        format!("{all}Transfer-Encoding:\r\n{behind}"),
        format!("{all}Transfer-Encoding: x\r\n{chunked}{behind}"),
        // Naming a field in `Connection` does not remove it before it is checked.
        format!("Connection: Content-Length\r\n{all}{chunked}{behind}"),
    ] {
        assert_refused(&scene, &scene.request("POST /", &rest));
    }
    assert_seen(&scene, &seen, &[], "both framings");
}

/// Sends two requests on one connection. Asserts that the first response is refused, and the second
/// request answered by itself, on another connection of the backend.
#[track_caller]
fn assert_not_followed_by_a_forged_response(scene: &Scene, seen: &Receiver<Seen>, target: &str) {
    let mut caller = scene.connect();
    let code = caller.ask(scene.get(target)).code();
    assert_eq!(code, "GW_BACKEND_INVALID_RESPONSE", "{target}");
    assert_eq!(caller.ask(scene.get("/next")).body, b"ok", "{target}");
    let [first, next] = [(); 2].map(|()| seen.recv_timeout(SOON).unwrap());
    assert_eq!((&*first.target, &*next.target), (target, "/next"));
    assert_ne!(first.connection, next.connection, "{target}");
}

#[test]
fn a_response_with_content_length_and_transfer_encoding_is_refused() {
    const HEADS: [(&str, &str); 2] = [
        (
            "/length-first",
            "HTTP/1.1 200 OK\r\nContent-Length: 47\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        ),
        (
            "/coding-first",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n",
        ),
    ];
    let (scene, seen) = recording(&HEADS, Then::Reads);
    for (target, _) in HEADS {
        assert_not_followed_by_a_forged_response(&scene, &seen, target);
    }
}

#[test]
fn an_http_1_0_response_with_a_transfer_encoding_is_refused() {
    const HEAD: (&str, &str) = (
        "/chunked",
        "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    );
    let (scene, seen) = recording(&[HEAD], Then::Reads);
    assert_not_followed_by_a_forged_response(&scene, &seen, "/chunked");
}

fn as_http10(request: &str) -> String {
    request.replacen("HTTP/1.1", "HTTP/1.0", 1)
}

#[test]
fn an_http_1_0_request_with_a_transfer_encoding_is_refused() {
    let (scene, seen) = recording_ok();
    let smuggled = smuggled(&scene);
    for fields in [
        "Transfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nConnection: keep-alive\r\n",
        "Transfer-Encoding: identity\r\nConnection: keep-alive\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 5\r\nConnection: keep-alive\r\n",
    ] {
        let rest = format!("{fields}\r\n0\r\n\r\n{smuggled}");
        assert_refused(&scene, &as_http10(&scene.request("POST /", &rest)));
    }
    assert_seen(&scene, &seen, &[], "a coding in HTTP/1.0");
}

#[test]
fn bytes_behind_an_http_1_0_request_without_a_length_are_dropped() {
    let (scene, seen) = recording_ok();
    let smuggled = smuggled(&scene);
    for (line, fields) in [
        ("POST /", ""),
        ("POST /", "Connection: keep-alive\r\n"),
        (
            "PUT /",
            "Connection: keep-alive\r\nContent-Type: text/plain\r\n",
        ),
        ("DELETE /", "Connection: keep-alive\r\n"),
        ("GET /", ""),
    ] {
        let request = scene.request(line, &format!("{fields}\r\n{smuggled}"));
        let response = last_response(&scene, &as_http10(&request));
        assert_eq!(response.status, 200, "{line} {fields:?}");
        assert_eq!(response.body, b"ok", "{line} {fields:?}");
        assert_seen(&scene, &seen, &[("/", "")], line);
    }
}

#[test]
fn a_request_behind_an_http_1_0_request_with_a_length_is_served() {
    let (scene, seen) = recording_ok();
    let fields = "Connection: keep-alive\r\nContent-Length: 5\r\n\r\nhello";
    let mut caller = scene.connect();
    caller.send(as_http10(&scene.request("POST /", fields)) + &smuggled(&scene));
    for connection in ["keep-alive", ""] {
        let response = caller.response();
        assert_eq!(response.header("connection"), connection);
        assert_eq!(response.body, b"ok", "{connection:?}");
    }
    let expected = [("/", "hello"), ("/smuggled", "")];
    assert_seen(&scene, &seen, &expected, "with a length");
}

#[test]
fn a_response_that_ends_with_its_connection_is_not_followed_by_another() {
    const HEADS: [(&str, &str); 3] = [
        ("/1.0", "HTTP/1.0 200 OK\r\n\r\n"),
        (
            "/1.0-keep-alive",
            "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n\r\n",
        ),
        ("/1.1", "HTTP/1.1 200 OK\r\n\r\n"),
    ];
    let (scene, seen) = recording(&HEADS, Then::Closes);
    for (target, _) in HEADS {
        let mut caller = scene.connect();
        let response = caller.ask(scene.get(target));
        // The caller's connection persists: there the body has a framing of its own.
        assert_eq!(response.framing, Framing::Chunked, "{target}");
        assert_eq!(response.body, FORGED.as_bytes(), "{target}");
        let line = format!("GET {target}");
        let old = as_http10(&scene.request(&line, "Connection: keep-alive\r\n\r\n"));
        let response = caller.ask(old);
        assert_eq!(response.framing, Framing::UntilClose, "{target}");
        assert_eq!(response.body, FORGED.as_bytes(), "{target}");
        assert_last(&mut caller, &response, target);
        let [first, second] = [(); 2].map(|()| seen.recv_timeout(SOON).unwrap());
        assert_ne!(first.connection, second.connection, "{target}");
        assert_seen(&scene, &seen, &[], target);
    }
}
