//! Message framing: framing fields of a caller or a backend apply only to their own connection.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver};

use bytes::Bytes;
use gw_shared::http::Fields;
use h2::Reason;
use h2::ext::Protocol;
use http::{HeaderMap, HeaderName, HeaderValue, Method};

use super::{exchange_frames, response_with};
use crate::support::peers::caller::HOST;
use crate::support::peers::http2_caller::{on_a_reactor, whole};
use crate::support::peers::http2_frames::{DATA, END_STREAM, block, frame, headers};
use crate::support::peers::{backend, http2_caller};
use crate::support::scene::Scene;

/// A request as the backend received it.
#[derive(Debug)]
struct Seen {
    connection: usize,
    /// Target, length of the body, and names of the framing fields and of `upgrade`.
    text: String,
}

/// A scene whose backend reads bodies by their framing, declines every upgrade, answers with the
/// target, and keeps its connections open.
fn declining() -> (Scene, Receiver<Seen>) {
    let (sender, receiver) = mpsc::channel();
    let connections = AtomicUsize::new(0);
    let url = backend::start(move |mut peer| {
        let connection = connections.fetch_add(1, Ordering::Relaxed);
        while let Ok((head, body, _)) = peer.request() {
            let mut text = format!("{} {}", head.target, body.len());
            for name in head.headers.names().map(HeaderName::as_str) {
                if matches!(name, "content-length" | "transfer-encoding" | "upgrade") {
                    text += &format!(" {name}");
                }
            }
            sender.send(Seen { connection, text }).unwrap();
            peer.send(response_with(head.target.as_str()).replace("200 OK", "404 Not Found"));
        }
    });
    (Scene::service().agent_to(url).start(), receiver)
}

/// Asserts that the backend has got exactly these requests. Returns their connections.
#[track_caller]
fn assert_seen(seen: &Receiver<Seen>, expected: &[&str]) -> Vec<usize> {
    let all: Vec<Seen> = seen.try_iter().collect();
    let texts: Vec<&str> = all.iter().map(|seen| &*seen.text).collect();
    assert_eq!(texts, expected);
    all.iter().map(|seen| seen.connection).collect()
}

/// As [`assert_seen`]. Asserts that a connection with a declined upgrade serves no further request.
#[track_caller]
fn assert_seen_apart(seen: &Receiver<Seen>, expected: &[&str]) {
    let connections = assert_seen(seen, expected);
    for (at, connection) in connections.iter().enumerate() {
        let is_used_again = connections[at + 1..].contains(connection);
        let is_upgrade = expected[at].ends_with(" upgrade");
        assert!(!is_upgrade || !is_used_again, "{at}: {connections:?}");
    }
}

#[test]
fn a_declined_extended_connect_does_not_reach_the_next_request() {
    let (scene, seen) = declining();
    on_a_reactor(async {
        let caller = http2_caller::connect(&scene).await;
        assert_eq!(caller.get("/before").await.body, b"/before");
        for length in ["34", "0", "100000"] {
            let declined = caller
                .request(&Method::CONNECT, "/chat")
                .header("content-length", length)
                .extension(Protocol::from_static("websocket"));
            let (response, _upload) = caller.begin(declined, false).await;
            assert_eq!(whole(response).await.body, b"/chat", "{length}");
            assert_eq!(caller.get("/next").await.body, b"/next", "{length}");
        }
    });
    let expected = [
        &["/before 0"][..],
        &["/chat 0 upgrade", "/next 0"].repeat(3),
    ]
    .concat();
    assert_seen_apart(&seen, &expected);
}

#[test]
fn a_declined_http1_upgrade_does_not_reach_the_next_request() {
    let (scene, seen) = declining();
    for line in ["GET /chat", "POST /chat"] {
        let fields = "Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 0\r\n\r\n";
        let mut caller = scene.connect();
        assert_eq!(caller.ask(scene.request(line, fields)).body, b"/chat");
        assert!(caller.is_closed());
        assert_eq!(scene.connect().ask(scene.get("/next")).body, b"/next");
    }
    assert_seen_apart(&seen, &["/chat 0 upgrade", "/next 0"].repeat(2));
}

