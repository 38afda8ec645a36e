//! Attacks by a modified agent on its tunnels: floods, silence and frequent reconnects. Each ends the agent's own
//! tunnel and does not affect others.

use std::time::{Duration, Instant};

use gw_gateway::control::Actor;
use gw_gateway::demo::Demo;
use gw_shared::tunnel::{handshake, settings};
use http::Method;

use crate::support::caller::{self, connect};
use crate::support::http2_frames::{
    self, DATA, END_HEADERS, GOAWAY, HEADERS, PING, PRIORITY, RST_STREAM, SETTINGS, UNKNOWN, WINDOW_UPDATE, frame,
};
use crate::support::modified_agent::{self, CONTROL, Enrolled, HOST, Tunnel, enroll, head, is_ended, last_data};
use crate::support::{demo, eventually, reports, tunnels, within_a_second};

fn is_served(demo: &Demo) {
    let mut bystander = connect(demo);
    bystander.send(caller::get(demo, "/"));
    assert_eq!(bystander.response().status, 200);
}

/// The gateway's report of the agent's tunnel, if there is one.
fn report(demo: &Demo, enrolled: &Enrolled) -> Option<gw_gateway::telemetry::counters::TunnelReport> {
    tunnels(demo).into_iter().find(|tunnel| tunnel.agent_id == enrolled.agent.as_str())
}

#[test]
fn floods_of_frames_end_the_tunnel() {
    // Exceeds the budget of empty frames plus the allowance before requests.
    const FRAMES: usize = 20_000;
    let demo = demo(None);
    let enrolled = enroll(&demo);
    let floods: [(&str, Vec<u8>); 8] = [
        ("PING", frame(PING, 0, 0, &[0; 8])),
        ("answers to PING", frame(PING, 1, 0, &[0; 8])),
        ("SETTINGS", frame(SETTINGS, 0, 0, &[0, 4, 0, 1, 0, 0])),
        ("window updates", frame(WINDOW_UPDATE, 0, 0, &[0, 0, 0, 1])),
        ("resets of a stream that is over", frame(RST_STREAM, 0, 3, &[0, 0, 0, 8])),
        ("heads on a stream that is over", head(3, &[(":status", "200")])),
        ("PRIORITY", frame(PRIORITY, 0, 3, &[0, 0, 0, 0, 1])),
        ("unknown frames", frame(UNKNOWN, 0, 3, b"x")),
    ];
    for (what, flood) in floods {
        let mut tunnel = enrolled.tunnel(&demo);
        // Opens and ends stream 3.
        let mut caller = enrolled.caller(&demo);
        caller.send(enrolled.get());
        assert_eq!(tunnel.request(), 3);
        drop(caller);
        assert_eq!(tunnel.next_of(RST_STREAM).unwrap().stream, 3);
        // Reads the gateway's answers, because the gateway stops reading while they are not read.
        let reading = tunnel.read_on();
        tunnel.sent_until_cut(&flood, FRAMES);
        assert!(reading.join().unwrap(), "{what}");
        is_served(&demo);
    }
    let ended: u64 = reports(&demo).iter().filter_map(|report| report.ended_early.get("tunnel_frames")).sum();
    assert_eq!(ended, 8);
}

#[test]
fn frames_of_ordinary_requests_do_not_count_as_a_flood() {
    let demo = demo(None);
    let enrolled = enroll(&demo);
    let mut tunnel = enrolled.tunnel(&demo);
    let mut caller = enrolled.caller(&demo);
    // In total more frames than the budget of empty frames.
    for number in 0..1500 {
        caller.send(enrolled.get());
        let stream = tunnel.request();
        let interim = head(stream, &[(":status", "103")]).repeat(3);
        let end = frame(DATA, 1, stream, &[]);
        tunnel.0.send([interim, head(stream, &[(":status", "200")]), end].concat());
        for _ in 0..3 {
            assert_eq!(caller.response_head(&Method::GET).unwrap().status, 103, "{number}");
        }
        assert_eq!(caller.response().status, 200);
    }
    assert_eq!(report(&demo, &enrolled).unwrap().in_flight, 0);
}

