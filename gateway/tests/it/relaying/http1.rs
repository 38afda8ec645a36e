//! Relayed requests and responses over HTTP/1.1.

use std::collections::BTreeMap;
use std::sync::mpsc;

use gw_shared::http::{Fields, Framing, RequestHead};
use http::{HeaderName, HeaderValue, Method};
use serde_json::json;

use super::OK;
use crate::support::SOON;
use crate::support::peers::backend;
use crate::support::peers::caller::HOST;
use crate::support::peers::http1_peer::fields;
use crate::support::peers::proxy_protocol::trusted;
use crate::support::scene::Scene;

#[test]
fn the_backend_gets_the_request_and_the_client_address() {
    let (seen, requests) = mpsc::channel();
    let backend = backend::start(move |mut peer| {
        let (head, body, _) = peer.request().unwrap();
        seen.send((head, body)).unwrap();
        peer.send("HTTP/1.1 201 Made\r\nContent-Length: 2\r\n\r\nok");
    });
    let scene = Scene::service().agent_to(backend).start();
    let response = scene.connect().ask(scene.request(
        "PATCH /a%2Fb//c?x=%00&y",
        "Authorization: Basic eDp5\r\nX-Forwarded-For: 10.1.1.1\r\nX-Gw-Request-Id: mine\r\n\
         Connection: X-Drop\r\nX-Drop: 1\r\nX_Forwarded_For: 10.2.2.2\r\n\
         X-Forwarded_Proto: http\r\nX_Forwarded-Host: forged\r\nX_Gw_Request_Id: forged\r\n\
         X-Gw-Timing: forged\r\nKeep-Alive: 5\r\nX-Two: a\r\nX-Two: b\r\nVia: 1.0 first\r\n\
         Content-Length: 5\r\n\r\nhello",
    ));
    assert_eq!(response.status, 201);
    assert_eq!(response.body, b"ok");

    let (head, body) = requests.recv_timeout(SOON).unwrap();
    let line = (head.method.as_str(), head.target.as_str());
    assert_eq!(line, ("PATCH", "/a%2Fb//c?x=%00&y"));
    assert_eq!(head.authority.as_str(), HOST);
    assert_eq!((head.framing, &*body), (Framing::Length(5), &b"hello"[..]));
    assert_fields(&head, response.header("x-gw-request-id"));
}

/// Asserts that a head has the fields of the caller in their order, those that the gateway adds,
/// and no others.
fn assert_fields(head: &RequestHead, request_id: &str) {
    let names: Vec<&str> = head.headers.names().map(HeaderName::as_str).collect();
    let sent_order = [
        "authorization",
        "x-forwarded-for",
        "x-gw-request-id",
        "x-two",
        "x-two",
        "via",
    ];
    assert_eq!(names[..sent_order.len()], sent_order);
    let two: Vec<_> = head.headers.get_all("x-two").collect();
    assert_eq!(two, ["a", "b"]);
    let expected = [
        ("authorization", "Basic eDp5"),
        ("content-length", "5"),
        ("via", "1.0 first, 1.1 gw"),
        ("x-forwarded-for", "10.1.1.1, 127.0.0.1"),
        ("x-forwarded-host", HOST),
        ("x-forwarded-proto", "https"),
        ("x-gw-request-id", request_id),
        ("x-two", "b"),
    ];
    let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
    assert_eq!(fields(&head.headers), BTreeMap::from(expected));
}

/// Fields by which a caller could choose the links that a backend makes, or the address that it
/// sees.
const FORWARDING: [&str; 13] = [
    "Forwarded: host=evil.example;proto=http",
    "X-Forwarded-Port: 81",
    "X-Forwarded-Scheme: http",
    "X-Forwarded-Ssl: off",
    "X-Forwarded-Server: evil.example",
    "X-Original-Host: evil.example",
    "X-Original-Proto: http",
    "X-Url-Scheme: http",
    "Front-End-Https: off",
    "X-Real-IP: 192.0.2.1",
    "X_Forwarded_Port: 82",
    "X-Forwarded-Prefix: /prefix",
    "X_Real-Ip: 192.0.2.2",
];

