//! Attacks by a modified agent on its tunnels: floods, silence and frequent reconnects. Each ends
//! the agent's own tunnel and does not affect others.

use gw_shared::tunnel::endpoint::STREAMS_MAX;
use gw_shared::tunnel::frame::{Kind, StreamId};
use gw_shared::tunnel::handshake;
use gw_shared::tunnel::window::FIRST;
use http::Method;

use crate::support::agents::modified_agent::{
    ACCOUNT, Enrolled, HOST, Tunnel, enroll, is_ended, scene_with_tunnel,
};
use crate::support::agents::tunnel_frames::{
    begun, credit, data, hello, interim, message, of_tunnel, ok, reset,
};
use crate::support::eventually;
use crate::support::peers::caller::Caller;
use crate::support::scene::Scene;
use crate::support::stopwatch::within_a_second;

/// Valid statistics of an agent.
const STATISTICS: &str =
    r#"{"type":"statistics","slots":1,"slots_in_use":0,"backend_connections":0}"#;

/// Asserts that the service of another account is served.
fn is_served(scene: &Scene) {
    assert_eq!(scene.connect().ask(scene.get("/")).status, 200);
}

#[test]
fn floods_of_frames_end_the_tunnel() {
    // Exceeds the budget of frames without content.
    const FRAMES: usize = 20_000;
    let scene = Scene::service().agent().start();
    let enrolled = enroll(&scene);
    type Flood = fn(StreamId, StreamId) -> Vec<u8>;
    let floods: [(&str, Flood); 6] = [
        ("PING", |_, _| of_tunnel(Kind::Ping, &[0; 8])),
        ("answers to PING", |_, _| of_tunnel(Kind::Pong, &[0; 8])),
        ("small CREDIT", |open, _| credit(open, 1)),
        ("empty CREDIT", |open, _| credit(open, 0)),
        ("CREDIT of a stream that is over", |_, closed| {
            credit(closed, 1)
        }),
        ("RESET of a stream that is over", |_, closed| {
            reset(closed, b"")
        }),
    ];
    for (what, flood) in floods {
        let mut tunnel = enrolled.tunnel(&scene);
        let (gone, closed) = enrolled.send_get(&scene, &mut tunnel);
        drop(gone);
        tunnel.answer_reset(closed);
        let (mut waiting, open) = enrolled.send_get(&scene, &mut tunnel);
        // Reads the gateway's answers as an unmodified agent does.
        let reading = tunnel.read_on();
        tunnel.sent_until_cut(&flood(open, closed), FRAMES);
        assert!(reading.join().unwrap(), "{what}");
        assert_eq!(waiting.response().code(), "GW_RELAY_ERROR", "{what}");
        is_served(&scene);
    }
    let metrics = scene.metrics();
    let ended = metrics.count_with("gw_connections_ended_early_total", "\"tunnel_frames\"");
    assert_eq!(ended, floods.len() as u64);
}

#[test]
fn frames_of_ordinary_requests_do_not_count_as_a_flood() {
    let (scene, enrolled, mut tunnel) = scene_with_tunnel();
    let mut caller = enrolled.caller(&scene);
    // In total more frames than the budget of frames without content.
    for number in 0..1500 {
        caller.send(enrolled.get());
        let stream = tunnel.request();
        let hints = interim(stream, "103", &[]).repeat(3);
        tunnel.0.send([hints, ok(stream, b"")].concat());
        for _ in 0..3 {
            let hint = caller.response_head(&Method::GET).unwrap();
            assert_eq!(hint.status, 103, "{number}");
        }
        assert_eq!(caller.response().status, 200);
    }
    assert_eq!(enrolled.report(&scene).unwrap().in_flight, 0);
}