#[test]
fn control_messages_are_limited_in_rate_and_length() {
    let demo = demo(None);
    let enrolled = enroll(&demo);
    let statistics = b"{\"type\":\"statistics\",\"slots\":1,\"slots_in_use\":0,\"backend_connections\":0}\n";
    let long = [b"{\"type\":\"renew\",\"csr\":\"".as_slice(), &[b'x'; 20_000], b"\"}\n"].concat();
    for (what, line) in [
        ("too many", statistics.as_slice()),
        ("answers to nothing", b"{\"type\":\"window\"}\n"),
        ("too long", &long),
        ("no end", &[b'x'; 20_000]),
        ("empty lines", b"\n"),
        ("no message", b"{\"type\":\"statistics\",\"slots\":-1}\n"),
    ] {
        let mut tunnel = enrolled.tunnel(&demo);
        let sent = tunnel.sent_until_cut(&frame(DATA, 0, CONTROL, line), 2000);
        assert!(tunnel.is_cut(), "{what}: {sent}");
    }
    // The messages of an unmodified agent in its busiest second stay within the limit.
    let mut tunnel = enrolled.tunnel(&demo);
    tunnel.0.send(frame(DATA, 0, CONTROL, statistics).repeat(30));
    eventually("the statistics arrive", || (report(&demo, &enrolled)?.slots == Some(1)).then_some(()));
}

#[test]
fn reported_statistics_are_clamped() {
    let demo = demo(None);
    let enrolled = enroll(&demo);
    let mut tunnel = enrolled.tunnel(&demo);
    let absurd =
        b"{\"type\":\"statistics\",\"slots\":4294967295,\"slots_in_use\":4294967295,\"backend_connections\":1}\n";
    tunnel.0.send(frame(DATA, 0, CONTROL, absurd));
    let report =
        eventually("the statistics arrive", || report(&demo, &enrolled).filter(|report| report.slots.is_some()));
    let most = u32::try_from(settings::STREAMS_MAX).unwrap();
    assert_eq!((report.slots, report.slots_in_use), (Some(most), Some(most)));
}

#[test]
fn stream_counts_that_an_agent_claims_do_not_open_its_window() {
    const MAX_CONCURRENT_STREAMS: u8 = 3;
    let demo = demo(None);
    let enrolled = enroll(&demo);
    let mut tunnel = enrolled.upgraded(&demo);
    tunnel.0.send(frame(SETTINGS, 0, 0, &[0, MAX_CONCURRENT_STREAMS, 0x7f, 0xff, 0xff, 0xff]));
    let mut window: u64 = 65_535;
    let mut next = |tunnel: &mut Tunnel| {
        let next = tunnel.next().unwrap();
        if next.kind == WINDOW_UPDATE && next.stream == 0 {
            window += u64::from(u32::from_be_bytes(next.payload[..].try_into().unwrap()));
        }
        next
    };
    while next(&mut tunnel).stream != CONTROL {}
    tunnel.0.send(head(CONTROL, &[(":status", "200")]));
    // Longer than the interval at which the gateway adjusts the windows of a tunnel.
    let until = Instant::now() + 5 * gw_shared::tunnel::window::INTERVAL;
    while Instant::now() < until {
        tunnel.0.send(frame(PING, 0, 0, &[0; 8]));
        while !matches!(next(&mut tunnel), modified_agent::Frame { kind: PING, flags: 1, .. }) {}
        std::thread::sleep(Duration::from_millis(5));
    }
    let first = settings::connection_window(2 * settings::STREAMS_BEYOND_SLOTS as usize);
    assert_eq!(window, u64::from(first));
}

#[test]
fn settings_that_are_not_acknowledged_end_the_tunnel() {
    let demo = demo(None);
    let enrolled = enroll(&demo);
    let mut tunnel = enrolled.upgraded(&demo);
    // Sends everything except the acknowledgement.
    tunnel.0.send(frame(SETTINGS, 0, 0, &[]));
    while tunnel.unanswered().unwrap().stream != CONTROL {}
    tunnel.0.send(head(CONTROL, &[(":status", "200")]));
    eventually("the tunnel is registered", || report(&demo, &enrolled));
    tunnel.0.send(frame(DATA, 0, CONTROL, b"{\"type\":\"window\"}\n"));
    assert!(is_ended(&mut tunnel.0));
}

