//! Tunnels: revocation, replacement, several agents of one service, and fairness.

use std::time::Duration;
use std::{fs, thread};

use gw_shared::tunnel::frame::Kind;

use crate::support::agents::in_process::Agent;
use crate::support::agents::modified_agent;
use crate::support::peers::backend;
use crate::support::peers::caller::Caller;
use crate::support::scene::Scene;

use crate::support::eventually;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::{config_text, gw_gateway, hold, serve, serve_command};
use crate::support::stopwatch::within_a_second;

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

#[test]
fn a_revoked_agents_tunnel_is_cut_within_a_second() {
    let scene = Scene::service().agent().start();
    let mut caller = scene.connect();
    caller.send(scene.get("/slow?ms=60000"));
    let tunnel = eventually("the request is on the tunnel", || {
        let mut tunnels = scene.tunnels().into_iter();
        tunnels.find(|tunnel| tunnel.in_flight == 1)
    });
    scene.api().revoke_agent("demo", &tunnel.agent_id);
    let cut = within_a_second("the end of a revoked agent's tunnel", || caller.response());
    assert_eq!(cut.code(), "GW_RELAY_ERROR");
    assert_eq!(
        scene.tunnels_ended(),
        [("agent_revoked".to_owned(), 1)].into()
    );
    let response = caller.ask(scene.get("/"));
    assert_eq!(
        (response.status.as_u16(), response.code().as_str()),
        (504, "AGENT_UNAVAILABLE")
    );
}

#[test]
fn a_revoked_agent_reconnects_once_a_restored_backup_allows_it() {
    let prepared = Prepared::new();
    let (served, _agent) = prepared.start(&backend::answering(OK));
    let address = served.address;
    let _port = hold(address);
    let api = prepared.api(served.admin_address);
    let backup = prepared.path("backup");
    fs::write(&backup, api.download("/backup").1).unwrap();
    let agent = api.tunnels()[0].agent_id.clone();
    api.revoke_agent("demo", &agent);
    eventually("the tunnel is gone", || {
        api.tunnels().is_empty().then_some(())
    });
    drop(served);
    fs::rename(prepared.path("data"), prepared.path("revoked")).unwrap();
    let config = prepared.path("restored.toml");
    fs::write(&config, config_text(&prepared.path("data"), address.port())).unwrap();
    let mut restore = gw_gateway();
    restore.args(["restore", "--config"]).arg(&config);
    assert!(restore.arg(backup).status().unwrap().success());
    let _restored = serve(&mut serve_command(&config));
    prepared.wait_for_tunnel(address);
}

#[test]
fn two_agents_share_a_service_and_each_can_drain() {
    let scene = Scene::service().enrolled(&["one", "two"]).start();
    let first = backend::answering("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n1");
    let other = backend::answering("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n2");
    let _first = scene.run("one", 128, &first);
    let second = scene.run("two", 128, &other);
    let mut caller = scene.connect();
    let mut ask = |target: &str| {
        caller.send(scene.get(target));
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
    scene.wait_for_tunnels(1);
    assert_eq!(
        scene.tunnels_ended(),
        [("agent_drained".to_owned(), 1)].into()
    );
}

#[test]
fn a_newer_tunnel_of_the_same_agent_takes_over_and_the_older_one_is_its_reserve() {
    let scene = Scene::service().agent().start();
    let state_dir = scene.state_dir("agent");
    let before = scene.tunnels()[0].generation;
    // The folder is in use, so a copy of it starts the same agent.
    let copy = tempfile::tempdir().unwrap();
    for file in fs::read_dir(state_dir).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), copy.path().join(file.file_name())).unwrap();
    }
    let newer = Agent::start(
        copy.path().to_owned(),
        &backend::answering("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nnew"),
    );
    let mut caller = scene.connect();
    eventually("the newer tunnel serves", || {
        (caller.ask(scene.get("/")).body == b"new").then_some(())
    });
    let now = scene.tunnels();
    assert_eq!(now.len(), 1);
    assert!(now[0].generation > before);
    // The older tunnel has stayed open, and serves as soon as the newer one ends.
    newer.drain();
    let response = caller.ask(scene.get("/"));
    assert!(response.status == 200 && response.body != b"new");
    assert_eq!(scene.tunnels()[0].generation, before);
    assert_eq!(
        scene.tunnels_ended(),
        [("agent_drained".to_owned(), 1)].into()
    );
}

#[test]
fn the_round_trip_of_a_tunnel_is_that_of_a_ping() {
    // Longer than TCP takes to acknowledge it.
    const LATE: Duration = Duration::from_millis(300);
    let scene = Scene::service().agent().start();
    let agent = modified_agent::enroll(&scene);
    let mut tunnel = agent.tunnel(&scene);
    let round_trip = || agent.report(&scene).unwrap().round_trip_us;
    // The gateway has sent a PING with its first window.
    assert_eq!(round_trip(), None);
    thread::sleep(LATE);
    tunnel.next_of(Kind::Ping).unwrap();
    let measured = eventually("the answer is measured", round_trip);
    assert!(u128::from(measured) >= LATE.as_micros(), "{measured}");
}

/// A caller that has read some bytes of a long response.
fn downloading(scene: &Scene, bytes: usize) -> Caller {
    let mut caller = scene.connect();
    caller.send(scene.get("/bytes/1000000000"));
    caller.bytes(bytes).unwrap();
    caller
}

#[test]
fn stalled_downloads_do_not_delay_other_requests() {
    let scene = Scene::service().agent().start();
    let stalled: Vec<_> = (0..8).map(|_| downloading(&scene, 64 * 1024)).collect();
    let mut caller = scene.connect();
    for number in 0..200 {
        let target = format!("/{number}");
        assert_eq!(caller.ask(scene.get(&target)).json()["target"], target);
    }
    drop(stalled);
    scene.wait_until_slots_are_free();
}

#[test]
fn cancelled_downloads_release_their_slots() {
    let scene = Scene::service().agent().start();
    for _ in 0..200 {
        downloading(&scene, 1000);
    }
    thread::scope(|scope| {
        for _ in 0..100 {
            scope.spawn(|| downloading(&scene, 1000));
        }
    });
    scene.wait_until_slots_are_free();
    assert_eq!(scene.tunnels()[0].slots, Some(128));
    assert_eq!(scene.tunnels()[0].generation, 1, "the tunnel survived");
}
