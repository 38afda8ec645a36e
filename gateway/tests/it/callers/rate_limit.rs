//! Rate limits of services, exact across workers.

use std::thread;
use std::time::Instant;

use crate::support::peers::backend;
use crate::support::peers::caller::HOST;
use crate::support::scene::Scene;

/// Sends 1,500 requests on 30 concurrent connections, with or without hand-over between workers.
fn storm(workers: usize, hand_over: &'static str) {
    let backend = backend::answering("HTTP/1.1 204 No Content\r\n\r\n");
    let scene = Scene::service()
        .agent_to(backend)
        .workers(workers)
        .hand_over(hand_over)
        .rate(1000, 300)
        .start();
    let started = Instant::now();
    let passed: u128 = thread::scope(|scope| {
        let callers: Vec<_> = (0..30).map(|_| scope.spawn(|| call(&scene, 50))).collect();
        let passed = callers.into_iter().map(|caller| caller.join().unwrap());
        passed.sum()
    });
    let refilled = started.elapsed().as_millis() / 200;
    assert!(
        (1000..=1000 + refilled).contains(&passed),
        "{workers} workers, {hand_over}: {passed} passed, {refilled} refilled"
    );
}

/// Sends requests on one connection, each of which passes or is refused. Returns how many passed.
fn call(scene: &Scene, count: usize) -> u128 {
    let mut caller = scene.connect();
    let mut passed = 0;
    for _ in 0..count {
        let response = caller.ask(scene.get("/"));
        if response.status == 204 {
            passed += 1;
            continue;
        }
        assert_eq!(response.status, 429);
        assert_eq!(response.code(), "GW_RATE_LIMIT_EXCEEDED");
        assert_eq!(response.header("x-gw-status"), "RateLimited");
        assert_eq!(response.header("retry-after"), "1");
    }
    passed
}

#[test]
fn exactly_the_burst_passes_across_connections_and_workers() {
    for (workers, hand_over) in [(1, "auto"), (2, "never"), (4, "always"), (4, "never")] {
        storm(workers, hand_over);
    }
}

/// Requests with `Max-Forwards: 0`, each on a connection of its own, take from the one bucket of
/// their service.
fn answered_here(workers: usize) {
    const BURST: u32 = 32;
    let (_refusing, backend) = backend::refusing();
    let scene = Scene::service()
        .agent_to(format!("http://{backend}"))
        .workers(workers)
        .hand_over("never")
        .rate(BURST, 1)
        .start();
    let ask = |number: u32| {
        let line = ["OPTIONS *", "TRACE /"][number as usize % 2];
        let request = scene.request(line, "Max-Forwards: 0\r\n\r\n");
        scene.connect().ask(request).status.as_u16()
    };
    for number in 0..BURST {
        let answered = [204, 200][number as usize % 2];
        assert_eq!(ask(number), answered, "{number} of {workers} workers");
    }
    // The bucket gets a token a minute.
    let statuses: Vec<u16> = (0..4).map(ask).collect();
    let refused = statuses.iter().filter(|status| **status == 429).count();
    assert!(refused >= 3, "{statuses:?} of {workers} workers");
    let crossings = scene.metrics().count("gw_requests_crossing_total");
    assert_eq!(crossings > 0, workers > 1);
}

#[test]
fn requests_that_the_gateway_answers_take_tokens_of_the_owner() {
    answered_here(1);
    answered_here(4);
}

#[test]
fn unauthenticated_requests_take_no_tokens() {
    let scene = Scene::service().agent().rate(1, 1).start();
    let mut caller = scene.connect();
    for _ in 0..10 {
        let response = caller.ask(format!("GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n"));
        assert_eq!(response.code(), "GW_AUTH_REQUIRED");
    }
    for expected in [200, 429] {
        assert_eq!(caller.ask(scene.get("/")).status, expected);
    }
}

#[test]
fn retry_after_is_the_time_until_the_next_token() {
    let scene = Scene::service().agent().rate(1, 1).start();
    let mut caller = scene.connect();
    let began = Instant::now();
    assert_eq!(caller.ask(scene.get("/")).status, 200);
    let limited = caller.ask(scene.get("/"));
    assert_eq!(limited.status, 429);
    let seconds: u64 = limited.header("retry-after").parse().unwrap();
    let passed = began.elapsed().as_secs();
    assert!((59 - passed..=60).contains(&seconds), "{seconds}");
}
