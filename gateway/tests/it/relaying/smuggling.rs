//! Request smuggling: bytes that one party takes for the body of a message, and another for the
//! next message.

use std::io::ErrorKind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Mutex, PoisonError};

use gw_shared::http::Framing;
use http::Method;

use crate::support::SOON;
use crate::support::peers::backend;
use crate::support::peers::caller::{Caller, HOST};
use crate::support::scene::Scene;

/// A request as the backend received it.
#[derive(Debug, PartialEq)]
struct Seen {
    connection: usize,
    target: String,
    body: Vec<u8>,
}

/// What a backend does after an answer.
#[derive(Clone, Copy, PartialEq)]
enum Then {
    Reads,
    Closes,
}

/// A backend that reads bodies by their framing and answers by target. Reports every request.
fn recording(
    answer: impl Fn(&str) -> (&'static str, Then) + Send + Sync + 'static,
) -> (String, Receiver<Seen>) {
    let (sender, receiver) = mpsc::channel();
    let connections = AtomicUsize::new(0);
    let url = backend::start(move |mut peer| {
        let connection = connections.fetch_add(1, Ordering::Relaxed);
        while let Ok((head, body, _)) = peer.request() {
            let (bytes, then) = answer(head.target.as_str());
            sender
                .send(Seen {
                    connection,
                    target: head.target.to_string(),
                    body,
                })
                .unwrap();
            peer.send(bytes);
            if then == Then::Closes {
                return;
            }
        }
    });
    (url, receiver)
}

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// A request that the gateway would serve if it took it for one.
fn smuggled(scene: &Scene) -> String {
    scene.get("/smuggled")
}

/// Asserts that the response announces the end of the connection and that nothing follows it.
fn is_last(caller: &mut Caller, connection: &str, what: &str) {
    assert_eq!(connection, "close", "{what}");
    assert!(caller.is_closed(), "{what}");
}

/// Asserts that the backend gets nothing but `expected`, each with this body, and the request of
/// this function. That one follows on a connection of the pool whatever was sent there.
fn is_all(scene: &Scene, seen: &Receiver<Seen>, expected: &[(&str, &[u8])], what: &str) {
    let mut caller = scene.connect();
    caller.send(scene.get("/last"));
    assert_eq!(caller.response().body, b"ok", "{what}");
    for (target, body) in expected.iter().chain(&[("/last", &b""[..])]) {
        let seen = seen.recv_timeout(SOON).unwrap();
        assert_eq!(
            (seen.target.as_str(), seen.body.as_slice()),
            (*target, *body),
            "{what}"
        );
    }
    assert!(seen.try_recv().is_err(), "{what}");
}

fn upgrade(scene: &Scene, target: &str) -> String {
    upgrade_with(scene, target, "")
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
    let scene = Scene::service()
        .agent_to(backend::start(move |mut peer| {
            let (head, content, _) = peer.request().unwrap();
            let target = head.target.to_string();
            let (status, fields) = target[1..].split_once('/').unwrap();
            let fields = if fields == "upgrade" {
                "Upgrade: websocket\r\n"
            } else {
                ""
            };
            peer.send(format!(
                "HTTP/1.1 {status} X\r\n{fields}Content-Length: 2\r\n\r\nok"
            ));
            // The rest of the connection, up to its end.
            let rest = peer.bytes(1);
            sender
                .send((target, content, rest.map_err(|error| error.kind())))
                .unwrap();
        }))
        .start();
    for (target, sent) in [
        ("/200/", ""),
        ("/200/upgrade", "content"),
        ("/403/", "content"),
        ("/426/upgrade", ""),
        ("/501/", "content"),
    ] {
        let mut caller = scene.connect();
        // At once, so that the gateway has read all before it has an answer.
        caller.send(upgrade_with(&scene, target, sent) + &smuggled(&scene));
        let response = caller.response();
        assert_eq!(
            (response.status.as_str(), response.body.as_slice()),
            (&target[1..4], &b"ok"[..])
        );
        is_last(&mut caller, response.header("connection"), target);
        let (path, content, rest) = seen.recv_timeout(SOON).unwrap();
        assert_eq!(
            (path.as_str(), content.as_slice(), rest),
            (target, sent.as_bytes(), Err(ErrorKind::UnexpectedEof))
        );
    }
    scene.wait_until_slots_are_free();
    assert!(
        seen.try_recv().is_err(),
        "a second request reached the backend"
    );
}

#[test]
fn bytes_behind_an_upgrade_that_the_gateway_declines_are_dropped() {
    let (url, seen) = recording(|_| (OK, Then::Reads));
    let scene = Scene::service().agent_to(url).start();
    let unauthenticated = format!(
        "GET / HTTP/1.1\r\nHost: {HOST}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    );
    let misdirected = upgrade(&scene, "/").replace(HOST, "demo--echo.eu2.gw.localhost");
    for (declined, code) in [
        (unauthenticated, "GW_AUTH_REQUIRED"),
        (misdirected, "GW_MISDIRECTED"),
    ] {
        let mut caller = scene.connect();
        caller.send(declined + &smuggled(&scene));
        let response = caller.response();
        assert_eq!(response.code(), code);
        is_last(&mut caller, response.header("connection"), code);
    }
    is_all(&scene, &seen, &[], "declined by the gateway");
}

#[test]
fn bytes_behind_an_upgrade_wait_for_the_backend_to_switch() {
    let (arrived, arrivals) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let released = Mutex::new(released);
    let scene = Scene::service()
        .agent_to(backend::start(move |mut peer| {
            while let Ok(head) = peer.request_head() {
                if head.upgrade.is_none() {
                    peer.send(OK);
                    continue;
                }
                arrived.send(Ok(Vec::new())).unwrap();
                released
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .recv_timeout(SOON)
                    .unwrap();
                peer.stream.set_nonblocking(true).unwrap();
                let early = peer.stream.peek(&mut [0]).map_err(|error| error.kind());
                peer.stream.set_nonblocking(false).unwrap();
                arrived.send(early.map(|_| b"early".to_vec())).unwrap();
                peer.send(
                "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n",
            );
                peer.send(format!(
                    "Sec-WebSocket-Accept: {}\r\n\r\n",
                    head.headers["x-accept"].to_str().unwrap()
                ));
                let count = head.headers["x-count"].to_str().unwrap().parse().unwrap();
                arrived
                    .send(peer.bytes(count).map_err(|error| error.kind()))
                    .unwrap();
                return peer.send("switched");
            }
        }))
        .start();
    let smuggled = smuggled(&scene);
    let mut caller = scene.connect();
    let fields = format!(
        "Connection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nX-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\
         X-Count: {}\r\n\r\n",
        smuggled.len()
    );
    caller.send(scene.request("GET /", &fields) + &smuggled);
    assert_eq!(arrivals.recv_timeout(SOON).unwrap(), Ok(Vec::new()));
    // A whole exchange on the same tunnel passes by what the gateway had sent before.
    let mut other = scene.connect();
    other.send(scene.get("/other"));
    assert_eq!(other.response().body, b"ok");
    release.send(()).unwrap();
    assert_eq!(
        arrivals.recv_timeout(SOON).unwrap(),
        Err(ErrorKind::WouldBlock),
        "bytes came before the 101"
    );
    // Now they are bytes of the other protocol.
    assert_eq!(caller.response_head(&Method::GET).unwrap().status, 101);
    assert_eq!(
        arrivals.recv_timeout(SOON).unwrap(),
        Ok(smuggled.into_bytes())
    );
    assert_eq!(caller.bytes(8).unwrap(), b"switched");
    assert!(caller.is_closed());
}

#[test]
fn a_request_with_content_length_and_transfer_encoding_is_refused() {
    let (url, seen) = recording(|_| (OK, Then::Reads));
    let scene = Scene::service().agent_to(url).start();
    let smuggled = smuggled(&scene);
    // For a reader of the length the smuggled request is of the body, for a reader of the coding it
    // follows, or the other way round.
    let all = 5 + smuggled.len();
    let some = 4;
    let chunk = format!("{:x}\r\n{smuggled}\r\n0\r\n\r\n", smuggled.len());
    for fields in [
        format!("Content-Length: {all}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{smuggled}"),
        format!("Transfer-Encoding: chunked\r\nContent-Length: {all}\r\n\r\n0\r\n\r\n{smuggled}"),
        format!("Content-Length: {some}\r\nTransfer-Encoding: chunked\r\n\r\n{chunk}"),
        format!("Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n{chunk}"),
        format!("Content-Length: {all}\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n{smuggled}"),
        format!(
            "Content-Length: {all}\r\nTransfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n\
             {smuggled}"
        ),
        format!("Content-Length: {all}\r\nTransfer-Encoding:\r\n\r\n0\r\n\r\n{smuggled}"),
        format!(
            "Content-Length: {all}\r\nTransfer-Encoding: x\r\nTransfer-Encoding: chunked\r\n\r\n\
             0\r\n\r\n{smuggled}"
        ),
        // Naming a field in `Connection` does not remove it before it is checked.
        format!(
            "Connection: Content-Length\r\nContent-Length: {all}\r\nTransfer-Encoding: chunked\r\n\
             \r\n0\r\n\r\n{smuggled}"
        ),
    ] {
        let mut caller = scene.connect();
        caller.send(scene.request("POST /", &fields));
        let response = caller.response();
        assert_eq!(
            (response.status.as_u16(), response.code().as_str()),
            (400, "GW_BAD_REQUEST"),
            "{fields}"
        );
        is_last(&mut caller, response.header("connection"), &fields);
    }
    is_all(&scene, &seen, &[], "both framings");
}

/// Sends two requests on one connection; returns the code of the first response. Asserts that the
/// second request was answered by itself, on another connection of the backend.
fn is_not_followed_by_a_forged_response(
    scene: &Scene,
    seen: &Receiver<Seen>,
    target: &str,
) -> String {
    let mut caller = scene.connect();
    caller.send(scene.get(target));
    let code = caller.response().code();
    caller.send(scene.get("/next"));
    assert_eq!(caller.response().body, b"ok", "{target}");
    let [first, next] = [(); 2].map(|()| seen.recv_timeout(SOON).unwrap());
    assert_eq!(
        (first.target.as_str(), next.target.as_str()),
        (target, "/next")
    );
    assert_ne!(first.connection, next.connection, "{target}");
    code
}

#[test]
fn a_response_with_content_length_and_transfer_encoding_is_refused() {
    let (url, seen) = recording(|target| match target {
        "/length-first" => (
            "HTTP/1.1 200 OK\r\nContent-Length: 47\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n\
             HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged",
            Then::Reads,
        ),
        "/coding-first" => (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n\
             HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged",
            Then::Reads,
        ),
        _ => (OK, Then::Reads),
    });
    let scene = Scene::service().agent_to(url).start();
    for target in ["/length-first", "/coding-first"] {
        let code = is_not_followed_by_a_forged_response(&scene, &seen, target);
        assert_eq!(code, "GW_BACKEND_INVALID_RESPONSE", "{target}");
    }
}

fn as_http10(request: &str) -> String {
    request.replacen("HTTP/1.1", "HTTP/1.0", 1)
}

#[test]
fn an_http_1_0_request_with_a_transfer_encoding_is_refused() {
    let (url, seen) = recording(|_| (OK, Then::Reads));
    let scene = Scene::service().agent_to(url).start();
    let smuggled = smuggled(&scene);
    for fields in [
        "Transfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nConnection: keep-alive\r\n",
        "Transfer-Encoding: identity\r\nConnection: keep-alive\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 5\r\nConnection: keep-alive\r\n",
    ] {
        let mut caller = scene.connect();
        caller.send(as_http10(
            &scene.request("POST /", &format!("{fields}\r\n0\r\n\r\n{smuggled}")),
        ));
        let response = caller.response();
        assert_eq!(
            (response.status.as_u16(), response.code().as_str()),
            (400, "GW_BAD_REQUEST"),
            "{fields}"
        );
        is_last(&mut caller, response.header("connection"), fields);
    }
    is_all(&scene, &seen, &[], "a coding in HTTP/1.0");
}

#[test]
fn bytes_behind_an_http_1_0_request_without_a_length_are_dropped() {
    let (url, seen) = recording(|_| (OK, Then::Reads));
    let scene = Scene::service().agent_to(url).start();
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
        let mut caller = scene.connect();
        caller.send(as_http10(
            &scene.request(line, &format!("{fields}\r\n{smuggled}")),
        ));
        let response = caller.response();
        assert_eq!(
            (response.status.as_u16(), response.body.as_slice()),
            (200, &b"ok"[..]),
            "{line} {fields:?}"
        );
        is_last(&mut caller, response.header("connection"), line);
        is_all(&scene, &seen, &[("/", b"")], line);
    }
    // With a length, it is clear where the next request begins.
    let mut caller = scene.connect();
    let fields = "Connection: keep-alive\r\nContent-Length: 5\r\n\r\nhello";
    caller.send(as_http10(&scene.request("POST /", fields)) + &smuggled);
    for connection in ["keep-alive", ""] {
        let response = caller.response();
        assert_eq!(
            (response.header("connection"), response.body.as_slice()),
            (connection, &b"ok"[..])
        );
    }
    is_all(
        &scene,
        &seen,
        &[("/", b"hello"), ("/smuggled", b"")],
        "with a length",
    );
}

#[test]
fn a_response_that_ends_with_its_connection_is_not_followed_by_another() {
    const FORGED: &str = "first HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged";
    let (url, seen) = recording(|target| match target {
        "/1.0" => (
            "HTTP/1.0 200 OK\r\n\r\nfirst HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged",
            Then::Closes,
        ),
        "/1.0-keep-alive" => (
            "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n\r\nfirst HTTP/1.1 200 OK\r\n\
             Content-Length: 6\r\n\r\nforged",
            Then::Closes,
        ),
        "/1.1" => (
            "HTTP/1.1 200 OK\r\n\r\nfirst HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged",
            Then::Closes,
        ),
        "/1.0-chunked" => (
            "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\
             \r\nHTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged",
            Then::Reads,
        ),
        _ => (OK, Then::Reads),
    });
    let scene = Scene::service().agent_to(url).start();
    let code = is_not_followed_by_a_forged_response(&scene, &seen, "/1.0-chunked");
    assert_eq!(code, "GW_BACKEND_INVALID_RESPONSE");
    for target in ["/1.0", "/1.0-keep-alive", "/1.1"] {
        let mut caller = scene.connect();
        caller.send(scene.get(target));
        let response = caller.response();
        // The caller's connection persists: there the body has a framing of its own.
        assert_eq!(
            (response.framing, response.body.as_slice()),
            (Framing::Chunked, FORGED.as_bytes()),
            "{target}"
        );
        caller.send(as_http10(&scene.request(
            &format!("GET {target}"),
            "Connection: keep-alive\r\n\r\n",
        )));
        let response = caller.response();
        assert_eq!(
            (response.framing, response.body.as_slice()),
            (Framing::UntilClose, FORGED.as_bytes()),
            "{target}"
        );
        is_last(&mut caller, response.header("connection"), target);
        let [first, second] = [(); 2].map(|()| seen.recv_timeout(SOON).unwrap());
        assert_ne!(first.connection, second.connection, "{target}");
        is_all(&scene, &seen, &[], target);
    }
}
