//! Duties of an intermediary (RFC 9110 §7.6, RFC 9112, RFC 9113).

use std::sync::mpsc;

use gw_shared::http::Fields;
use http::{HeaderName, HeaderValue, Method};

use crate::support::SOON;
use crate::support::peers::http2_caller::on_a_reactor;
use crate::support::peers::{backend, http2_caller};
use crate::support::scene::Scene;

#[test]
fn max_forwards_is_decremented_and_answered_at_zero() {
    let scene = Scene::service().agent().start();
    let mut caller = scene.connect();
    caller.send(scene.request("OPTIONS /", "Max-Forwards: 3\r\n\r\n"));
    let seen = caller.response().json();
    assert!(
        seen["headers"]
            .as_array()
            .unwrap()
            .contains(&serde_json::json!(["max-forwards", "2"]))
    );
    caller.send(scene.request("TRACE /path", "Max-Forwards: 0\r\nCookie: secret\r\n\r\n"));
    let trace = caller.response();
    assert_eq!(
        (trace.status.as_u16(), trace.header("content-type")),
        (200, "message/http")
    );
    let text = String::from_utf8(trace.body).unwrap();
    assert!(
        text.starts_with("TRACE /path HTTP/1.1\r\n")
            && !text.contains("secret")
            && !text.contains("gw_sk_")
    );
    caller.send(scene.request("OPTIONS *", "Max-Forwards: 0\r\n\r\n"));
    assert_eq!(caller.response().status, 204);
    // Without credentials the request is refused here as well.
    caller.send(format!(
        "TRACE / HTTP/1.1\r\nHost: {}\r\nMax-Forwards: 0\r\n\r\n",
        crate::support::peers::caller::HOST
    ));
    assert_eq!(caller.response().code(), "GW_AUTH_REQUIRED");
}

#[test]
fn options_asterisk_reaches_the_backend_unchanged() {
    let scene = Scene::service()
        .agent_to(backend::start(|mut peer| {
            while let Ok((head, _, _)) = peer.request() {
                let target = head.target.as_str();
                peer.send(format!(
                    "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{target}",
                    target.len()
                ));
            }
        }))
        .start();
    let mut caller = scene.connect();
    for line in ["OPTIONS *", "OPTIONS https://demo--echo.eu1.gw.localhost"] {
        caller.send(scene.request(line, "\r\n"));
        assert_eq!(caller.response().body, b"*", "{line}");
    }
}

/// The version and fields of a request, and the values of `TE`, `Connection` and `Upgrade` that
/// reach the backend.
const TE: &[(&str, &str, [&str; 3])] = &[
    ("1.1", "", ["", "", ""]),
    (
        "1.1",
        "TE: trailers\r\nConnection: TE\r\n",
        ["trailers", "TE", ""],
    ),
    ("1.1", "TE: trailers\r\n", ["trailers", "TE", ""]),
    (
        "1.1",
        "TE: gzip;q=0.5, trailers\r\nConnection: close, te\r\n",
        ["trailers", "TE", ""],
    ),
    ("1.1", "TE: gzip\r\nConnection: TE\r\n", ["", "", ""]),
    ("1.1", "Connection: TE\r\n", ["", "", ""]),
    (
        "1.1",
        "Upgrade: foo\r\nConnection: upgrade\r\n",
        ["", "upgrade", "foo"],
    ),
    (
        "1.1",
        "TE: trailers\r\nUpgrade: foo\r\nConnection: upgrade, TE\r\n",
        ["trailers", "upgrade, TE", "foo"],
    ),
    // Callers of HTTP/1.0 get no trailers.
    ("1.0", "TE: trailers\r\nConnection: TE\r\n", ["", "", ""]),
];

#[test]
fn te_reaches_an_http1_backend_with_its_connection_option() {
    let (seen, heads) = mpsc::channel();
    let scene = Scene::service()
        .agent_to(backend::start(move |mut peer| {
            while let Ok((head, ..)) = peer.request() {
                // Several fields of a name would be joined by `|`.
                let value = |name| {
                    Vec::from_iter(head.headers.get_all(name).map(|it| it.to_str().unwrap()))
                        .join("|")
                };
                seen.send(["te", "connection", "upgrade"].map(value))
                    .unwrap();
                // `TE` is a field of requests, and is not relayed in responses.
                peer.send(
                "HTTP/1.1 200 OK\r\nTE: trailers\r\nConnection: TE\r\nContent-Length: 0\r\n\r\n",
            );
            }
        }))
        .start();
    for (version, fields, expected) in TE {
        let mut caller = scene.connect();
        caller.send(scene.request("GET /", &format!("{fields}\r\n")).replacen(
            "HTTP/1.1",
            &format!("HTTP/{version}"),
            1,
        ));
        let response = caller.response();
        assert!(
            response.status == 200 && !response.headers.contains("te"),
            "{fields:?}: {response:?}"
        );
        assert!(
            !response.header("connection").contains("TE"),
            "{fields:?}: {response:?}"
        );
        assert_eq!(
            heads.recv_timeout(SOON).unwrap(),
            *expected,
            "{version} {fields:?}"
        );
    }
    on_a_reactor(async {
        let caller = http2_caller::connect(&scene).await;
        let response = caller
            .fetch(caller.request(&Method::GET, "/").header("te", "trailers"))
            .await;
        assert!(
            response.status == 200 && !response.headers.contains_key("te"),
            "{response:?}"
        );
        caller.get("/").await;
    });
    assert_eq!(
        heads.try_iter().collect::<Vec<_>>(),
        [["trailers", "TE", ""], ["", "", ""]]
    );
}

