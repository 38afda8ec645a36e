//! Relayed requests and responses over HTTP/1.1.

use std::collections::BTreeMap;
use std::sync::mpsc;

use gw_shared::http::Framing;
use http::Method;

use crate::support::peers::backend;
use crate::support::peers::caller::HOST;
use crate::support::peers::http1_peer::fields;
use crate::support::peers::proxy_protocol::trusted;
use crate::support::scene::Scene;

#[test]
fn the_backend_gets_the_request_and_the_client_address() {
    let (seen, requests) = mpsc::channel();
    let scene = Scene::service()
        .agent_to(backend::start(move |mut peer| {
            let (head, body, _) = peer.request().unwrap();
            seen.send((head, body)).unwrap();
            peer.send(
                "HTTP/1.1 201 Made\r\nContent-Length: 2\r\nX-Own: 1\r\nX-Gw-Status: forged\r\n\
             Connection: x-hop\r\nX-Hop: 1\r\n\r\nok",
            );
        }))
        .start();
    let mut caller = scene.connect();
    caller.send(scene.request(
        "PATCH /a%2Fb//c?x=%00&y",
        "Authorization: Basic eDp5\r\nX-Forwarded-For: 10.1.1.1\r\nX-Gw-Request-Id: mine\r\n\
         Connection: X-Drop\r\nX-Drop: 1\r\nX_Forwarded_For: 10.2.2.2\r\n\
         X-Forwarded_Proto: http\r\nX_Forwarded-Host: forged\r\nX_Gw_Request_Id: forged\r\n\
         X-Gw-Timing: forged\r\nKeep-Alive: 5\r\nX-Two: a\r\nX-Two: b\r\nVia: 1.0 first\r\n\
         Content-Length: 5\r\n\r\nhello",
    ));
    let response = caller.response();
    assert_eq!(
        (response.status.as_u16(), response.body.as_slice()),
        (201, b"ok".as_slice())
    );
    assert_eq!(response.header("x-own"), "1");
    assert_eq!(
        (response.header("x-gw-status"), response.header("x-hop")),
        ("", "")
    );

    let (head, body) = requests.recv_timeout(crate::support::SOON).unwrap();
    assert_eq!(
        (head.method.as_str(), head.target.as_str()),
        ("PATCH", "/a%2Fb//c?x=%00&y")
    );
    assert_eq!(
        (head.authority.as_str(), body.as_slice()),
        (HOST, b"hello".as_slice())
    );
    assert_eq!(head.framing, Framing::Length(5));
    let two: Vec<_> = head.headers.get_all("x-two").collect();
    assert_eq!(two, ["a", "b"]);
    let names: Vec<&str> = head.headers.names().map(http::HeaderName::as_str).collect();
    let sent_order = [
        "authorization",
        "x-forwarded-for",
        "x-gw-request-id",
        "x-two",
        "x-two",
        "via",
    ];
    assert_eq!(names[..sent_order.len()], sent_order);
    let seen = fields(&head.headers);
    fields_are_added_and_left_out(&seen);
    let request_id = &seen["x-gw-request-id"];
    assert_eq!(request_id, response.header("x-gw-request-id"));
}