/// Protocols that would tunnel HTTP past the gateway, and values that are not a protocol.
const REFUSED: [&str; 17] = [
    "h2c",
    "H2C",
    "h2",
    "h2c-14",
    "h3",
    "HTTP/2.0",
    "http/1.1",
    "http",
    "HTTP2",
    "tls",
    "TLS/1.0",
    "websocket, h2c",
    "a b",
    "",
    "websocket/",
    "/13",
    "websocket/13/1",
];

#[test]
fn upgrades_to_http_or_invalid_protocols_are_refused() {
    let (scene, seen) = declining();
    on_a_reactor(async {
        let caller = http2_caller::connect(&scene).await;
        assert_eq!(caller.get("/before").await.status, 404);
        for protocol in REFUSED {
            let request = caller
                .request(&Method::CONNECT, "/chat")
                .extension(Protocol::from(protocol));
            let (response, _upload) = caller.begin(request, false).await;
            let response = whole(response).await;
            assert_eq!(response.status, 400, "{protocol:?}");
            let code = &response.json()["error"]["code"];
            assert_eq!(code, "GW_BAD_REQUEST", "{protocol:?}");
        }
        assert_eq!(caller.get("/after").await.status, 404);
    });
    assert_seen(&seen, &["/before 0", "/after 0"]);
}

/// RFC 9110 §7.8: a recipient may ignore `Upgrade`.
#[test]
fn http1_upgrades_to_http_or_invalid_protocols_are_ignored() {
    let (scene, seen) = declining();
    let mut caller = scene.connect();
    for protocol in REFUSED {
        let fields = format!("Connection: Upgrade\r\nUpgrade: {protocol}\r\n\r\n");
        let response = caller.ask(scene.request("GET /plain", &fields));
        assert_eq!(response.body, b"/plain", "{protocol:?}");
    }
    assert_seen(&seen, &["/plain 0"; REFUSED.len()]);
}

fn post_of_length_zero(caller: &http2_caller::Connection, target: &str) -> http::request::Builder {
    caller
        .request(&Method::POST, target)
        .header("content-length", "0")
}

#[test]
fn a_body_beyond_content_length_zero_does_not_reach_the_backend() {
    let (scene, seen) = declining();
    on_a_reactor(async {
        let caller = http2_caller::connect(&scene).await;
        let contradicted = post_of_length_zero(&caller, "/contradicted");
        let (response, mut upload) = caller.begin(contradicted, false).await;
        // Gives the head time to reach the backend.
        assert_eq!(caller.get("/meanwhile").await.body, b"/meanwhile");
        let body = Bytes::from_static(b"GET / HTTP/1.1\r\n");
        upload.send_data(body, true).unwrap();
        let reason = response.await.unwrap_err().reason();
        assert_eq!(reason, Some(Reason::PROTOCOL_ERROR));
        assert_eq!(caller.get("/after").await.body, b"/after");
    });
    assert_seen(&seen, &["/meanwhile 0", "/after 0"]);
}

#[test]
fn a_body_of_content_length_zero_may_end_after_its_head() {
    let (scene, seen) = declining();
    on_a_reactor(async {
        let caller = http2_caller::connect(&scene).await;
        let late = post_of_length_zero(&caller, "/late");
        let (response, mut upload) = caller.begin(late, false).await;
        upload.send_data(Bytes::new(), true).unwrap();
        assert_eq!(whole(response).await.body, b"/late");
        let with_trailers = post_of_length_zero(&caller, "/trailers");
        let (response, mut upload) = caller.begin(with_trailers, false).await;
        let trailer = ("x".parse().unwrap(), "1".parse().unwrap());
        let trailers = HeaderMap::from_iter([trailer]);
        upload.send_trailers(trailers).unwrap();
        assert_eq!(whole(response).await.body, b"/trailers");
    });
    let expected = ["/late 0 content-length", "/trailers 0 content-length"];
    assert_seen(&seen, &expected);
}