#[test]
fn a_missing_date_is_added_and_an_existing_one_kept() {
    let scene = Scene::service()
        .agent_to(backend::start(|mut peer| {
            while let Ok((head, _, _)) = peer.request() {
                let date = if head.target == "/dated" {
                    "Date: Sun, 06 Nov 1994 08:49:37 GMT\r\n"
                } else {
                    ""
                };
                peer.send(format!(
                    "HTTP/1.1 200 OK\r\n{date}Content-Length: 0\r\n\r\n"
                ));
            }
        }))
        .start();
    let mut caller = scene.connect();
    caller.send(scene.get("/dated"));
    assert_eq!(
        caller.response().header("date"),
        "Sun, 06 Nov 1994 08:49:37 GMT"
    );
    caller.send(scene.get("/"));
    assert!(caller.response().header("date").ends_with(" GMT"));
    caller.send("GET / HTTP/1.1\r\n\r\n");
    assert!(caller.response().header("date").ends_with(" GMT"));
}

#[test]
fn fields_for_the_other_end_pass_unchanged() {
    const REQUEST: &str = "x-unknown: 1\r\nauthorization: Digest username=\"a\", uri=\"/\"\r\n\
                           accept-encoding: br;q=0.5\r\nif-match: \"a\", W/\"b\"\r\n\
                           if-none-match: *\r\nif-modified-since: yesterday\r\n\
                           if-unmodified-since: Sunday, 06-Nov-94 08:49:37 GMT\r\n\
                           if-range: \"a\"\r\nrange: bytes=0-1, 4-\r\nx-unknown: 2\r\n";
    const RESPONSE: &str = "date: Sun, 06 Nov 1994 08:49:37 GMT\r\n\
                            www-authenticate: Basic realm=\"a, b\"\r\nx-unknown: 1\r\n\
                            www-authenticate: Digest realm=\"c\"\r\nallow: GET, X, \r\n\
                            vary: accept, cookie\r\ncache-control: no-transform\r\n\
                            content-encoding: gzip\r\nproxy-authenticate: Basic realm=\"d\"\r\n\
                            x-unknown: 2\r\n";
    let lines = |fields: &Fields| -> String {
        let known = REQUEST.to_owned() + RESPONSE;
        let line = |(name, value): (&HeaderName, &HeaderValue)| {
            format!("{name}: {}\r\n", value.to_str().unwrap())
        };
        fields
            .iter()
            .map(line)
            .filter(|line| known.contains(&line[..=line.find(':').unwrap()]))
            .collect()
    };
    let (seen, heads) = mpsc::channel();
    let scene = Scene::service()
        .agent_to(backend::start(move |mut peer| {
            while let Ok((head, ..)) = peer.request() {
                seen.send(lines(&head.headers)).unwrap();
                peer.send(format!(
                    "HTTP/1.1 401 Unauthorized\r\n{RESPONSE}Content-Length: 9\r\n\r\n not gzip"
                ));
            }
        }))
        .start();
    let mut caller = scene.connect();
    // The last empty element of `Allow` has its space, which belongs to the line.
    let expected = RESPONSE.replace(", \r\n", ",\r\n");
    for line in ["GET /", "OPTIONS /"] {
        caller.send(scene.request(line, &format!("{REQUEST}\r\n")));
        let response = caller.response();
        assert_eq!(heads.recv_timeout(SOON).unwrap(), REQUEST, "{line}");
        assert_eq!(
            (response.status.as_u16(), lines(&response.headers)),
            (401, expected.clone()),
            "{line}"
        );
        assert_eq!(response.body, b" not gzip");
    }
}

#[test]
fn ambiguous_framing_of_a_response_is_an_error() {
    for fields in [
        "Content-Length: 2\r\nContent-Length: 2\r\n",
        "Content-Length: 2\r\nContent-Length: 3\r\n",
        "Content-Length: 2, 2\r\n",
        "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: -2\r\n",
        "Content-Length : 2\r\n",
        "X: a\r\n b\r\n",
    ] {
        let scene = Scene::service()
            .agent_to(backend::start(move |mut peer| {
                while peer.request().is_ok() {
                    peer.send(format!("HTTP/1.1 200 OK\r\n{fields}\r\nab"));
                }
            }))
            .start();
        let mut caller = scene.connect();
        caller.send(scene.get("/"));
        let response = caller.response();
        assert_eq!(
            (response.status.as_u16(), response.code().as_str()),
            (502, "GW_BACKEND_INVALID_RESPONSE"),
            "{fields}"
        );
    }
}

#[test]
fn hop_by_hop_and_gateway_fields_of_responses_are_dropped() {
    let scene = Scene::service()
        .agent_to(backend::start(|mut peer| {
            while peer.request().is_ok() {
                peer.send(
                "HTTP/1.1 200 OK\r\nConnection: keep-alive, X-Private\r\nKeep-Alive: timeout=5\r\n\
                 X-Private: 1\r\nProxy-Connection: x\r\nX-Gw-Status: forged\r\nX-Kept: 1\r\n\
                 Content-Length: 0\r\n\r\n",
            );
            }
        }))
        .start();
    on_a_reactor(async {
        let caller = http2_caller::connect(&scene).await;
        let response = caller.fetch(caller.request(&Method::GET, "/")).await;
        let mut names: Vec<&str> = response.headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            ["content-length", "date", "x-gw-request-id", "x-kept"]
        );
    });
}
