//! Hand-over of connections and requests that cross workers, with one, two and four workers.

use std::thread;

use super::{mirror, pattern};
use crate::support::peers::caller::connect_to;
use crate::support::scene::Scene;
use crate::support::{eventually, turn};

#[test]
fn requests_and_large_bodies_cross_workers_in_every_mode() {
    let _turn = turn();
    for (workers, hand_over) in [
        (1, "auto"),
        (2, "always"),
        (2, "never"),
        (4, "always"),
        (4, "never"),
    ] {
        let scene = Scene::service()
            .agent_to(mirror())
            .workers(workers)
            .hand_over(hand_over)
            .start();
        thread::scope(|scope| {
            for number in 0..12 {
                let scene = &scene;
                scope.spawn(move || bodies_are_relayed(scene, number));
            }
        });
        if workers > 1 {
            // The kernel may give all connections to the same worker.
            eventually("a connection reaches another worker", || {
                let post = scene.request("POST /", "Content-Length: 0\r\n\r\n");
                assert_eq!(scene.connect().ask(post).status, 200);
                (crossed_and_handed_over(&scene) != (0, 0)).then_some(())
            });
        }
        let counts = crossed_and_handed_over(&scene);
        let is_as_configured = match (workers, hand_over) {
            (1, _) => counts == (0, 0),
            (_, "never") => counts.0 > 0,
            _ => counts.0 == 0 && counts.1 > 0,
        };
        assert!(
            is_as_configured,
            "{workers} workers, {hand_over}: {counts:?}"
        );
        scene.wait_until_slots_are_free();
        scene.stop();
    }
}

/// Sends bodies of several lengths on one connection.
fn bodies_are_relayed(scene: &Scene, number: usize) {
    let mut caller = scene.connect();
    for length in [0, 1, 1000, 300_000 + number, 3_000_000] {
        let body = pattern(length, number);
        let framing = format!("Content-Length: {length}\r\n\r\n");
        caller.send(scene.request("POST /", &framing));
        let response = caller.ask(&body);
        assert_eq!(response.status, 200);
        assert!(response.body == body, "{length} bytes");
    }
}

/// Numbers of requests that crossed workers, and of connections that were handed over.
fn crossed_and_handed_over(scene: &Scene) -> (u64, u64) {
    let metrics = scene.metrics();
    let crossed = metrics.count("gw_requests_crossing_total");
    let handed_over = metrics.count("gw_connections_handed_over_total");
    (crossed, handed_over)
}

#[test]
fn a_disconnected_caller_cancels_a_request_that_crosses_workers() {
    for hand_over in ["always", "never"] {
        let scene = Scene::service()
            .agent()
            .workers(4)
            .hand_over(hand_over)
            .start();
        // Enough connections for some to reach a worker that does not own the service.
        for target in ["/slow?ms=60000", "/bytes/1000000000"] {
            let callers: Vec<_> = (0..16)
                .map(|_| {
                    let mut caller = scene.connect();
                    caller.send(scene.get(target));
                    caller
                })
                .collect();
            eventually("16 requests on the tunnel", || {
                (scene.tunnels()[0].in_flight == 16).then_some(())
            });
            drop(callers);
            scene.wait_until_slots_are_free();
        }
    }
}

#[test]
fn a_connection_may_carry_requests_for_services_other_than_its_server_name() {
    let scene = Scene::service()
        .agent()
        .workers(4)
        .hand_over("always")
        .start();
    // Server names owned by other workers: requests for the scene's service cross from there.
    for number in 0..8 {
        let name = format!("other{number}");
        scene.api().create_service("demo", &name);
        let server_name = format!("demo--{name}.eu1.gw.localhost");
        let mut caller = connect_to(&scene.about, &server_name, &[b"http/1.1"], None);
        let seen = caller.ask(scene.get("/coalesced")).json();
        assert_eq!(seen["target"], "/coalesced");
    }
    assert!(scene.metrics().count("gw_requests_crossing_total") > 0);
}
