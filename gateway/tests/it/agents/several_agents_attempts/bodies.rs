//! Request bodies that more than one agent may get.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gw_shared::tunnel::frame::Kind;
use http::Method;

use crate::support::agents::modified_agent::Tunnel;
use crate::support::agents::scripted::{Attempt, Scripted, answered, body, refused_unsent};
use crate::support::agents::tunnel_frames::{
    credit, data, head, interim, last_data, ping, uploaded,
};
use crate::support::eventually;
use crate::support::scene::Scene;

const LONG: usize = 3_000_000;

/// Refuses the first attempt, and accepts the others before it takes their body.
fn take_once_accepted(tunnel: &mut Tunnel, attempt: &Attempt) -> bool {
    assert!(
        attempt.head.contains("x-gw-await-acceptance: 1"),
        "{}",
        attempt.head
    );
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
        tunnel
            .0
            .send(refused_unsent(attempt.stream, "GW_BACKEND_UNREACHABLE"));
        return true;
    }
    tunnel
        .0
        .send(interim(attempt.stream, "100", &[("x-gw-accepted", "1")]));
    if attempt.head.contains("100-continue") {
        tunnel.0.send(interim(attempt.stream, "100", &[]));
    }
    // More than one window.
    let mut body = Vec::new();
    let mut is_whole = attempt.is_whole;
    while !is_whole {
        let next = tunnel.next().unwrap();
        if next.kind == Kind::Data && next.stream == attempt.stream {
            body.extend_from_slice(&next.payload);
            is_whole = next.end;
            if !next.payload.is_empty() && !is_whole {
                tunnel
                    .0
                    .send(credit(attempt.stream, next.payload.len() as u32));
            }
        }
    }
    let is_intact = body.len() == LONG
        && body
            .iter()
            .zip(0u32..)
            .all(|(byte, at)| u32::from(*byte) == at % 251);
    tunnel.0.send(answered(
        attempt,
        body.len(),
        is_intact.to_string().as_bytes(),
    ));
    true
}

#[test]
fn a_long_body_waits_for_the_acceptance_of_an_agent() {
    let scene = Scene::service().enrolled(&["one", "two"]).start();
    let tunnels = ["one", "two"].map(|name| scene.tunnel(name));
    let scripted = Scripted::new();
    for (number, tunnel) in tunnels.into_iter().enumerate() {
        scripted.serve(number, tunnel, take_once_accepted);
    }
    let long: Vec<u8> = (0..LONG as u32)
        .map(|number| (number % 251) as u8)
        .collect();
    // The caller sends the whole body at once.
    for _ in 0..3 {
        let mut caller = scene.connect();
        let mut writer = scene
            .request("POST /", &format!("Content-Length: {}\r\n\r\n", long.len()))
            .into_bytes();
        writer.extend_from_slice(&long);
        caller.send(writer);
        let response = caller.response();
        assert_eq!(
            (response.status.as_u16(), &response.body[..]),
            (200, &b"true"[..])
        );
        assert_eq!(scripted.attempts().len(), 2);
    }
    // The caller waits for the backend's 100.
    let mut caller = scene.connect();
    let fields = format!(
        "Expect: 100-continue\r\nContent-Length: {}\r\n\r\n",
        long.len()
    );
    caller.send(scene.request("POST /", &fields));
    assert_eq!(caller.response_head(&Method::POST).unwrap().status, 100);
    caller.send(&long);
    let response = caller.response();
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
    let scripted = Scripted::new();
    let go = Arc::new(AtomicBool::new(false));
    for (number, name) in ["one", "two"].into_iter().enumerate() {
        let go = Arc::clone(&go);
        scripted.serve(number, scene.tunnel(name), move |tunnel, attempt| {
            if attempt.nth == 0 {
                // Some of the body has arrived here.
                let first = tunnel.next_of(Kind::Data).unwrap();
                assert_eq!(first.payload, b"first ");
                tunnel
                    .0
                    .send(refused_unsent(attempt.stream, "GW_BACKEND_UNREACHABLE"));
                return true;
            }
            let first = tunnel.next_of(Kind::Data).unwrap();
            assert_eq!((&first.payload[..], first.end), (&b"first "[..], false));
            go.store(true, Ordering::SeqCst);
            let (rest, _) = body(tunnel, attempt);
            let body = [&first.payload[..], &rest].concat();
            tunnel.0.send(answered(attempt, body.len(), &body));
            true
        });
    }
    for _ in 0..5 {
        let mut caller = scene.connect();
        caller.send(scene.request("POST /", "Content-Length: 16\r\n\r\nfirst "));
        eventually("the second attempt has the first piece", || {
            go.swap(false, Ordering::SeqCst).then_some(())
        });
        caller.send("second ");
        caller.send("end");
        assert_eq!(caller.response().body, b"first second end");
        assert_eq!(scripted.attempts().len(), 2);
    }
}

#[test]
fn an_early_answer_settles_where_the_rest_of_the_body_goes() {
    let scene = Scene::service().enrolled(&["one", "two"]).start();
    let scripted = Scripted::new();
    for (number, name) in ["one", "two"].into_iter().enumerate() {
        scripted.serve(number, scene.tunnel(name), |tunnel, attempt| {
            let stream = attempt.stream;
            if attempt.nth == 0 {
                tunnel
                    .0
                    .send(refused_unsent(stream, "GW_BACKEND_UNREACHABLE"));
                return true;
            }
            let first = tunnel.next_of(Kind::Data).unwrap();
            tunnel.0.send(
                [
                    head(stream, "200", &[("content-length", "12")]),
                    data(stream, &first.payload),
                ]
                .concat(),
            );
            let (rest, _) = body(tunnel, attempt);
            assert_eq!(rest, b"second");
            tunnel.0.send(uploaded(stream, 12));
            tunnel.0.send(last_data(stream, &rest));
            true
        });
    }
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
