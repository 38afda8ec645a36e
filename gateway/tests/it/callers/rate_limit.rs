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
    let (passed, limited) = thread::scope(|scope| {
        let callers: Vec<_> = (0..30).map(|_| scope.spawn(|| call(&scene, 50))).collect();
        callers
            .into_iter()
            .map(|caller| caller.join().unwrap())
            .fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    });
    let refilled = started.elapsed().as_millis() / 200;
    assert_eq!(passed + limited, 1500);
    assert!(
        (1000..=1000 + refilled).contains(&passed),
        "{passed} passed, {refilled} refilled"
    );
}

fn call(scene: &Scene, count: usize) -> (u128, u128) {
    let mut caller = scene.connect();
    let mut passed = 0;
    let mut limited = 0;
    for _ in 0..count {
        caller.send(scene.get("/"));
        let response = caller.response();
        if response.status == 204 {
            passed += 1;
        } else {
            assert_eq!(
                (response.status.as_u16(), response.code().as_str()),
                (429, "GW_RATE_LIMIT_EXCEEDED")
            );
            assert_eq!(
                (
                    response.header("x-gw-status"),
                    response.header("retry-after")
                ),
                ("RateLimited", "1")
            );
            limited += 1;
        }
    }
    (passed, limited)
}

#[test]
fn exactly_the_burst_passes_across_connections_and_workers() {
    storm(1, "auto");
    storm(2, "never");
    storm(4, "always");
    storm(4, "never");
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
        let mut caller = scene.connect();
        caller.send(scene.request(line, "Max-Forwards: 0\r\n\r\n"));
        caller.response().status.as_u16()
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
        caller.send(format!("GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n"));
        assert_eq!(caller.response().code(), "GW_AUTH_REQUIRED");
    }
    let began = Instant::now();
    caller.send(scene.get("/"));
    assert_eq!(caller.response().status, 200);
    caller.send(scene.get("/"));
    let limited = caller.response();
    assert_eq!(limited.status, 429);
    // Retry-After is the time until the next token.
    let seconds: u64 = limited.header("retry-after").parse().unwrap();
    let passed: u64 = began.elapsed().as_secs();
    assert!((59 - passed..=60).contains(&seconds), "{seconds}");
}
