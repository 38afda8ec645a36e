//! Message framing: framing fields of a caller or a backend apply only to their own connection.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver};

use bytes::Bytes;
use gw_shared::http::Fields;
use h2::Reason;
use h2::ext::Protocol;
use http::{HeaderMap, HeaderValue, Method};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::peers::caller::HOST;
use crate::support::peers::http2_caller::{on_a_reactor, tls, whole};
use crate::support::peers::http2_frames::{
    DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, RST_STREAM, SETTINGS, frame,
};
use crate::support::peers::{backend, http2_caller, http2_frames};
use crate::support::scene::Scene;

/// A request as the backend received it.
#[derive(Debug)]
struct Seen {
    connection: usize,
    /// Target and body length.
    target: String,
    body: usize,
    /// Names of the framing fields and of `upgrade`.
    framing: Vec<String>,
}

/// A backend that reads bodies by their framing, declines every upgrade, and keeps its connections
/// open.
fn declining() -> (String, Receiver<Seen>) {
    let (sender, receiver) = mpsc::channel();
    let connections = AtomicUsize::new(0);
    let url = backend::start(move |mut peer| {
        let connection = connections.fetch_add(1, Ordering::Relaxed);
        while let Ok((head, body, _)) = peer.request() {
            let target = head.target.to_string();
            let answer = format!(
                "HTTP/1.1 404 Not Found\r\nContent-Length: {}\r\n\r\n{target}",
                target.len()
            );
            let frames =
                |name: &&str| matches!(*name, "content-length" | "transfer-encoding" | "upgrade");
            let framing = head
                .headers
                .names()
                .map(|name| name.as_str())
                .filter(frames)
                .map(str::to_owned)
                .collect();
            sender
                .send(Seen {
                    connection,
                    target,
                    body: body.len(),
                    framing,
                })
                .unwrap();
            peer.send(answer);
        }
    });
    (url, receiver)
}

#[test]
fn a_declined_extended_connect_does_not_reach_the_next_request() {
    let (url, seen) = declining();
    let scene = Scene::service().agent_to(url).start();
    on_a_reactor(async {
        let caller = http2_caller::connect(&scene).await;
        assert_eq!(caller.get("/before").await.body, b"/before");
        for length in ["34", "0", "100000"] {
            let declined = caller
                .request(&Method::CONNECT, "/chat")
                .header("content-length", length);
            let declined = declined.extension(Protocol::from_static("websocket"));
            let (response, _upload) = caller.begin(declined, false).await;
            assert_eq!(whole(response).await.body, b"/chat", "{length}");
            assert_eq!(caller.get("/next").await.body, b"/next", "{length}");
        }
    });
    let all: Vec<Seen> = seen.try_iter().collect();
    let targets: Vec<&str> = all.iter().map(|seen| seen.target.as_str()).collect();
    assert_eq!(
        targets,
        [
            "/before", "/chat", "/next", "/chat", "/next", "/chat", "/next"
        ]
    );
    for (at, seen) in all.iter().enumerate() {
        let asks = seen.target == "/chat";
        assert_eq!(
            (seen.body, seen.framing == ["upgrade"]),
            (0, asks),
            "{seen:?}"
        );
        assert!(asks || seen.framing.is_empty(), "{seen:?}");
        // A connection with a declined upgrade serves no further request.
        assert!(
            !asks
                || all[at + 1..]
                    .iter()
                    .all(|later| later.connection != seen.connection),
            "{all:?}"
        );
    }
}

