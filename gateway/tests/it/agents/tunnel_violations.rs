//! Violations of the tunnel protocol by a modified agent. Each ends its own tunnel at once: waiting
//! callers get an error, bodies under way are cut, and other accounts are served.

use gw_shared::tunnel::cut_reason::CutReason;
use gw_shared::tunnel::frame::{DATA_MAX, Kind, RESPONSE_HEAD, StreamId};
use gw_shared::tunnel::window::{FIRST, MOST};
use http::Method;
use serde_json::Value;

use crate::administration::console::browser::Browser;
use crate::support::agents::modified_agent::{
    ACCOUNT, Enrolled, Tunnel, enroll, scene_with_tunnel,
};
use crate::support::agents::tunnel_frames::{
    begun, credit, data, frame, head_text, hello, interim, last_data, message, of_tunnel, ok,
    refused, reset, response, trailers,
};
use crate::support::eventually;
use crate::support::scene::Scene;

/// Streams of one tunnel: one without a response, one with the beginning of a response, and one
/// that is over.
#[derive(Clone, Copy)]
struct Streams {
    open: StreamId,
    begun: StreamId,
    over: StreamId,
}

const TUNNEL: StreamId = StreamId::TUNNEL;

/// A frame of any type, with any length in its header.
fn raw(kind: u8, length: usize, stream: StreamId, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(length).unwrap().to_be_bytes();
    [&[kind], &length[1..], &stream.0.to_be_bytes()[..], payload].concat()
}

const END: u8 = 0x80;
/// Slot that no request has used.
const UNUSED: StreamId = StreamId::new(200, 1);

type Violation = fn(Streams) -> Vec<u8>;

