//! Duties of an intermediary (RFC 9110 §7.6, RFC 9112, RFC 9113).

use std::sync::mpsc;

use gw_shared::http::Fields;
use http::{HeaderName, HeaderValue, Method};
use serde_json::json;

use super::target_backend;
use crate::support::SOON;
use crate::support::peers::caller::HOST;
use crate::support::peers::http2_caller::on_a_reactor;
use crate::support::peers::{backend, http2_caller};
use crate::support::scene::Scene;

#[test]
fn max_forwards_is_decremented() {
    let scene = Scene::service().agent().start();
    let request = scene.request("OPTIONS /", "Max-Forwards: 3\r\n\r\n");
    let seen = scene.connect().ask(request).json();
    let fields = seen["headers"].as_array().unwrap();
    assert!(fields.contains(&json!(["max-forwards", "2"])), "{fields:?}");
}

#[test]
fn the_gateway_answers_requests_with_max_forwards_0() {
    let scene = Scene::service().agent().start();
    let mut caller = scene.connect();
    let fields = "Max-Forwards: 0\r\nCookie: secret\r\n\r\n";
    let trace = caller.ask(scene.request("TRACE /path", fields));
    assert_eq!(trace.status, 200);
    assert_eq!(trace.header("content-type"), "message/http");
    let text = String::from_utf8(trace.body).unwrap();
    assert!(text.starts_with("TRACE /path HTTP/1.1\r\n"), "{text}");
    for secret in ["secret", "gw_sk_"] {
        assert!(!text.contains(secret), "{text}");
    }
    let options = caller.ask(scene.request("OPTIONS *", "Max-Forwards: 0\r\n\r\n"));
    assert_eq!(options.status, 204);
}

#[test]
fn a_request_with_max_forwards_0_needs_credentials() {
    let scene = Scene::service().agent().start();
    let trace = format!("TRACE / HTTP/1.1\r\nHost: {HOST}\r\nMax-Forwards: 0\r\n\r\n");
    assert_eq!(scene.connect().ask(trace).code(), "GW_AUTH_REQUIRED");
}