/// `x_own` and the fields that frame a message or look as if they did.
fn framing_of(headers: &Fields) -> Vec<String> {
    const NAMES: [&str; 3] = ["content-length", "transfer-encoding", "x-own"];
    let mut fields: Vec<String> = headers
        .iter()
        .filter(|(name, _)| NAMES.contains(&&*name.as_str().replace('_', "-")))
        .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()))
        .collect();
    fields.sort();
    fields
}

#[test]
fn framing_fields_with_underscores_are_dropped_in_both_directions() {
    let (sender, receiver) = mpsc::channel();
    let backend = backend::start(move |mut peer| {
        while let Ok((head, body, _)) = peer.request() {
            sender.send((framing_of(&head.headers), body)).unwrap();
            peer.send(
                "HTTP/1.1 200 OK\r\ncontent_length: 1\r\nCONTENT_LENGTH: 7\r\n\
                 Transfer_Encoding: chunked\r\nX_Own: 1\r\nContent-Length: 0003\r\n\r\nabc",
            );
        }
    });
    let scene = Scene::service().agent_to(backend).start();
    let fields = "Content_Length: 1\r\nCONTENT_length: 9\r\nTransfer_Encoding: chunked\r\n\
                  X_Own: 1\r\nContent-Length: 005\r\n\r\nhello";
    let over_http1 = scene.connect().ask(scene.request("POST /", fields));
    let over_http2 = on_a_reactor(async {
        let caller = http2_caller::connect(&scene).await;
        let request = caller
            .request(&Method::POST, "/")
            .header("content_length", "1")
            .header("x_own", "1")
            .header("transfer_encoding", "chunked")
            .header("content-length", "005");
        let (response, mut upload) = caller.begin(request, false).await;
        let body = Bytes::from_static(b"hello");
        upload.send_data(body, true).unwrap();
        whole(response).await
    });
    for (headers, body) in [
        (over_http1.headers, over_http1.body),
        (over_http2.headers.into(), over_http2.body),
    ] {
        let request = receiver.recv().unwrap();
        let expected = ["content-length: 5", "x_own: 1"].map(str::to_owned);
        assert_eq!(request, (expected.to_vec(), b"hello".to_vec()));
        assert_eq!(framing_of(&headers), ["content-length: 3", "x_own: 1"]);
        assert_eq!(body, b"abc");
    }
}

#[test]
fn later_minor_versions_of_http_1_are_served_as_1_1() {
    let backend = backend::start(|mut peer| {
        while let Ok((head, body, _)) = peer.request() {
            let text = format!("{}{}", head.target, String::from_utf8(body).unwrap());
            let fields = "HTTP/1.2 200 OK\r\nTransfer-Encoding: chunked\r\n";
            peer.send(format!("{fields}\r\n{:x}\r\n", text.len()));
            peer.send(format!("{text}\r\n0\r\n\r\n"));
        }
    });
    let scene = Scene::service().agent_to(backend).start();
    let chunked = "Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n";
    let request = scene.request("POST /p", chunked);
    let mut caller = scene.connect();
    for version in ["HTTP/1.2", "HTTP/1.9"] {
        let response = caller.ask(request.replacen("HTTP/1.1", version, 1));
        assert_eq!(response.body, b"/phi", "{version}");
    }
}