#[test]
fn forwarding_fields_of_callers_do_not_reach_the_backend() {
    const PREFIX: &str = "x-forwarded-prefix: /prefix";
    let proxy = trusted(&[("127.0.0.0/8", "off")]);
    for (configuration, expected) in [
        (String::new(), &[PREFIX][..]),
        (proxy, &[PREFIX, "x-real-ip: 192.0.2.1"][..]),
    ] {
        let (seen, heads) = mpsc::channel();
        let backend = backend::start(move |mut peer| {
            seen.send(peer.request().unwrap().0).unwrap();
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        });
        let scene = Scene::service()
            .agent_to(backend)
            .configuration(&configuration)
            .start();
        let sent = FORWARDING.join("\r\n");
        let request = scene.request("GET /", &format!("{sent}\r\n\r\n"));
        assert_eq!(scene.connect().ask(request).status, 200);
        let mut passed: Vec<String> = fields(&heads.recv_timeout(SOON).unwrap().headers)
            .into_iter()
            .map(|(name, value)| format!("{name}: {value}"))
            .collect();
        passed.retain(|field| {
            FORWARDING
                .iter()
                .any(|sent| sent.eq_ignore_ascii_case(field))
        });
        assert_eq!(passed, expected, "{configuration:?}");
    }
}

#[test]
fn bodies_of_every_framing_arrive_complete() {
    const CHUNKED: &str = "Transfer-Encoding: chunked\r\n";
    let backend = backend::start(|mut peer| {
        while let Ok((head, body, trailers)) = peer.request() {
            let trailer = trailers
                .get("x-checksum")
                .map_or("none", |value| value.to_str().unwrap());
            let text = format!("{:?} {} {trailer}", head.framing, body.len());
            let chunks: String = text.chars().map(|c| format!("1\r\n{c}\r\n")).collect();
            peer.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
            peer.send(chunks + "0\r\nX-After: yes\r\nContent-Length: 9\r\n\r\n");
        }
    });
    let scene = Scene::service().agent_to(backend).start();
    let after = ("x-after".parse().unwrap(), HeaderValue::from_static("yes"));
    let only_after = Fields::from_iter([after]);
    let mut caller = scene.connect();
    for (fields, body, expected) in [
        ("", "", "None 0 none"),
        ("Content-Length: 0\r\n", "", "Length(0) 0 none"),
        ("Content-Length: 3\r\n", "abc", "Length(3) 3 none"),
        (
            CHUNKED,
            "3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
            "Chunked 5 none",
        ),
        (CHUNKED, "0\r\n\r\n", "Chunked 0 none"),
        (
            CHUNKED,
            "3\r\nabc\r\n0\r\nX-Checksum: 7\r\n\r\n",
            "Chunked 3 7",
        ),
    ] {
        let rest = format!("{fields}\r\n{body}");
        // The end of the body arrives together with the head, or later.
        for _ in 0..20 {
            let response = caller.ask(scene.request("POST /", &rest));
            assert_eq!(response.framing, Framing::Chunked, "{rest:?}");
            assert_eq!(response.trailers, only_after, "{rest:?}");
            let seen = String::from_utf8(response.body).unwrap();
            assert_eq!(seen, expected, "{rest:?}");
        }
    }
}

#[test]
fn responses_without_a_body_or_a_length_are_relayed() {
    let backend = backend::start(|mut peer| {
        while let Ok((head, _, _)) = peer.request() {
            match head.target.as_str() {
                "/204" => peer.send("HTTP/1.1 204 No Content\r\n\r\n"),
                "/304" => peer.send("HTTP/1.1 304 Not Modified\r\nETag: \"x\"\r\n\r\n"),
                "/empty" => peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
                "/until-close" => return peer.send("HTTP/1.0 200 OK\r\n\r\nall of it"),
                _ => peer.send("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n"),
            }
        }
    });
    let scene = Scene::service().agent_to(backend).start();
    let mut caller = scene.connect();
    caller.send(scene.request("HEAD /", "\r\n"));
    let head = caller.response_to(&Method::HEAD);
    assert_eq!(head.status, 200);
    assert_eq!(head.header("content-length"), "4");
    for (target, status, body) in [
        ("/204", 204, ""),
        ("/304", 304, ""),
        ("/empty", 200, ""),
        ("/until-close", 200, "all of it"),
    ] {
        let response = caller.ask(scene.get(target));
        assert_eq!(response.status, status, "{target}");
        assert_eq!(response.body, body.as_bytes(), "{target}");
        assert_ne!(response.header("x-gw-request-id"), "", "{target}");
    }
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let scene = Scene::service().agent().start();
    let mut caller = scene.connect();
    let wave: String = (0..50)
        .map(|n| scene.request(&format!("POST /{n}"), "Content-Length: 2\r\n\r\nab"))
        .collect();
    caller.send(wave);
    for n in 0..50 {
        assert_eq!(caller.response().json()["target"], format!("/{n}"));
    }
}