#[test]
fn options_asterisk_reaches_the_backend_unchanged() {
    let scene = Scene::service().agent_to(target_backend()).start();
    let mut caller = scene.connect();
    for line in ["OPTIONS *", "OPTIONS https://demo--echo.eu1.gw.localhost"] {
        let response = caller.ask(scene.request(line, "\r\n"));
        assert_eq!(response.body, b"*", "{line}");
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
    let backend = backend::start(move |mut peer| {
        while let Ok((head, ..)) = peer.request() {
            // Several fields of a name would be joined by `|`.
            let value = |name| {
                let values = head.headers.get_all(name);
                Vec::from_iter(values.map(|value| value.to_str().unwrap())).join("|")
            };
            let values = ["te", "connection", "upgrade"].map(value);
            seen.send(values).unwrap();
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        }
    });
    let scene = Scene::service().agent_to(backend).start();
    for (version, fields, expected) in TE {
        let request = scene.request("GET /", &format!("{fields}\r\n"));
        let version = format!("HTTP/{version}");
        let response = scene
            .connect()
            .ask(request.replacen("HTTP/1.1", &version, 1));
        assert_eq!(response.status, 200, "{version} {fields:?}");
        let values = heads.recv_timeout(SOON).unwrap();
        assert_eq!(values, *expected, "{version} {fields:?}");
    }
    on_a_reactor(async {
        let caller = http2_caller::connect(&scene).await;
        let request = caller.request(&Method::GET, "/").header("te", "trailers");
        assert_eq!(caller.fetch(request).await.status, 200);
        assert_eq!(caller.get("/").await.status, 200);
    });
    let values: Vec<[String; 3]> = heads.try_iter().collect();
    assert_eq!(values, [["trailers", "TE", ""], ["", "", ""]]);
}

/// `TE` is a field of requests.
#[test]
fn te_is_not_relayed_in_responses() {
    let backend = backend::answering(
        "HTTP/1.1 200 OK\r\nTE: trailers\r\nConnection: TE\r\nContent-Length: 0\r\n\r\n",
    );
    let scene = Scene::service().agent_to(backend).start();
    for (version, fields, _) in TE {
        let request = scene.request("GET /", &format!("{fields}\r\n"));
        let version = format!("HTTP/{version}");
        let response = scene
            .connect()
            .ask(request.replacen("HTTP/1.1", &version, 1));
        assert!(!response.headers.contains("te"), "{response:?}");
        let connection = response.header("connection");
        assert!(!connection.contains("TE"), "{response:?}");
    }
    on_a_reactor(async {
        let caller = http2_caller::connect(&scene).await;
        let request = caller.request(&Method::GET, "/").header("te", "trailers");
        let response = caller.fetch(request).await;
        assert!(!response.headers.contains_key("te"), "{response:?}");
    });
}

#[test]
fn a_missing_date_is_added_and_an_existing_one_kept() {
    const DATE: &str = "Sun, 06 Nov 1994 08:49:37 GMT";
    let backend = backend::start(|mut peer| {
        while let Ok((head, _, _)) = peer.request() {
            let date = if head.target == "/dated" {
                format!("Date: {DATE}\r\n")
            } else {
                String::new()
            };
            let head = format!("HTTP/1.1 200 OK\r\n{date}Content-Length: 0\r\n\r\n");
            peer.send(head);
        }
    });
    let scene = Scene::service().agent_to(backend).start();
    let mut caller = scene.connect();
    assert_eq!(caller.ask(scene.get("/dated")).header("date"), DATE);
    let of_gateway = "GET / HTTP/1.1\r\n\r\n".to_owned();
    for request in [scene.get("/"), of_gateway] {
        let response = caller.ask(&request);
        let date = response.header("date");
        assert!(date.ends_with(" GMT") && date != DATE, "{request}: {date}");
    }
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
    let backend = backend::start(move |mut peer| {
        while let Ok((head, ..)) = peer.request() {
            seen.send(lines(&head.headers)).unwrap();
            let status = "HTTP/1.1 401 Unauthorized\r\n";
            peer.send(format!(
                "{status}{RESPONSE}Content-Length: 9\r\n\r\n not gzip"
            ));
        }
    });
    let scene = Scene::service().agent_to(backend).start();
    let mut caller = scene.connect();
    // The last empty element of `Allow` has its space, which belongs to the line.
    let expected = RESPONSE.replace(", \r\n", ",\r\n");
    for line in ["GET /", "OPTIONS /"] {
        let response = caller.ask(scene.request(line, &format!("{REQUEST}\r\n")));
        assert_eq!(heads.recv_timeout(SOON).unwrap(), REQUEST, "{line}");
        assert_eq!(response.status, 401, "{line}");
        assert_eq!(lines(&response.headers), expected, "{line}");
        assert_eq!(response.body, b" not gzip", "{line}");
    }
}

#[test]
fn ambiguous_framing_of_a_response_is_an_error() {
    const FIELDS: [&str; 9] = [
        "Content-Length: 2\r\nContent-Length: 2\r\n",
        "Content-Length: 2\r\nContent-Length: 3\r\n",
        "Content-Length: 2, 2\r\n",
        "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: -2\r\n",
        "Content-Length : 2\r\n",
        "X: a\r\n b\r\n",
    ];
    let backend = backend::start(|mut peer| {
        while let Ok((head, ..)) = peer.request() {
            let number: usize = head.target.as_str()[1..].parse().unwrap();
            let fields = FIELDS[number];
            peer.send(format!("HTTP/1.1 200 OK\r\n{fields}\r\nab"));
        }
    });
    let scene = Scene::service().agent_to(backend).start();
    for (number, fields) in FIELDS.iter().enumerate() {
        let response = scene.connect().ask(scene.get(&format!("/{number}")));
        assert_eq!(response.status, 502, "{fields}");
        assert_eq!(response.code(), "GW_BACKEND_INVALID_RESPONSE", "{fields}");
    }
}

#[test]
fn hop_by_hop_and_gateway_fields_of_responses_are_dropped() {
    const KEPT: [&str; 4] = ["content-length", "date", "x-gw-request-id", "x-kept"];
    let backend = backend::answering(
        "HTTP/1.1 200 OK\r\nConnection: keep-alive, X-Private\r\nKeep-Alive: timeout=5\r\n\
         X-Private: 1\r\nProxy-Connection: x\r\nX-Gw-Status: forged\r\nX-Kept: 1\r\n\
         Content-Length: 0\r\n\r\n",
    );
    let scene = Scene::service().agent_to(backend).start();
    let over_http1 = scene.connect().ask(scene.get("/"));
    let over_http2 = on_a_reactor(async { http2_caller::connect(&scene).await.get("/").await });
    for headers in [over_http1.headers, over_http2.headers.into()] {
        let mut names: Vec<&str> = headers.names().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, KEPT);
    }
}
