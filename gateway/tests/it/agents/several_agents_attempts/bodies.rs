//! Request bodies that more than one agent may get.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gw_shared::tunnel::frame::Kind;
use http::Method;

use super::refuse;
use crate::support::agents::modified_agent::Tunnel;
use crate::support::agents::scripted::{Attempt, Scripted, answered, body};
use crate::support::agents::tunnel_frames::{data, head, interim, last_data, ping, uploaded};
use crate::support::eventually;
use crate::support::scene::Scene;

const LONG: usize = 3_000_000;

/// Refuses the first attempt, and accepts the others before it takes their body.
fn take_once_accepted(tunnel: &mut Tunnel, attempt: &Attempt) -> bool {
    let Attempt { head, stream, .. } = attempt;
    assert!(head.contains("x-gw-await-acceptance: 1"), "{head}");
    // Whatever the gateway sent before the PONG is read.
    tunnel.0.send(ping());
    loop {
        let next = tunnel.next().unwrap();
        assert_ne!(next.kind, Kind::Data, "the body was not asked for");
        if next.kind == Kind::Pong {
            break;
        }
    }
    if attempt.nth == 0 {
        return refuse(tunnel, attempt);
    }
    let accepted = interim(*stream, "100", &[("x-gw-accepted", "1")]);
    tunnel.0.send(accepted);
    if head.contains("100-continue") {
        tunnel.0.send(interim(*stream, "100", &[]));
    }
    // More than one window.
    let (body, _) = body(tunnel, attempt);
    let is_intact = body == long_body();
    tunnel.0.send(answered(
        attempt,
        body.len(),
        is_intact.to_string().as_bytes(),
    ));
    true
}

fn long_body() -> Vec<u8> {
    (0..LONG).map(|at| (at % 251) as u8).collect()
}

#[test]
fn a_long_body_waits_for_the_acceptance_of_an_agent() {
    let scene = Scene::service().enrolled(&["one", "two"]).start();
    let scripted = Scripted::of(&scene, &["one", "two"], take_once_accepted);
    let head = |fields: &str| {
        let fields = format!("{fields}Content-Length: {LONG}\r\n\r\n");
        scene.request("POST /", &fields)
    };
    // The caller sends the whole body at once.
    for _ in 0..3 {
        let request = [head("").into_bytes(), long_body()].concat();
        let response = scene.connect().ask(request);
        assert_eq!(
            (response.status.as_u16(), &response.body[..]),
            (200, &b"true"[..])
        );
        assert_eq!(scripted.attempts().len(), 2);
    }
    // The caller waits for the backend's 100.
    let mut caller = scene.connect();
    caller.send(head("Expect: 100-continue\r\n"));
    assert_eq!(caller.response_head(&Method::POST).unwrap().status, 100);
    let response = caller.ask(long_body());
    assert_eq!(
        (response.status.as_u16(), &response.body[..]),
        (200, &b"true"[..])
    );
    assert_eq!(scripted.attempts().len(), 2);
    scene.wait_until_idle();
}

#[test]
fn a_body_that_arrives_in_pieces_around_a_refusal_is_whole_at_the_other_agent() {
    let scene = Scene::service().enrolled(&["one", "two"]).start();
    let go = Arc::new(AtomicBool::new(false));
    let is_second = Arc::clone(&go);
    let scripted = Scripted::of(&scene, &["one", "two"], move |tunnel, attempt| {
        // Some of the body has arrived at both.
        let first = tunnel.next_of(Kind::Data).unwrap();
        assert_eq!((&first.payload[..], first.end), (&b"first "[..], false));
        if attempt.nth == 0 {
            return refuse(tunnel, attempt);
        }
        is_second.store(true, Ordering::SeqCst);
        let (rest, _) = body(tunnel, attempt);
        let body = [&first.payload[..], &rest].concat();
        tunnel.0.send(answered(attempt, body.len(), &body));
        true
    });
    for _ in 0..5 {
        let mut caller = scene.connect();
        caller.send(scene.request("POST /", "Content-Length: 16\r\n\r\nfirst "));
        eventually("the second attempt has the first piece", || {
            go.swap(false, Ordering::SeqCst).then_some(())
        });
        caller.send("second ");
        assert_eq!(caller.ask("end").body, b"first second end");
        assert_eq!(scripted.attempts().len(), 2);
    }
}

#[test]
fn an_early_answer_settles_where_the_rest_of_the_body_goes() {
    let scene = Scene::service().enrolled(&["one", "two"]).start();
    let scripted = Scripted::of(&scene, &["one", "two"], |tunnel, attempt| {
        let stream = attempt.stream;
        if attempt.nth == 0 {
            return refuse(tunnel, attempt);
        }
        let first = tunnel.next_of(Kind::Data).unwrap();
        let head = head(stream, "200", &[("content-length", "12")]);
        tunnel.0.send([head, data(stream, &first.payload)].concat());
        let (rest, _) = body(tunnel, attempt);
        assert_eq!(rest, b"second");
        tunnel
            .0
            .send([uploaded(stream, 12), last_data(stream, &rest)].concat());
        true
    });
    let mut caller = scene.connect();
    caller.send(scene.request("POST /", "Content-Length: 12\r\n\r\nfirst "));
    let response = caller.response_head(&Method::POST).unwrap();
    assert_eq!(
        (response.status.as_u16(), caller.bytes(6).unwrap()),
        (200, b"first ".to_vec())
    );
    caller.send("second");
    assert_eq!(caller.bytes(6).unwrap(), b"second");
    assert_eq!(scripted.attempts().len(), 2);
    scene.wait_until_idle();
}