fn fields_are_added_and_left_out(seen: &BTreeMap<String, String>) {
    let expected = [
        ("authorization", "Basic eDp5"),
        ("x-forwarded-for", "10.1.1.1, 127.0.0.1"),
        ("x-forwarded-proto", "https"),
        ("x-forwarded-host", HOST),
        ("via", "1.0 first, 1.1 gw"),
    ];
    for (name, value) in expected {
        assert_eq!(seen.get(name).map(String::as_str), Some(value), "{name}");
    }
    let forged = [
        "x_forwarded_for",
        "x-forwarded_proto",
        "x_forwarded-host",
        "x_gw_request_id",
        "x-gw-timing",
    ];
    for gone in ["x-gw-service-key", "x-drop", "keep-alive", "connection"]
        .into_iter()
        .chain(forged)
    {
        assert!(!seen.contains_key(gone), "{gone}");
    }
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

/// Names and values of the fields of [`FORWARDING`] that reach the backend.
fn that_pass(configuration: String) -> Vec<String> {
    let (seen, heads) = mpsc::channel();
    let backend = backend::start(move |mut peer| {
        seen.send(peer.request().unwrap().0).unwrap();
        peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    });
    let scene = Scene::service()
        .agent_to(backend)
        .configuration(configuration)
        .start();
    let mut caller = scene.connect();
    caller.send(scene.request("GET /", &format!("{}\r\n\r\n", FORWARDING.join("\r\n"))));
    assert_eq!(caller.response().status, 200);
    let head = heads.recv_timeout(crate::support::SOON).unwrap();
    let passed = fields(&head.headers)
        .into_iter()
        .map(|(name, value)| format!("{name}: {value}"));
    let was_sent = |field: &String| {
        FORWARDING
            .iter()
            .any(|sent| sent.eq_ignore_ascii_case(field))
    };
    passed.filter(was_sent).collect()
}

#[test]
fn forwarding_fields_of_callers_do_not_reach_the_backend() {
    let untrusted = that_pass(String::new());
    assert_eq!(untrusted, ["x-forwarded-prefix: /prefix"]);
    let mut passed = that_pass(trusted(&[("127.0.0.0/8", "off")]));
    passed.sort();
    assert_eq!(
        passed,
        ["x-forwarded-prefix: /prefix", "x-real-ip: 192.0.2.1"]
    );
}

#[test]
fn bodies_of_every_framing_arrive_complete() {
    let scene = Scene::service()
        .agent_to(backend::start(|mut peer| {
            while let Ok((head, body, trailers)) = peer.request() {
                let trailer = trailers
                    .get("x-checksum")
                    .map_or("none", |value| value.to_str().unwrap());
                let text = format!("{:?} {} {trailer}", head.framing, body.len());
                let chunks: String = text.chars().map(|c| format!("1\r\n{c}\r\n")).collect();
                peer.send(format!(
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}0\r\nX-After: yes\r\n\
                 Content-Length: 9\r\n\r\n"
            ));
            }
        }))
        .start();
    let mut caller = scene.connect();
    let mut exchange = |rest: &str| {
        caller.send(scene.request("POST /", rest));
        let response = caller.response();
        assert_eq!(response.framing, Framing::Chunked);
        assert_eq!(
            (
                response.trailers.len(),
                response.trailers["x-after"].to_str().unwrap()
            ),
            (1, "yes")
        );
        String::from_utf8(response.body).unwrap()
    };
    assert_eq!(exchange("\r\n"), "None 0 none");
    assert_eq!(exchange("Content-Length: 0\r\n\r\n"), "Length(0) 0 none");
    assert_eq!(exchange("Content-Length: 3\r\n\r\nabc"), "Length(3) 3 none");
    assert_eq!(
        exchange("Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"),
        "Chunked 5 none"
    );
    // The end of the body arrives together with the head.
    for _ in 0..20 {
        assert_eq!(
            exchange("Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
            "Chunked 0 none"
        );
    }
    let with_trailer = "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX-Checksum: 7\r\n\r\n";
    assert_eq!(exchange(with_trailer), "Chunked 3 7");
}

#[test]
fn responses_without_a_body_or_a_length_are_relayed() {
    let scene = Scene::service()
        .agent_to(backend::start(|mut peer| {
            while let Ok((head, _, _)) = peer.request() {
                match head.target.as_str() {
                    "/204" => peer.send("HTTP/1.1 204 No Content\r\n\r\n"),
                    "/304" => peer.send("HTTP/1.1 304 Not Modified\r\nETag: \"x\"\r\n\r\n"),
                    "/empty" => peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
                    "/until-close" => return peer.send("HTTP/1.0 200 OK\r\n\r\nall of it"),
                    _ => peer.send("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n"),
                }
            }
        }))
        .start();
    let mut caller = scene.connect();
    caller.send(scene.request("HEAD /", "\r\n"));
    let head = caller.response_to(&Method::HEAD);
    assert_eq!(
        (head.status.as_u16(), head.header("content-length")),
        (200, "4")
    );
    for (target, status, body) in [
        ("/204", 204, ""),
        ("/304", 304, ""),
        ("/empty", 200, ""),
        ("/until-close", 200, "all of it"),
    ] {
        caller.send(scene.get(target));
        let response = caller.response();
        assert_eq!(
            (response.status.as_u16(), response.body.as_slice()),
            (status, body.as_bytes()),
            "{target}"
        );
        assert!(!response.header("x-gw-request-id").is_empty());
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
    let scene = Scene::service()
        .agent_to(backend::start(move |mut peer| {
            while let Ok((head, ..)) = peer.request() {
                seen.send(head.target.to_string()).unwrap();
                peer.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
            }
        }))
        .start();
    let mut caller = scene.connect();
    caller.send(scene.request("GET /last", "Connection: close\r\n\r\n") + &scene.get("/next"));
    let response = caller.response();
    assert_eq!(
        (response.header("connection"), response.body.as_slice()),
        ("close", &b"ok"[..])
    );
    assert!(caller.is_closed());
    scene.wait_until_slots_are_free();
    assert_eq!(targets.try_iter().collect::<Vec<_>>(), ["/last"]);
}

#[test]
fn expect_100_continue_is_answered_before_the_body() {
    let scene = Scene::service().agent().start();
    let mut caller = scene.connect();
    caller.send(scene.request(
        "POST /",
        "Expect: 100-continue\r\nContent-Length: 5\r\n\r\n",
    ));
    assert_eq!(caller.bytes(25).unwrap(), b"HTTP/1.1 100 Continue\r\n\r\n");
    caller.send("hello");
    assert_eq!(caller.response().json()["body"], "hello");
    // A refused request gets no 100 response.
    let refused = format!(
        "POST / HTTP/1.1\r\nHost: {HOST}\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
    );
    caller.send(refused);
    let response = caller.response();
    assert_eq!(
        (response.code().as_str(), response.header("connection")),
        ("GW_AUTH_REQUIRED", "close")
    );
    assert!(caller.is_closed());
}

#[test]
fn absolute_form_and_http_1_0_are_accepted() {
    let scene = Scene::service().agent().start();
    let mut caller = scene.connect();
    let key = &scene.about.service_key;
    caller.send(format!(
        "GET https://{HOST}/abs?q HTTP/1.1\r\nHost: elsewhere.example\r\n\
         X-Gw-Service-Key: {key}\r\n\r\n"
    ));
    let seen = caller.response().json();
    assert_eq!(seen["target"], "/abs?q");
    assert!(
        seen["headers"]
            .as_array()
            .unwrap()
            .contains(&serde_json::json!(["host", HOST]))
    );
    caller.send(format!(
        "GET /old HTTP/1.0\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n\r\n"
    ));
    let response = caller.response();
    assert_eq!(
        (
            response.json()["target"].as_str(),
            response.header("connection")
        ),
        (Some("/old"), "close")
    );
    assert!(caller.is_closed());
}

#[test]
fn the_first_byte_is_relayed_at_once_in_both_directions() {
    // Each side sends a byte after the other's has arrived: buffering anywhere would stall both.
    let scene = Scene::service()
        .agent_to(backend::start(|mut peer| {
            peer.request_head().unwrap();
            peer.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
            for _ in 0..20 {
                let received = peer.bytes(6).unwrap();
                peer.send(received);
            }
            peer.send("0\r\n\r\n");
        }))
        .start();
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
