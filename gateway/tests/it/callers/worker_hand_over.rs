//! Hand-over of connections and requests that cross workers, with one, two and four workers.

use std::thread;

use crate::support::demo::{Demo, Options};
use crate::support::peers::backend;
use crate::support::peers::caller::{connect, connect_to, get, request};
use crate::support::{eventually, turn};

/// A backend that echoes every body.
fn mirror() -> String {
    backend::start(|mut peer| {
        while let Ok((_, body, _)) = peer.request() {
            peer.send(format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n",
                body.len()
            ));
            peer.send(body);
        }
    })
}

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
        let options = Options {
            workers,
            hand_over,
            ..crate::support::options(Some(mirror()))
        };
        let demo = Demo::start(&options).unwrap();
        thread::scope(|scope| {
            for number in 0..12usize {
                let demo = &demo;
                scope.spawn(move || {
                    let mut caller = connect(demo);
                    for length in [0, 1, 1000, 300_000 + number, 3_000_000] {
                        let body: Vec<u8> = (0..length).map(|at| (at * 7 + number) as u8).collect();
                        caller.send(request(
                            demo,
                            "POST /",
                            &format!("Content-Length: {length}\r\n\r\n"),
                        ));
                        caller.send(&body);
                        let response = caller.response();
                        assert_eq!(response.status, 200);
                        assert!(
                            response.body == body,
                            "{length} bytes were not relayed unchanged"
                        );
                    }
                });
            }
        });
        let counts = || {
            let metrics = demo.metrics();
            (
                metrics.count("gw_requests_crossing_total"),
                metrics.count("gw_connections_handed_over_total"),
            )
        };
        if workers > 1 {
            // The kernel may give all connections to the same worker.
            eventually("a connection reaches another worker", || {
                let mut caller = connect(&demo);
                caller.send(request(&demo, "POST /", "Content-Length: 0\r\n\r\n"));
                assert_eq!(caller.response().status, 200);
                (counts() != (0, 0)).then_some(())
            });
        }
        let (crossed, handed) = counts();
        match (workers, hand_over) {
            (1, _) => assert_eq!((crossed, handed), (0, 0)),
            (_, "never") => assert!(
                crossed > 0,
                "with {workers} workers some connection was elsewhere"
            ),
            _ => assert!(
                crossed == 0 && handed > 0,
                "{crossed} crossed, {handed} handed over"
            ),
        }
        crate::support::wait_until_slots_are_free(&demo);
        demo.stop();
    }
}

#[test]
fn a_disconnected_caller_cancels_a_request_that_crosses_workers() {
    for hand_over in ["always", "never"] {
        let options = Options {
            workers: 4,
            hand_over,
            ..crate::support::options(None)
        };
        let demo = Demo::start(&options).unwrap();
        // Enough connections for some to reach a worker that does not own the service.
        for target in ["/slow?ms=60000", "/bytes/1000000000"] {
            let callers: Vec<_> = (0..16)
                .map(|_| {
                    let mut caller = connect(&demo);
                    caller.send(get(&demo, target));
                    caller
                })
                .collect();
            eventually("16 requests on the tunnel", || {
                (demo.tunnels()[0].in_flight == 16).then_some(())
            });
            drop(callers);
            crate::support::wait_until_slots_are_free(&demo);
        }
    }
}

#[test]
fn a_connection_may_carry_requests_for_services_other_than_its_server_name() {
    let options = Options {
        workers: 4,
        hand_over: "always",
        ..crate::support::options(None)
    };
    let demo = Demo::start(&options).unwrap();
    // Server names owned by other workers: requests for the demo's service cross from there.
    for number in 0..8 {
        let name = format!("other{number}");
        demo.api().create_service("demo", &name);
        let server_name = format!("demo--{name}.eu1.gw.localhost");
        let mut caller = connect_to(&demo.about, &server_name, &[b"http/1.1"], None);
        caller.send(get(&demo, "/coalesced"));
        assert_eq!(caller.response().json()["target"], "/coalesced");
    }
    assert!(demo.metrics().count("gw_requests_crossing_total") > 0);
}