#[test]
fn bodiless_responses_keep_a_content_length_only_where_it_is_allowed() {
    let backend = backend::start(|mut peer| {
        while let Ok(head) = peer.request_head() {
            let status = &head.target.as_str()[1..];
            peer.send("HTTP/1.1 103 Early Hints\r\nContent-Length: 3\r\nLink: </a>\r\n\r\n");
            peer.send(format!("HTTP/1.1 {status} X\r\n"));
            peer.send("Content-Length: 7\r\n\r\n");
        }
    });
    let scene = Scene::service().agent_to(backend).start();
    for (method, target, length) in [
        (Method::HEAD, "/200", "7"),
        (Method::GET, "/304", "7"),
        (Method::GET, "/204", ""),
        (Method::HEAD, "/204", ""),
    ] {
        let line = format!("{method} {target}");
        let mut caller = scene.connect();
        caller.send(scene.request(&line, "\r\n"));
        let interim = caller.response_head(&method).unwrap();
        assert_eq!(interim.status, 103, "{line}");
        assert!(!interim.headers.contains("content-length"), "{line}");
        let response = caller.response_to(&method);
        let found = (response.header("content-length"), response.body.len());
        assert_eq!(found, (length, 0), "{line}");
        let response = on_a_reactor(async {
            let caller = http2_caller::connect(&scene).await;
            caller.fetch(caller.request(&method, target)).await
        });
        let found = (response.header("content-length"), response.body.len());
        assert_eq!(found, (length, 0), "{line} over HTTP/2");
    }
}

#[test]
fn malformed_http2_messages_are_stream_errors() {
    const PROTOCOL_ERROR: u32 = 1;
    let (scene, seen) = declining();
    let key = ("x-gw-service-key", &*scene.about.service_key);
    let post = |scheme, value| {
        let target = [(":method", "POST"), (":scheme", scheme), (":path", "/")];
        [&target[..], &[(":authority", HOST), key, ("x", value)]].concat()
    };
    let whole = |fields: &[(&str, &str)]| headers(1, END_STREAM, &block(fields));
    let without_authority = |scheme| {
        let target = [(":method", "GET"), (":scheme", scheme), (":path", "/")];
        whole(&[&target[..], &[("host", HOST), key]].concat())
    };
    let with_trailer = |value| {
        let head = headers(1, 0, &block(&post("https", "a")));
        let body = frame(DATA, 0, 1, b"body");
        [head, body, whole(&[("x", value)])].concat()
    };
    for (what, frames) in [
        ("leading space", whole(&post("https", " a"))),
        ("trailing space", whole(&post("https", "a "))),
        ("leading tab", whole(&post("https", "\ta"))),
        ("only a space", whole(&post("https", " "))),
        ("empty scheme", whole(&post("", "a"))),
        ("empty scheme without authority", without_authority("")),
        ("trailer with a trailing space", with_trailer("a ")),
        ("trailer with a leading tab", with_trailer("\ta")),
    ] {
        let answer = exchange_frames(&scene, &frames);
        assert_eq!(answer, Err(PROTOCOL_ERROR), "{what}");
    }
    scene.wait_until_slots_are_free();
    assert_seen(&seen, &[]);
    // The same messages without the fault.
    for frames in [with_trailer("a"), without_authority("https")] {
        assert_eq!(exchange_frames(&scene, &frames), Ok(b"/".to_vec()));
    }
}

#[test]
fn framing_fields_in_trailers_are_dropped_in_both_directions() {
    let (sender, receiver) = mpsc::channel();
    let backend = backend::start(move |mut peer| {
        while let Ok((_, _, trailers)) = peer.request() {
            sender.send(trailers).unwrap();
            peer.send(
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 9\r\n\
                 Transfer-Encoding: chunked\r\nConnection: close\r\nUpgrade: h2c\r\n\
                 content_length: 9\r\nX-Sum: 1\r\n\r\n",
            );
        }
    });
    let scene = Scene::service().agent_to(backend).start();
    let only_sum = Fields::from_iter([("x-sum".parse().unwrap(), HeaderValue::from_static("1"))]);
    let chunked = "Transfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 9\r\n\
                   Transfer-Encoding: chunked\r\nConnection: close\r\ncontent_length: 9\r\n\
                   Upgrade: h2c\r\nHost: h\r\nX-Sum: 1\r\n\r\n";
    let mut caller = scene.connect();
    for _ in 0..2 {
        let response = caller.ask(scene.request("POST /", chunked));
        assert_eq!(response.trailers, only_sum);
        assert_eq!(receiver.recv().unwrap(), only_sum);
    }
}