#[test]
fn control_messages_are_limited_in_rate_and_length() {
    let scene = Scene::service().agent().start();
    let enrolled = enroll(&scene);
    let renewal = |length| format!(r#"{{"type":"renew","csr":"{}"}}"#, "x".repeat(length));
    for (what, bytes) in [
        ("too many", message(STATISTICS)),
        ("too long", message(renewal(20_000))),
        ("longest frame", message(renewal(65_000))),
        ("two in one frame", message(STATISTICS.repeat(2))),
        ("not JSON", message([0xff, 0, b'{'])),
        ("invalid", message(r#"{"type":"statistics","slots":-1}"#)),
        (
            "no release key",
            message(r#"{"type":"update","state":"ready","release_keys":["<b>"]}"#),
        ),
        ("a message of the gateway", message(r#"{"type":"drained"}"#)),
    ] {
        let mut tunnel = enrolled.tunnel(&scene);
        let sent = tunnel.sent_until_cut(&bytes, 2000);
        assert!(tunnel.is_cut(), "{what}: {sent}");
        is_served(&scene);
    }
}

/// As many as an unmodified agent sends in its busiest second.
#[test]
fn control_messages_of_an_ordinary_agent_are_within_the_limit() {
    let (scene, enrolled, mut tunnel) = scene_with_tunnel();
    tunnel.0.send(message(STATISTICS).repeat(30));
    eventually("the statistics arrive", || {
        (enrolled.report(&scene)?.slots == Some(1)).then_some(())
    });
}

#[test]
fn reported_statistics_are_clamped() {
    let (scene, enrolled, mut tunnel) = scene_with_tunnel();
    tunnel.0.send(message(concat!(
        r#"{"type":"statistics","slots":4294967295,"slots_in_use":4294967295,"#,
        r#""backend_connections":1}"#
    )));
    let report = eventually("the statistics arrive", || {
        enrolled
            .report(&scene)
            .filter(|report| report.slots.is_some())
    });
    let most = u32::try_from(STREAMS_MAX).unwrap();
    assert_eq!(
        (report.slots, report.slots_in_use),
        (Some(most), Some(most))
    );
}

#[test]
fn the_number_of_streams_that_an_agent_claims_grants_no_more_credit() {
    let scene = Scene::service().agent().start();
    let enrolled = enroll(&scene);
    let mut tunnel = enrolled.tunnel_with(&scene, u32::MAX);
    let mut caller = enrolled.caller(&scene);
    for _ in 0..3 {
        caller.send(enrolled.get());
        let request = tunnel.next_of(Kind::Request).unwrap();
        assert_eq!(request.payload[..4], FIRST.to_be_bytes());
        tunnel.0.send(ok(request.stream, b"ok"));
        assert_eq!(caller.response().body, b"ok");
    }
}

#[test]
fn streams_beyond_the_number_in_hello_are_refused() {
    let scene = Scene::service().agent().start();
    let enrolled = enroll(&scene);
    let mut tunnel = enrolled.tunnel_with(&scene, 1);
    let (mut first, stream) = enrolled.send_get(&scene, &mut tunnel);
    let mut second = enrolled.caller(&scene);
    let refused = second.ask(enrolled.get());
    assert_eq!(refused.code(), "GW_AGENT_CONCURRENCY_LIMIT");
    tunnel.0.send(ok(stream, b"ok"));
    assert_eq!(first.response().body, b"ok");
    second.send(enrolled.get());
    let stream = tunnel.request();
    tunnel.0.send(ok(stream, b"ok"));
    assert_eq!(second.response().body, b"ok");
}

#[test]
fn a_reset_that_is_never_answered_occupies_its_stream_only() {
    let scene = Scene::service().agent().start();
    let enrolled = enroll(&scene);
    let mut tunnel = enrolled.tunnel_with(&scene, 2);
    let (gone, silent) = enrolled.send_get(&scene, &mut tunnel);
    drop(gone);
    assert_eq!(tunnel.next_of(Kind::Reset).unwrap().stream, silent);
    let mut caller = enrolled.caller(&scene);
    for _ in 0..3 {
        caller.send(enrolled.get());
        let stream = tunnel.request();
        assert_ne!(stream.slot(), silent.slot());
        // With the stream of this request, both streams of the tunnel are in use.
        let refused = enrolled.caller(&scene).ask(enrolled.get());
        assert_eq!(refused.code(), "GW_AGENT_CONCURRENCY_LIMIT");
        tunnel.0.send(ok(stream, b"ok"));
        assert_eq!(caller.response().body, b"ok");
    }
    is_served(&scene);
    // Once the agent answers, the slot is used for another stream.
    tunnel.0.send(reset(silent, b""));
    tunnel.until_handled();
    let (_first, one) = enrolled.send_get(&scene, &mut tunnel);
    let (_second, two) = enrolled.send_get(&scene, &mut tunnel);
    assert_ne!(one.slot(), two.slot());
    assert!(one != silent && two != silent);
}

/// A tunnel whose agent has not read until a request was refused, and the callers of the requests
/// before.
fn unread_tunnel(scene: &Scene, enrolled: &Enrolled) -> (Tunnel, Vec<Caller>) {
    const HEAD: usize = 24 * 1024;
    const MOST: usize = 1000;
    let tunnel = enrolled.tunnel_with(scene, u32::try_from(STREAMS_MAX).unwrap());
    let large = enrolled.request("GET /", &format!("X-Large: {}\r\n\r\n", "x".repeat(HEAD)));
    let refusals = || scene.metrics().count("gw_refusals_total");
    let refusals_before = refusals();
    let mut waiting = Vec::new();
    // The gateway queues request heads up to a limit, and the socket buffers hold some more.
    let mut refused = loop {
        let mut caller = enrolled.caller(scene);
        caller.send(&large);
        let is_refused = eventually("the request is opened or refused", || {
            if refusals() > refusals_before {
                return Some(true);
            }
            (enrolled.report(scene)?.in_flight > waiting.len()).then_some(false)
        });
        if is_refused {
            break caller;
        }
        waiting.push(caller);
        assert!(waiting.len() < MOST, "no limit");
    };
    assert_eq!(refused.response().code(), "GW_OVERLOADED");
    is_served(scene);
    (tunnel, waiting)
}

#[test]
fn an_agent_that_does_not_read_gets_a_bounded_number_of_requests() {
    let scene = Scene::service().agent().start();
    let enrolled = enroll(&scene);
    let (mut tunnel, waiting) = unread_tunnel(&scene, &enrolled);
    // Once the agent reads, all requests that were opened arrive, and further ones too.
    for _ in 0..waiting.len() {
        let stream = tunnel.request();
        tunnel.0.send(ok(stream, b"ok"));
    }
    for mut caller in waiting {
        assert_eq!(caller.response().body, b"ok");
    }
    let (mut caller, stream) = enrolled.send_get(&scene, &mut tunnel);
    tunnel.0.send(ok(stream, b"ok"));
    assert_eq!(caller.response().body, b"ok");
}

#[test]
fn a_tunnel_that_the_agent_does_not_read_is_cut_at_once() {
    let scene = Scene::service().agent().start();
    let enrolled = enroll(&scene);
    let (_tunnel, waiting) = unread_tunnel(&scene, &enrolled);
    scene.api().revoke_agent(ACCOUNT, &enrolled.agent);
    within_a_second("the end of the requests", || {
        for mut caller in waiting {
            assert_eq!(caller.response().code(), "GW_RELAY_ERROR");
        }
    });
    assert_eq!(
        scene.tunnels_ended(),
        [("agent_revoked".to_owned(), 1)].into()
    );
}

#[test]
fn a_tunnel_that_drains_gets_no_more_requests() {
    let (scene, enrolled, mut tunnel) = scene_with_tunnel();
    let (mut begun, stream) = enrolled.send_get(&scene, &mut tunnel);
    tunnel.0.send(message(r#"{"type":"drain"}"#));
    while tunnel.next_of(Kind::Message).unwrap().payload != br#"{"type":"drained"}"# {}
    let mut caller = enrolled.caller(&scene);
    assert_eq!(caller.ask(enrolled.get()).code(), "AGENT_UNAVAILABLE");
    // A request that was opened before is still served.
    tunnel.0.send(ok(stream, b"ok"));
    assert_eq!(begun.response().body, b"ok");
}

#[test]
fn data_beyond_the_credit_ends_the_tunnel() {
    let (scene, enrolled, mut tunnel) = scene_with_tunnel();
    let (mut caller, stream) = enrolled.send_get(&scene, &mut tunnel);
    tunnel.0.send(begun(stream));
    assert_eq!(caller.response_head(&Method::GET).unwrap().status, 200);
    // The caller stops reading. Its socket buffers hold at most a few megabytes.
    let piece = data(stream, &[0; 16 * 1024 - 8]);
    let reading = tunnel.read_on();
    tunnel.sent_until_cut(&piece, 10_000);
    assert!(reading.join().unwrap());
    is_served(&scene);
    // Data within the credit is relayed, and the body is never complete.
    caller.body(gw_shared::http::Framing::Chunked).unwrap_err();
}

#[test]
fn a_revocation_closes_connections_before_the_tunnel_handshake() {
    let scene = Scene::service().agent().start();
    let enrolled = enroll(&scene);
    let mut connected = enrolled.connection(&scene);
    let mut asking = enrolled.connection(&scene);
    asking.send("GET /tunnel HTTP/1.1\r\nHost: ");
    let mut upgraded = enrolled.upgraded(&scene);
    let mut begun = enrolled.upgraded(&scene);
    begun.0.send(&hello(1)[..5]);
    scene.api().revoke_agent(ACCOUNT, &enrolled.agent);
    within_a_second("the end of connections before the tunnel handshake", || {
        assert!(is_ended(&mut connected) && is_ended(&mut asking));
        assert!(upgraded.is_cut() && begun.is_cut());
    });
}

#[test]
fn the_rate_of_new_tunnels_of_an_agent_is_limited() {
    let scene = Scene::service().agent().start();
    let enrolled = enroll(&scene);
    let open = || {
        let mut agent = enrolled.connection(&scene);
        agent.send(handshake::request(HOST, None));
        agent.response_head(&Method::GET).unwrap()
    };
    let mut opened = 0;
    let refused = loop {
        let response = open();
        if response.status != 101 {
            break response;
        }
        opened += 1;
        assert!(opened < 100, "no limit");
    };
    // The burst, plus tokens refilled in the meantime.
    assert!((10..20).contains(&opened), "{opened}");
    assert_eq!(refused.status, 429);
    assert_eq!(refused.headers["retry-after"], "1");
    // Another agent of the region is not delayed.
    is_served(&scene);
    eventually("another connection is accepted", || {
        (open().status == 101).then_some(())
    });
}

#[test]
fn the_number_of_unfinished_tunnel_handshakes_is_limited() {
    let scene = Scene::service().agent().start();
    let enrolled = enroll(&scene);
    // Among authenticated connections that send no request, the oldest are closed.
    let mut silent: Vec<_> = (0..40).map(|_| enrolled.connection(&scene)).collect();
    assert!(is_ended(&mut silent[0]));
    // The same applies to connections that requested a tunnel.
    let mut first = enrolled.upgraded(&scene);
    let others: Vec<Tunnel> = (0..4).map(|_| enrolled.upgraded(&scene)).collect();
    assert!(first.is_cut());
    drop(others);
    // A valid tunnel is still accepted.
    let mut tunnel = enrolled.tunnel(&scene);
    let (mut caller, stream) = enrolled.send_get(&scene, &mut tunnel);
    tunnel.0.send(ok(stream, b"ok"));
    assert_eq!(caller.response().body, b"ok");
}