#[test]
fn a_declined_http1_upgrade_does_not_reach_the_next_request() {
    let (url, seen) = declining();
    let scene = Scene::service().agent_to(url).start();
    for line in ["GET /chat", "POST /chat"] {
        let fields = "Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 0\r\n\r\n";
        let mut caller = scene.connect();
        caller.send(scene.request(line, fields));
        assert_eq!(caller.response().body, b"/chat");
        assert!(caller.is_closed());
        let mut caller = scene.connect();
        caller.send(scene.get("/next"));
        assert_eq!(caller.response().body, b"/next");
    }
    for _ in 0..2 {
        let chat = seen.recv().unwrap();
        let next = seen.recv().unwrap();
        assert_eq!(
            (chat.target.as_str(), chat.framing),
            ("/chat", vec!["upgrade".to_owned()])
        );
        assert!(
            next.target == "/next" && next.connection != chat.connection,
            "{next:?}"
        );
    }
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
    let (url, seen) = declining();
    let scene = Scene::service().agent_to(url).start();
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
            assert_eq!(
                response.json()["error"]["code"],
                "GW_BAD_REQUEST",
                "{protocol:?}"
            );
        }
    });
    // RFC 9110 §7.8: a recipient may ignore `Upgrade`.
    let mut caller = scene.connect();
    for protocol in REFUSED {
        caller.send(scene.request(
            "GET /plain",
            &format!("Connection: Upgrade\r\nUpgrade: {protocol}\r\n\r\n"),
        ));
        assert_eq!(caller.response().body, b"/plain", "{protocol:?}");
    }
    let seen: Vec<Seen> = seen.try_iter().collect();
    assert!(
        seen.len() >= REFUSED.len() && seen.iter().all(|seen| seen.framing.is_empty()),
        "{seen:?}"
    );
    assert!(seen.iter().all(|seen| seen.target != "/chat"), "{seen:?}");
}

#[test]
fn a_body_beyond_content_length_zero_does_not_reach_the_backend() {
    let (url, seen) = declining();
    let scene = Scene::service().agent_to(url).start();
    on_a_reactor(async {
        let caller = http2_caller::connect(&scene).await;
        let empty = |target: &str| {
            caller
                .request(&Method::POST, target)
                .header("content-length", "0")
        };
        let (response, mut upload) = caller.begin(empty("/contradicted"), false).await;
        // Gives the head time to reach the backend.
        assert_eq!(caller.get("/meanwhile").await.body, b"/meanwhile");
        upload
            .send_data(Bytes::from_static(b"GET / HTTP/1.1\r\n"), true)
            .unwrap();
        assert_eq!(
            response.await.unwrap_err().reason(),
            Some(Reason::PROTOCOL_ERROR)
        );
        // An empty body that ends later is accepted.
        let (response, mut upload) = caller.begin(empty("/late"), false).await;
        upload.send_data(Bytes::new(), true).unwrap();
        assert_eq!(whole(response).await.body, b"/late");
        let (response, mut upload) = caller.begin(empty("/trailers"), false).await;
        upload
            .send_trailers(HeaderMap::from_iter([(
                "x".parse().unwrap(),
                "1".parse().unwrap(),
            )]))
            .unwrap();
        assert_eq!(whole(response).await.body, b"/trailers");
    });
    assert_eq!(seen.recv().unwrap().target, "/meanwhile");
    for target in ["/late", "/trailers"] {
        let seen = seen.recv().unwrap();
        assert_eq!(
            (seen.target.as_str(), seen.body, seen.framing),
            (target, 0, vec!["content-length".to_owned()])
        );
    }
}

#[test]
fn framing_fields_with_underscores_are_dropped_in_both_directions() {
    let (sender, receiver) = mpsc::channel();
    let scene = Scene::service()
        .agent_to(backend::start(move |mut peer| {
            while let Ok((head, body, _)) = peer.request() {
                let names: Vec<String> = head
                    .headers
                    .names()
                    .map(|name| name.as_str().to_owned())
                    .collect();
                let length = head.headers.get("content-length").cloned();
                sender.send((names, length, body)).unwrap();
                peer.send(
                    "HTTP/1.1 200 OK\r\ncontent_length: 1\r\nCONTENT_LENGTH: 7\r\n\
                 Transfer_Encoding: chunked\r\nX_Own: 1\r\nContent-Length: 0003\r\n\r\nabc",
                );
            }
        }))
        .start();
    let disguised =
        "Content_Length: 1\r\nCONTENT_length: 9\r\nTransfer_Encoding: chunked\r\nX_Own: 1\r\n";
    let mut caller = scene.connect();
    caller.send(scene.request(
        "POST /",
        &format!("{disguised}Content-Length: 005\r\n\r\nhello"),
    ));
    let response = caller.response();
    let check = |headers: &HeaderMap, body: &[u8]| {
        assert!(
            !headers.contains_key("content_length") && !headers.contains_key("transfer_encoding"),
            "{headers:?}"
        );
        assert_eq!(
            (&headers["x_own"], &headers["content-length"], body),
            (&"1".parse().unwrap(), &"3".parse().unwrap(), &b"abc"[..])
        );
    };
    check(&response.headers.into(), &response.body);
    on_a_reactor(async {
        let caller = http2_caller::connect(&scene).await;
        let request = caller
            .request(&Method::POST, "/")
            .header("content_length", "1")
            .header("x_own", "1");
        let request = request
            .header("transfer_encoding", "chunked")
            .header("content-length", "005");
        let (response, mut upload) = caller.begin(request, false).await;
        upload
            .send_data(Bytes::from_static(b"hello"), true)
            .unwrap();
        let response = whole(response).await;
        check(&response.headers, &response.body);
    });
    for _ in 0..2 {
        let (names, length, body) = receiver.recv().unwrap();
        assert!(names.contains(&"x_own".to_owned()), "{names:?}");
        assert!(
            !names
                .iter()
                .any(|name| name == "content_length" || name == "transfer_encoding"),
            "{names:?}"
        );
        assert_eq!(
            (length.unwrap().as_bytes(), body.as_slice()),
            (&b"5"[..], &b"hello"[..])
        );
    }
}