#[test]
fn a_tunnel_after_goaway_gets_no_more_requests() {
    let demo = demo(None);
    let enrolled = enroll(&demo);
    let mut tunnel = enrolled.tunnel(&demo);
    // A GOAWAY that keeps only the control stream.
    tunnel.0.send(frame(GOAWAY, 0, 0, &[0, 0, 0, 1, 0, 0, 0, 0]));
    let mut caller = enrolled.caller(&demo);
    let mut code = || {
        caller.send(enrolled.get());
        caller.response().code()
    };
    // The first request may discover the GOAWAY.
    assert!(["GW_RELAY_ERROR", "AGENT_UNAVAILABLE"].contains(&&*code()));
    assert_eq!(code(), "AGENT_UNAVAILABLE");
    // A GOAWAY that raises the last stream id is an error, and so is a response on a stream that the gateway has not
    // opened.
    let mut tunnel = enrolled.tunnel(&demo);
    tunnel.0.send(frame(GOAWAY, 0, 0, &[0, 0, 0, 1, 0, 0, 0, 0]));
    tunnel.0.send(frame(GOAWAY, 0, 0, &[0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 0]));
    assert!(tunnel.is_cut());
    let mut tunnel = enrolled.tunnel(&demo);
    tunnel.0.send(frame(HEADERS, END_HEADERS, 2, &http2_frames::block(&[(":status", "200")])));
    assert!(tunnel.is_cut());
}

#[test]
fn data_beyond_the_window_ends_its_stream() {
    let demo = demo(None);
    let enrolled = enroll(&demo);
    let mut tunnel = enrolled.tunnel(&demo);
    let (mut caller, stream) = enrolled.send_get(&demo, &mut tunnel);
    tunnel.0.send(head(stream, &[(":status", "200")]));
    assert_eq!(caller.response_head(&Method::GET).unwrap().status, 200);
    // The caller stops reading. Its socket buffers hold at most a few megabytes.
    let piece = frame(DATA, 0, stream, &[0; 16 * 1024]);
    let reading = tunnel.read_on();
    tunnel.sent_until_cut(&piece, 10_000);
    eventually("the request is over", || (tunnels(&demo).iter().all(|tunnel| tunnel.in_flight == 0)).then_some(()));
    tunnel.close();
    reading.join().unwrap();
}

#[test]
fn a_revocation_closes_connections_before_the_tunnel_handshake() {
    within_a_second("the end of connections before the tunnel handshake", || {
        let demo = demo(None);
        let enrolled = enroll(&demo);
        let mut connected = enrolled.connection(&demo);
        let mut asking = enrolled.connection(&demo);
        asking.send("GET /tunnel HTTP/1.1\r\nHost: ");
        let mut upgraded = enrolled.upgraded(&demo);
        let mut begun = enrolled.upgraded(&demo);
        begun.0.send(frame(SETTINGS, 0, 0, &[]));
        begun.next_of(HEADERS).unwrap();
        let control = demo.gateway().control();
        let revoked = Instant::now();
        control.revoke_agent(&Actor::Admin, "demo", enrolled.agent.as_str()).unwrap();
        assert!(is_ended(&mut connected) && is_ended(&mut asking));
        assert!(upgraded.is_cut() && begun.is_cut());
        revoked.elapsed()
    });
}

#[test]
fn the_rate_of_new_tunnels_of_an_agent_is_limited() {
    let demo = demo(None);
    let enrolled = enroll(&demo);
    let mut opened = 0;
    let refused = loop {
        let mut agent = enrolled.connection(&demo);
        agent.send(handshake::request(HOST, None));
        let response = agent.response_head(&Method::GET).unwrap();
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
    is_served(&demo);
    let others = eventually("another connection is accepted", || {
        let mut agent = enrolled.connection(&demo);
        agent.send(handshake::request(HOST, None));
        (agent.response_head(&Method::GET).unwrap().status == 101).then_some(agent)
    });
    drop(others);
}

#[test]
fn the_number_of_unfinished_tunnel_handshakes_is_limited() {
    let demo = demo(None);
    let enrolled = enroll(&demo);
    // Among authenticated connections that send no request, the oldest are closed.
    let mut silent: Vec<_> = (0..40).map(|_| enrolled.connection(&demo)).collect();
    assert!(is_ended(&mut silent[0]));
    // The same applies to connections that requested a tunnel.
    let mut first = enrolled.upgraded(&demo);
    let others: Vec<Tunnel> = (0..4).map(|_| enrolled.upgraded(&demo)).collect();
    assert!(first.is_cut());
    drop(others);
    // A valid tunnel is still accepted.
    let mut tunnel = enrolled.tunnel(&demo);
    let (mut caller, stream) = enrolled.send_get(&demo, &mut tunnel);
    tunnel.0.send([head(stream, &[(":status", "200")]), last_data(stream, b"ok")].concat());
    assert_eq!(caller.response().body, b"ok");
}
