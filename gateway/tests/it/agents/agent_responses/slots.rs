//! When the slot of a request becomes free.

use std::io::Write;
use std::net::Shutdown;

use gw_shared::tunnel::frame::{Kind, StreamId};
use http::Method;

use super::Answering;
use crate::support::agents::modified_agent::{enroll, scene_with_tunnel};
use crate::support::agents::tunnel_frames::{
    begun, credit, data, head, last_data, ok, reset, uploaded,
};
use crate::support::scene::Scene;

#[test]
fn early_answers_and_resets_release_their_slot() {
    let mut agent = Answering::start();
    let get = agent.enrolled.get();
    let post = "Content-Length: 1000000\r\n\r\nbegun";
    let post = agent.enrolled.request("POST /", post);
    let mut answer = |request: &str, method: Method, frames: fn(StreamId) -> Vec<u8>| {
        let response = agent.ask(&method, request, frames);
        agent.scene.wait_until_idle();
        response
    };
    // Answers before the request is complete.
    let early = answer(&post, Method::POST, |id| ok(id, b"ok"));
    assert_eq!(early.unwrap().body, b"ok");
    // Answers before the request is complete, and takes no more of it.
    let early_and_stops = answer(&post, Method::POST, |id| {
        [ok(id, b"ok"), reset(id, b"")].concat()
    });
    assert_eq!(early_and_stops.unwrap().body, b"ok");
    // Resets before and after the head.
    let reset_first = answer(&post, Method::POST, |id| reset(id, b"")).unwrap();
    assert_eq!(
        (reset_first.status.as_u16(), &*reset_first.code()),
        (502, "GW_RELAY_ERROR")
    );
    let cut = answer(&get, Method::GET, |id| {
        [
            begun(id),
            data(id, b"begun"),
            reset(id, b"GW_BACKEND_RESET"),
        ]
        .concat()
    });
    cut.unwrap_err();
    // Ends the stream, grants credit and resets it.
    let ended = answer(&get, Method::GET, |id| {
        [ok(id, b"ok"), credit(id, 9), reset(id, b"")].concat()
    });
    assert_eq!(ended.unwrap().body, b"ok");
    agent.assert_tunnel_is_open();
}

#[test]
fn a_request_whose_caller_leaves_releases_its_slot() {
    let (scene, enrolled, mut tunnel) = scene_with_tunnel();
    let (caller, stream) = enrolled.send_get(&scene, &mut tunnel);
    drop(caller);
    tunnel.answer_reset(stream);
    scene.wait_until_idle();
    assert!(enrolled.report(&scene).is_some());
}

#[test]
fn an_upgraded_request_is_in_flight_until_both_halves_end() {
    for hand_over in ["always", "never"] {
        let scene = Scene::service().agent().hand_over(hand_over).start();
        let enrolled = enroll(&scene);
        let mut tunnel = enrolled.tunnel(&scene);
        // Some of these requests arrive on a worker that does not own the tunnel.
        for _ in 0..8 {
            let mut caller = enrolled.caller(&scene);
            caller.send(enrolled.request("GET /", "Connection: upgrade\r\nUpgrade: other\r\n\r\n"));
            let stream = tunnel.request();
            // The agent ends its half at once.
            let switching = [("connection", "upgrade"), ("upgrade", "other")];
            let switched = head(stream, "101", &switching);
            tunnel.0.send([switched, last_data(stream, b"")].concat());
            assert_eq!(caller.response_head(&Method::GET).unwrap().status, 101);
            assert!(caller.is_closed());
            // The caller's half stays open.
            caller.send("more");
            let data = tunnel.next_of(Kind::Data).unwrap();
            assert_eq!((data.stream, &*data.payload), (stream, &b"more"[..]));
            let tunnels = scene.tunnels();
            let in_flight: usize = tunnels.iter().map(|tunnel| tunnel.in_flight).sum();
            assert_eq!(in_flight, 1);
            caller.stream.conn.send_close_notify();
            caller.stream.flush().unwrap();
            caller.stream.sock.shutdown(Shutdown::Write).unwrap();
            assert!(tunnel.next_of(Kind::Data).unwrap().end);
            tunnel.0.send(uploaded(stream, 4));
            scene.wait_until_idle();
        }
    }
}