#[test]
fn later_minor_versions_of_http_1_are_served_as_1_1() {
    let scene = Scene::service()
        .agent_to(backend::start(|mut peer| {
            while let Ok((head, body, _)) = peer.request() {
                let target = head.target.as_str();
                peer.send(format!(
                    "HTTP/1.2 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n",
                    target.len() + body.len()
                ));
                peer.send(format!(
                    "{target}{}\r\n0\r\n\r\n",
                    String::from_utf8(body).unwrap()
                ));
            }
        }))
        .start();
    let mut caller = scene.connect();
    for version in ["1.2", "1.9"] {
        let whole = scene.request(
            "POST /p",
            "Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        );
        caller.send(whole.replacen("HTTP/1.1", &format!("HTTP/{version}"), 1));
        assert_eq!(caller.response().body, b"/phi", "{version}");
    }
}

#[test]
fn bodiless_responses_keep_a_content_length_only_where_it_is_allowed() {
    let scene = Scene::service()
        .agent_to(backend::start(|mut peer| {
            while let Ok(head) = peer.request_head() {
                let status = &head.target.as_str()[1..];
                peer.send(format!(
                    "HTTP/1.1 103 Early Hints\r\nContent-Length: 3\r\nLink: </a>\r\n\r\n\
                 HTTP/1.1 {status} X\r\n"
                ));
                peer.send("Content-Length: 7\r\n\r\n");
            }
        }))
        .start();
    let cases = [
        ("HEAD", "/200", Some("7")),
        ("GET", "/304", Some("7")),
        ("GET", "/204", None),
        ("HEAD", "/204", None),
    ];
    for (method, target, length) in cases {
        let method = Method::from_bytes(method.as_bytes()).unwrap();
        let mut caller = scene.connect();
        caller.send(scene.request(&format!("{method} {target}"), "\r\n"));
        let interim = caller.response_head(&method).unwrap();
        assert_eq!(
            (
                interim.status.as_u16(),
                interim.headers.get("content-length")
            ),
            (103, None),
            "{method} {target}"
        );
        let response = caller.response_to(&method);
        let found = response
            .headers
            .get("content-length")
            .map(|value| value.to_str().unwrap());
        assert_eq!(
            (found, response.body.len()),
            (length, 0),
            "{method} {target}"
        );
        on_a_reactor(async {
            let caller = http2_caller::connect(&scene).await;
            let response = caller.fetch(caller.request(&method, target)).await;
            let found = response
                .headers
                .get("content-length")
                .map(|value| value.to_str().unwrap());
            assert_eq!(
                (found, response.body.len()),
                (length, 0),
                "{method} {target}"
            );
        });
    }
}

/// Sends `frames` on a new connection. Returns the error code of the reset of stream 1; `None` if
/// it was answered.
fn reset_of(scene: &Scene, frames: &[Vec<u8>]) -> Option<u32> {
    on_a_reactor(async {
        let mut stream = tls(&scene.about).await;
        let sent = [PREFACE, &frame(SETTINGS, 0, 0, &[]), &frames.concat()].concat();
        AsyncWriteExt::write_all(&mut stream, &sent).await.unwrap();
        AsyncWriteExt::flush(&mut stream).await.unwrap();
        loop {
            let mut head = [0; 9];
            stream.read_exact(&mut head).await.unwrap();
            let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
            stream.read_exact(&mut payload).await.unwrap();
            match (head[3], head[8]) {
                (RST_STREAM, 1) => return Some(u32::from_be_bytes(payload.try_into().unwrap())),
                (HEADERS | DATA, 1) if head[4] & END_STREAM != 0 => return None,
                _ => {}
            }
        }
    })
}

#[test]
fn malformed_http2_messages_are_stream_errors() {
    let (url, seen) = declining();
    let scene = Scene::service().agent_to(url).start();
    let key = scene.about.service_key.as_str();
    let whole = [
        (":method", "POST"),
        (":scheme", "https"),
        (":authority", HOST),
        (":path", "/"),
        ("x-gw-service-key", key),
    ];
    let head = |flags: u8, fields: &[(&str, &str)]| {
        let block = http2_frames::block(fields);
        frame(HEADERS, END_HEADERS | flags, 1, &block)
    };
    let with = |field: (&'static str, &'static str)| [&whole[..], &[field]].concat();
    let without_authority = |scheme: &'static str| {
        vec![
            (":method", "GET"),
            (":scheme", scheme),
            (":path", "/"),
            ("host", HOST),
            ("x-gw-service-key", key),
        ]
    };
    let empty_scheme: Vec<_> = whole
        .iter()
        .map(|&(name, value)| (name, if name == ":scheme" { "" } else { value }))
        .collect();
    for (name, fields) in [
        ("leading space", with(("x", " a"))),
        ("trailing space", with(("x", "a "))),
        ("leading tab", with(("x", "\ta"))),
        ("only a space", with(("x", " "))),
        ("empty scheme", empty_scheme),
        ("empty scheme without authority", without_authority("")),
    ] {
        assert_eq!(
            reset_of(&scene, &[head(END_STREAM, &fields)]),
            Some(1),
            "{name}"
        );
    }
    for trailers in [[("x", "a ")], [("x", "\ta")]] {
        let frames = [
            head(0, &whole),
            frame(DATA, 0, 1, b"body"),
            head(END_STREAM, &trailers),
        ];
        assert_eq!(reset_of(&scene, &frames), Some(1), "{trailers:?}");
    }
    scene.wait_until_slots_are_free();
    assert_eq!(
        seen.try_iter().count(),
        0,
        "an incomplete request reached the backend"
    );
    let frames = [
        head(0, &whole),
        frame(DATA, 0, 1, b"body"),
        head(END_STREAM, &[("x", "a")]),
    ];
    assert_eq!(reset_of(&scene, &frames), None);
    assert_eq!(
        reset_of(&scene, &[head(END_STREAM, &without_authority("https"))]),
        None
    );
}

#[test]
fn framing_fields_in_trailers_are_dropped_in_both_directions() {
    let (sender, receiver) = mpsc::channel();
    let scene = Scene::service()
        .agent_to(backend::start(move |mut peer| {
            while let Ok((_, _, trailers)) = peer.request() {
                sender.send(trailers).unwrap();
                peer.send(
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 9\r\n\
                 Transfer-Encoding: chunked\r\nConnection: close\r\nUpgrade: h2c\r\n\
                 content_length: 9\r\nX-Sum: 1\r\n\r\n",
            );
            }
        }))
        .start();
    let only_sum = Fields::from_iter([("x-sum".parse().unwrap(), HeaderValue::from_static("1"))]);
    let mut caller = scene.connect();
    for _ in 0..2 {
        let body = "0\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\
                    content_length: 9\r\nUpgrade: h2c\r\nHost: h\r\nX-Sum: 1\r\n\r\n";
        caller.send(scene.request(
            "POST /",
            &format!("Transfer-Encoding: chunked\r\n\r\n{body}"),
        ));
        assert_eq!(caller.response().trailers, only_sum);
        assert_eq!(receiver.recv().unwrap(), only_sum);
    }
}
