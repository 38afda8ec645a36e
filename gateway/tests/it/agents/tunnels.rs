//! Tunnels: revocation, replacement, several agents of one service, and fairness.

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use gw_control_plane::control::Actor;
use gw_control_plane::control::records::agent;
use gw_shared::tunnel::frame::Kind;
use gw_store::StoredRecord;
use gw_telemetry::counters::TunnelReport;

use gw_gateway::demo::Demo;

use crate::support::agents::modified_agent;
use crate::support::peers::backend;
use crate::support::peers::caller::{connect, get};
use crate::support::stopwatch::within_a_second;
use crate::support::{demo, eventually, setup, tunnels, tunnels_ended};

/// Starts a second agent of the demo's service, with its own identity, in front of `backend`.
fn second_agent(demo: &Demo, state_dir: &std::path::Path, backend: &str) -> gw_agent::AgentHandle {
    let port = demo.gateway().address().port();
    setup::agent(
        demo.gateway().control(),
        "demo",
        &["echo"],
        port,
        &demo.about.ca_file,
        state_dir,
    );
    start_agent(state_dir, backend)
}

fn start_agent(state_dir: &std::path::Path, backend: &str) -> gw_agent::AgentHandle {
    let config = gw_agent::Config::load(
        None,
        Some(state_dir.to_owned()),
        &[backend.to_owned()],
        |_| None,
    )
    .unwrap();
    gw_agent::start(config).unwrap()
}

#[test]
fn a_revoked_agents_tunnel_is_cut_within_a_second() {
    let demo = demo(None);
    let mut caller = connect(&demo);
    let control = demo.gateway().control();
    let agent = control.records().agents.into_values().next().unwrap();
    caller.send(get(&demo, "/slow?ms=60000"));
    let has_it = |tunnel: &TunnelReport| tunnel.in_flight == 1;
    eventually("the request is on the tunnel", || {
        tunnels(&demo).iter().any(has_it).then_some(())
    });
    agent::revoke(control, &Actor::Admin, "demo", agent.id.as_str()).unwrap();
    let cut = within_a_second("the end of a revoked agent's tunnel", || caller.response());
    assert_eq!(cut.code(), "GW_RELAY_ERROR");
    assert_eq!(tunnels_ended(&demo), BTreeMap::from([("agent_revoked", 1)]));
    caller.send(get(&demo, "/"));
    let response = caller.response();
    assert_eq!(
        (response.status.as_u16(), response.code().as_str()),
        (504, "AGENT_UNAVAILABLE")
    );
    // Once it is allowed again, the agent reconnects.
    control.put(&StoredRecord::Agent(agent)).unwrap();
    eventually("the tunnel is back", || {
        caller.send(get(&demo, "/"));
        (caller.response().status == 200).then_some(())
    });
}

#[test]
fn two_agents_share_a_service_and_each_can_drain() {
    let demo = demo(Some(backend::answering(
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n1",
    )));
    let state = tempfile::tempdir().unwrap();
    let other = backend::answering("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n2");
    let second = second_agent(&demo, state.path(), &other);
    eventually("both tunnels are open", || {
        (tunnels(&demo).len() == 2).then_some(())
    });
    let mut caller = connect(&demo);
    let mut ask = |target: &str| {
        caller.send(get(&demo, target));
        caller.response().body[0]
    };
    for agent in [b'1', b'2'] {
        eventually("each agent gets requests", || {
            (ask("/") == agent).then_some(())
        });
    }
    // A draining agent finishes its requests, and no request fails.
    thread::scope(|scope| {
        let draining = scope.spawn(|| second.drain());
        while !draining.is_finished() {
            assert!([b'1', b'2'].contains(&ask("/")));
        }
    });
    eventually("one tunnel is left", || {
        (tunnels(&demo).len() == 1).then_some(())
    });
    assert_eq!(tunnels_ended(&demo), BTreeMap::from([("agent_drained", 1)]));
}

#[test]
fn a_newer_tunnel_of_the_same_agent_takes_over_and_the_older_one_is_its_reserve() {
    let demo = demo(None);
    let state_dir = demo.about.ca_file.parent().unwrap().join("agent");
    let before = tunnels(&demo)[0].generation;
    // The folder is in use, so a copy of it starts the same agent.
    let copy = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(state_dir).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), copy.path().join(file.file_name())).unwrap();
    }
    let newer = start_agent(
        copy.path(),
        &backend::answering("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nnew"),
    );
    let mut caller = connect(&demo);
    eventually("the newer tunnel serves", || {
        caller.send(get(&demo, "/"));
        (caller.response().body == b"new").then_some(())
    });
    let now = tunnels(&demo);
    assert_eq!(now.len(), 1);
    assert!(now[0].generation > before);
    // The older tunnel has stayed open, and serves as soon as the newer one ends.
    newer.drain();
    caller.send(get(&demo, "/"));
    let response = caller.response();
    assert!(response.status == 200 && response.body != b"new");
    assert_eq!(tunnels(&demo)[0].generation, before);
    assert_eq!(tunnels_ended(&demo), BTreeMap::from([("agent_drained", 1)]));
}

#[test]
fn the_round_trip_of_a_tunnel_is_that_of_a_ping() {
    // Longer than TCP takes to acknowledge it.
    const LATE: Duration = Duration::from_millis(300);
    let demo = demo(None);
    let agent = modified_agent::enroll(&demo);
    let mut tunnel = agent.tunnel(&demo);
    let round_trip = || agent.report(&demo).unwrap().round_trip_us;
    // The gateway has sent a PING with its first window.
    assert_eq!(round_trip(), None);
    thread::sleep(LATE);
    tunnel.next_of(Kind::Ping).unwrap();
    let measured = eventually("the answer is measured", round_trip);
    assert!(u128::from(measured) >= LATE.as_micros(), "{measured}");
}

#[test]
fn stalled_downloads_do_not_delay_other_requests() {
    let demo = demo(None);
    let stalled: Vec<_> = (0..8)
        .map(|_| {
            let mut caller = connect(&demo);
            caller.send(get(&demo, "/bytes/1000000000"));
            caller.bytes(64 * 1024).unwrap();
            caller
        })
        .collect();
    let mut caller = connect(&demo);
    for number in 0..200 {
        caller.send(get(&demo, &format!("/{number}")));
        assert_eq!(caller.response().json()["target"], format!("/{number}"));
    }
    drop(stalled);
    crate::support::wait_until_slots_are_free(&demo);
}

#[test]
fn cancelled_downloads_release_their_slots() {
    let demo = demo(None);
    for _ in 0..200 {
        let mut caller = connect(&demo);
        caller.send(get(&demo, "/bytes/1000000000"));
        caller.bytes(1000).unwrap();
    }
    thread::scope(|scope| {
        for _ in 0..100 {
            scope.spawn(|| {
                let mut caller = connect(&demo);
                caller.send(get(&demo, "/bytes/1000000000"));
                caller.bytes(1000).unwrap();
            });
        }
    });
    crate::support::wait_until_slots_are_free(&demo);
    assert_eq!(tunnels(&demo)[0].slots, Some(128));
    assert_eq!(tunnels(&demo)[0].generation, 1, "the tunnel survived");
}