/// Violations, each with its name.
const VIOLATIONS: &[(&str, Violation)] = &[
    // Frame headers.
    ("frame type 0", |_| raw(0, 0, TUNNEL, b"")),
    ("unknown frame type", |_| raw(0x0e, 1, TUNNEL, b"x")),
    ("unknown frame type on a stream", |at| {
        raw(0x7f, 1, at.open, b"x")
    }),
    ("length of a RESPONSE", |at| {
        raw(Kind::Response as u8, RESPONSE_HEAD.head + 9, at.open, b"")
    }),
    ("length of DATA", |at| {
        raw(Kind::Data as u8, DATA_MAX + 1, at.begun, b"")
    }),
    ("largest length", |at| {
        raw(Kind::Data as u8, 0xff_ffff, at.begun, b"")
    }),
    ("empty DATA", |at| raw(Kind::Data as u8, 0, at.begun, b"")),
    ("short CREDIT", |at| {
        raw(Kind::Credit as u8, 3, at.open, &[0; 3])
    }),
    ("short RESPONSE", |at| {
        raw(Kind::Response as u8, 7, at.open, &[0; 7])
    }),
    ("long code of RESET", |at| {
        raw(Kind::Reset as u8, 65, at.open, &[b'x'; 65])
    }),
    ("long message of REFUSED", |at| {
        raw(Kind::Refused as u8 | END, 9 + 64 + 1025, at.open, &[0; 9])
    }),
    ("REFUSED without END", |at| {
        raw(Kind::Refused as u8, 9, at.open, &[0; 9])
    }),
    ("TRAILERS without END", |at| {
        raw(Kind::Trailers as u8, 2, at.begun, b"\r\n")
    }),
    ("RESET with END", |at| {
        raw(Kind::Reset as u8 | END, 0, at.open, b"")
    }),
    ("INTERIM with END", |at| {
        raw(Kind::Interim as u8 | END, 2, at.open, b"\r\n")
    }),
    ("PING on a stream", |at| {
        raw(Kind::Ping as u8, 8, at.open, &[0; 8])
    }),
    ("HELLO on a stream", |at| {
        raw(Kind::Hello as u8, 4, at.open, &[0, 0, 0, 9])
    }),
    ("DATA of the tunnel", |_| {
        raw(Kind::Data as u8, 1, TUNNEL, b"x")
    }),
    ("RESET of the tunnel", |_| {
        raw(Kind::Reset as u8, 0, TUNNEL, b"")
    }),
    ("stream without a generation", |at| {
        raw(
            Kind::Data as u8,
            1,
            StreamId::new(at.begun.slot() as u16, 0),
            b"x",
        )
    }),
    ("empty MESSAGE", |_| {
        raw(Kind::Message as u8, 0, TUNNEL, b"")
    }),
    ("MESSAGE that is too long", |_| {
        raw(Kind::Message as u8, 64 * 1024 + 1, TUNNEL, b"")
    }),
    // Frames of the gateway.
    ("REQUEST", |_| {
        frame(
            Kind::Request,
            true,
            UNUSED,
            b"\0\0\0\0GET / HTTP/1.1\r\nhost: h\r\n\r\n",
        )
    }),
    ("WINDOW", |_| of_tunnel(Kind::Window, &[0, 1, 0, 0])),
    // The tunnel.
    ("second HELLO", |_| hello(100)),
    ("HELLO with 0", |_| hello(0)),
    ("many messages at once", |_| {
        message(r#"{"type":"statistics","slots":1,"slots_in_use":0,"backend_connections":0}"#)
            .repeat(1000)
    }),
    // Streams that are not open.
    ("DATA on a stream that was never open", |_| {
        data(UNUSED, b"x")
    }),
    ("RESPONSE on a stream that was never open", |_| {
        ok(UNUSED, b"x")
    }),
    ("RESET on a stream that was never open", |_| {
        reset(UNUSED, b"")
    }),
    ("CREDIT on a stream that was never open", |_| {
        credit(UNUSED, 1000)
    }),
    ("DATA on a stream that is over", |at| data(at.over, b"x")),
    ("RESPONSE on a stream that is over", |at| ok(at.over, b"x")),
    ("INTERIM on a stream that is over", |at| {
        interim(at.over, "103", &[])
    }),
    ("REFUSED on a stream that is over", |at| {
        refused(at.over, b"GW_BACKEND_RESET", b"")
    }),
    ("TRAILERS on a stream that is over", |at| {
        trailers(at.over, &[])
    }),
    ("a later generation of an open slot", |at| {
        response(
            StreamId::new(at.open.slot() as u16, at.open.generation() + 1),
            false,
            head_text("200", &[]),
        )
    }),
    // The order of frames.
    ("DATA before the RESPONSE", |at| data(at.open, b"x")),
    ("last DATA before the RESPONSE", |at| {
        last_data(at.open, b"x")
    }),
    ("TRAILERS before the RESPONSE", |at| trailers(at.open, &[])),
    ("second RESPONSE", |at| begun(at.begun)),
    ("INTERIM after the RESPONSE", |at| {
        interim(at.begun, "103", &[])
    }),
    ("REFUSED after the RESPONSE", |at| {
        refused(at.begun, b"GW_BACKEND_RESET", b"")
    }),
    // Credit.
    ("CREDIT beyond the largest window", |at| {
        credit(at.open, MOST + 1)
    }),
    ("largest CREDIT", |at| credit(at.open, u32::MAX)),
    ("CREDIT that adds up beyond the largest window", |at| {
        credit(at.open, MOST / 2).repeat(2)
    }),
];

#[test]
fn a_violation_ends_its_own_tunnel_only() {
    // The rate of new tunnels of an agent is limited.
    const TUNNELS: usize = 8;
    for violations in VIOLATIONS.chunks(TUNNELS) {
        let scene = Scene::service().agent().start();
        let enrolled = enroll(&scene);
        for (what, violation) in violations {
            end_a_tunnel(&scene, &enrolled, what, violation);
        }
        let mut ended = scene.tunnels_ended();
        let as_messages = ended.remove("too_many_messages").unwrap_or(0);
        let as_violations = violations.len() as u64 - as_messages;
        assert_eq!(
            ended,
            [("protocol_violation".to_owned(), as_violations)].into()
        );
    }
}

fn end_a_tunnel(scene: &Scene, enrolled: &Enrolled, what: &str, violation: &Violation) {
    let mut tunnel = enrolled.tunnel(scene);
    let (mut served, over) = enrolled.send_get(scene, &mut tunnel);
    tunnel.0.send(ok(over, b"ok"));
    assert_eq!(served.response().body, b"ok", "{what}");
    let (mut waiting, open) = enrolled.send_get(scene, &mut tunnel);
    let (mut reading, answered) = enrolled.send_get(scene, &mut tunnel);
    let beginning = [begun(answered), data(answered, b"begun")].concat();
    tunnel.0.send(beginning);
    let head = reading.response_head(&Method::GET).unwrap();
    assert_eq!(head.status, 200, "{what}");

    // Fails if the gateway has ended the tunnel meanwhile.
    drop(tunnel.try_send(&violation(Streams {
        open,
        begun: answered,
        over,
    })));
    assert!(tunnel.is_cut(), "{what}");
    let response = waiting.response();
    assert_eq!(
        (response.status.as_u16(), &*response.code()),
        (502, "GW_RELAY_ERROR"),
        "{what}"
    );
    assert!(reading.body(head.framing).is_err(), "{what}");
    assert_eq!(scene.connect().ask(scene.get("/")).status, 200, "{what}");
}

#[test]
fn the_first_frame_need_not_be_hello_but_no_tunnel_is_ready_before_it() {
    let scene = Scene::service().agent().start();
    let enrolled = enroll(&scene);
    let mut tunnel = enrolled.upgraded(&scene);
    tunnel.until_handled();
    assert!(enrolled.report(&scene).is_none());
    tunnel.0.send(hello(0));
    assert!(tunnel.is_cut());
    let refused = enrolled.caller(&scene).ask(enrolled.get());
    assert_eq!(refused.code(), "AGENT_UNAVAILABLE");
}

#[test]
fn exactly_the_credit_may_be_sent() {
    let (scene, enrolled, mut tunnel) = scene_with_tunnel();
    let (mut caller, stream) = enrolled.send_get(&scene, &mut tunnel);
    tunnel.0.send(begun(stream));
    let head = caller.response_head(&Method::GET).unwrap();
    // The caller has not read, but its socket buffers take some of it: only then is more granted.
    let body = vec![b'x'; FIRST as usize];
    body.chunks(DATA_MAX)
        .for_each(|piece| tunnel.0.send(data(stream, piece)));
    tunnel.0.send(last_data(stream, b""));
    assert_eq!(caller.body(head.framing).unwrap().0, body);
}

#[test]
fn frames_in_single_bytes_are_handled() {
    let scene = Scene::service().agent().start();
    let enrolled = enroll(&scene);
    let mut tunnel = enrolled.upgraded(&scene);
    // Each byte is in a TLS record of its own.
    let in_bytes = |tunnel: &mut Tunnel, frames: Vec<u8>| {
        frames.into_iter().for_each(|byte| tunnel.0.send([byte]));
    };
    in_bytes(&mut tunnel, hello(1));
    eventually("the tunnel is registered", || enrolled.report(&scene));
    let (mut caller, stream) = enrolled.send_get(&scene, &mut tunnel);
    let frames = [
        interim(stream, "103", &[("link", "</a>")]),
        begun(stream),
        data(stream, b"one"),
        data(stream, b"two"),
        trailers(stream, &[("grpc-status", "0")]),
    ];
    in_bytes(&mut tunnel, frames.concat());
    let hint = caller.response_head(&Method::GET).unwrap();
    assert_eq!(hint.headers["link"], "</a>");
    let response = caller.response();
    assert_eq!(
        (response.body, &response.trailers["grpc-status"]),
        (b"onetwo".to_vec(), &"0".parse().unwrap())
    );
}

#[test]
fn a_tunnel_that_ends_within_a_frame_cuts_its_responses() {
    let (scene, enrolled, mut tunnel) = scene_with_tunnel();
    let (mut caller, stream) = enrolled.send_get(&scene, &mut tunnel);
    let (mut waiting, other) = enrolled.send_get(&scene, &mut tunnel);
    tunnel.0.send(begun(stream));
    let head = caller.response_head(&Method::GET).unwrap();
    // The last frame of one response, without its last byte.
    let last = last_data(stream, b"not all of it");
    tunnel
        .0
        .send([&ok(other, b"ok")[..], &last[..last.len() - 1]].concat());
    assert_eq!(waiting.response().body, b"ok");
    tunnel.close();
    assert!(caller.body(head.framing).is_err());
    assert_eq!(
        scene.tunnels_ended(),
        [("connection_lost".to_owned(), 1)].into()
    );
    let ended = last_end(&scene, &enrolled);
    assert_eq!(ended["service"], "mallory--evil");
    assert_eq!(ended["reason"], "connection_lost");
    assert_eq!(ended.get("advice"), None);
}

/// The only end of a tunnel that administrators are shown of the agent.
fn last_end(scene: &Scene, enrolled: &Enrolled) -> Value {
    let mut shown = scene.api().agent(ACCOUNT, &enrolled.agent);
    let ended = &mut shown["ended_tunnels"];
    assert_eq!(ended.as_array().map(Vec::len), Some(1), "{ended}");
    ended[0].take()
}

#[test]
fn agent_and_administrator_are_told_why_a_tunnel_ends() {
    let scene = Scene::service().agent().start();
    let enrolled = enroll(&scene);
    let invalid = message("no JSON");
    for (reason, frame) in [
        ("protocol_violation", hello(100)),
        ("invalid_message", invalid),
    ] {
        let mut tunnel = enrolled.tunnel(&scene);
        tunnel.0.send(frame);
        assert_eq!(tunnel.reason_for_the_end(), reason);
        assert_eq!(last_end(&scene, &enrolled)["reason"], reason);
    }
    let mut revoked = enrolled.tunnel(&scene);
    scene.api().revoke_agent(ACCOUNT, &enrolled.agent);
    assert_eq!(revoked.reason_for_the_end(), "agent_revoked");
    let ended = last_end(&scene, &enrolled);
    assert_eq!(ended["reason"], "agent_revoked");
    assert_eq!(ended["advice"].as_str(), CutReason::AgentRevoked.advice());
    let reasons = ["protocol_violation", "invalid_message", "agent_revoked"];
    assert_eq!(
        scene.tunnels_ended(),
        reasons.map(|reason| (reason.to_owned(), 1)).into()
    );
}

/// Whether the console shows ends of tunnels of agents of the service.
fn are_ends_shown(scene: &Scene) -> bool {
    let page = Browser::signed_in(scene).get("/accounts/mallory/services/evil");
    page.text.contains("Agents whose tunnel has ended")
}

#[test]
fn the_console_shows_why_a_tunnel_ended_until_the_agent_is_deleted() {
    let (scene, enrolled, mut tunnel) = scene_with_tunnel();
    let api = scene.api();
    api.revoke_agent(ACCOUNT, &enrolled.agent);
    assert_eq!(tunnel.reason_for_the_end(), "agent_revoked");
    eventually("the end is shown", || are_ends_shown(&scene).then_some(()));
    // The deletion of this agent ends its tunnel.
    let deleted = enroll(&scene);
    let mut tunnel = deleted.tunnel(&scene);
    for agent in [&enrolled, &deleted] {
        api.delete_agent(ACCOUNT, &agent.agent);
    }
    assert_eq!(tunnel.reason_for_the_end(), "agent_revoked");
    assert!(!are_ends_shown(&scene));
}