#[test]
fn a_caller_that_sends_close_gets_no_further_response() {
    let (seen, targets) = mpsc::channel();
    let backend = backend::start(move |mut peer| {
        while let Ok((head, ..)) = peer.request() {
            seen.send(head.target.to_string()).unwrap();
            peer.send(OK);
        }
    });
    let scene = Scene::service().agent_to(backend).start();
    let mut caller = scene.connect();
    let last = scene.request("GET /last", "Connection: close\r\n\r\n");
    let response = caller.ask(last + &scene.get("/next"));
    assert_eq!(response.header("connection"), "close");
    assert_eq!(response.body, b"ok");
    assert!(caller.is_closed());
    scene.wait_until_slots_are_free();
    assert_eq!(targets.try_iter().collect::<Vec<_>>(), ["/last"]);
}

const EXPECTING: &str = "Expect: 100-continue\r\nContent-Length: 5\r\n\r\n";

#[test]
fn expect_100_continue_is_answered_before_the_body() {
    let scene = Scene::service().agent().start();
    let mut caller = scene.connect();
    caller.send(scene.request("POST /", EXPECTING));
    assert_eq!(caller.bytes(25).unwrap(), b"HTTP/1.1 100 Continue\r\n\r\n");
    assert_eq!(caller.ask("hello").json()["body"], "hello");
}

#[test]
fn a_refused_request_gets_no_100_continue() {
    let scene = Scene::service().agent().start();
    let mut caller = scene.connect();
    // One that is served goes before it on the connection.
    assert_eq!(caller.ask(scene.get("/")).status, 200);
    let response = caller.ask(format!("POST / HTTP/1.1\r\nHost: {HOST}\r\n{EXPECTING}"));
    assert_eq!(response.code(), "GW_AUTH_REQUIRED");
    assert_eq!(response.header("connection"), "close");
    assert!(caller.is_closed());
}

#[test]
fn the_absolute_form_is_accepted() {
    let scene = Scene::service().agent().start();
    let line = format!("GET https://{HOST}/abs?q");
    let other_host = scene.request(&line, "\r\n").replacen(
        &format!("Host: {HOST}"),
        "Host: elsewhere.example",
        1,
    );
    let seen = scene.connect().ask(other_host).json();
    assert_eq!(seen["target"], "/abs?q");
    let fields = seen["headers"].as_array().unwrap();
    assert!(fields.contains(&json!(["host", HOST])), "{fields:?}");
}

#[test]
fn http_1_0_is_accepted_without_persistence() {
    let scene = Scene::service().agent().start();
    let mut caller = scene.connect();
    let response = caller.ask(scene.get("/old").replacen("HTTP/1.1", "HTTP/1.0", 1));
    assert_eq!(response.json()["target"], "/old");
    assert_eq!(response.header("connection"), "close");
    assert!(caller.is_closed());
}

#[test]
fn the_first_byte_is_relayed_at_once_in_both_directions() {
    // Each side sends a byte after the other's has arrived: buffering anywhere would stall both.
    let backend = backend::start(|mut peer| {
        peer.request_head().unwrap();
        peer.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
        for _ in 0..20 {
            let received = peer.bytes(6).unwrap();
            peer.send(received);
        }
        peer.send("0\r\n\r\n");
    });
    let scene = Scene::service().agent_to(backend).start();
    let mut caller = scene.connect();
    caller.send(scene.request("POST /", "Transfer-Encoding: chunked\r\n\r\n"));
    let head = caller.response_head(&Method::POST).unwrap();
    assert_eq!(head.framing, Framing::Chunked);
    for n in 0..20 {
        let chunk = format!("1\r\n{}\r\n", n % 10);
        caller.send(&chunk);
        assert_eq!(caller.bytes(6).unwrap(), chunk.as_bytes());
    }
    caller.send("0\r\n\r\n");
    assert_eq!(caller.bytes(5).unwrap(), b"0\r\n\r\n");
}
