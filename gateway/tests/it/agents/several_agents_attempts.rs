//! Attempts of a request on several tunnels, with agents that the test controls: what is sent
//! again, and what never is.

mod bodies;
mod callers;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use http::Method;

use crate::support::agents::modified_agent::Tunnel;
use crate::support::agents::scripted::{
    Attempt, Scripted, answered, body, refused_unsent, statistics,
};
use crate::support::agents::tunnel_frames::{head, interim, message, ok, refused, reset};
use crate::support::eventually;
use crate::support::peers::caller::Caller;
use crate::support::peers::http1_peer::Response;
use crate::support::scene::Scene;
use crate::support::stopwatch::Stopwatch;

/// How the first attempt fails.
#[derive(Debug, Clone, Copy)]
enum Failing {
    Unsent(&'static str),
    Refused(&'static str),
    Reset,
    /// After an interim response.
    BrokenAfterInterim,
    UnsentAfterInterim,
    /// The response breaks off before a byte of it was passed on.
    BrokenResponse,
    Violation,
    Closed,
}

impl Failing {
    fn act(self, tunnel: &mut Tunnel, attempt: &Attempt) {
        let stream = attempt.stream;
        let hints = interim(stream, "103", &[("link", "</a.css>")]);
        tunnel.0.send(match self {
            Self::Unsent(code) => refused_unsent(stream, code),
            Self::Refused(code) => refused(stream, code.as_bytes(), b"in a test"),
            Self::Reset => reset(stream, b""),
            Self::BrokenAfterInterim => [hints, reset(stream, b"")].concat(),
            Self::UnsentAfterInterim => {
                [hints, refused_unsent(stream, "GW_BACKEND_UNREACHABLE")].concat()
            }
            Self::BrokenResponse => {
                let begun = head(stream, "200", &[("content-length", "100")]);
                [begun, reset(stream, b"GW_BACKEND_RESET")].concat()
            }
            Self::Violation => head(stream, "99", &[]),
            Self::Closed => return tunnel.close(),
        });
    }
}

/// Lets the first attempt fail, and answers later ones with the body of the request.
fn fail_first(failing: Failing) -> impl Fn(&mut Tunnel, &Attempt) -> bool + Clone + Send + 'static {
    move |tunnel, attempt| {
        if attempt.nth == 0 {
            failing.act(tunnel, attempt);
            return !matches!(failing, Failing::Closed);
        }
        answer(tunnel, attempt)
    }
}

/// Accepts a request that asks for it, and answers with its body.
fn answer(tunnel: &mut Tunnel, attempt: &Attempt) -> bool {
    if attempt.head.contains("x-gw-await-acceptance") {
        tunnel
            .0
            .send(interim(attempt.stream, "100", &[("x-gw-accepted", "1")]));
    }
    let (body, trailers) = body(tunnel, attempt);
    let echoed = [&body[..], trailers.as_bytes()].concat();
    tunnel.0.send(answered(attempt, body.len(), &echoed));
    true
}

/// The final response, after interim ones.
fn outcome(caller: &mut Caller, method: &Method) -> Response {
    loop {
        let head = caller.response_head(method).unwrap();
        if !head.status.is_informational() {
            return caller.rest(head).unwrap();
        }
    }
}

/// Requests, as line, fields with body, and what the answering agent sees of the body.
fn requests() -> Vec<(&'static str, String, Vec<u8>)> {
    let empty = |line| (line, "\r\n".to_owned(), Vec::new());
    let sized = |line, body: &str| {
        let rest = format!("Content-Length: {}\r\n\r\n{body}", body.len());
        (line, rest, body.as_bytes().to_vec())
    };
    let chunked = "Transfer-Encoding: chunked\r\nTrailer: x-check\r\n\r\n\
                   5\r\nhello\r\n0\r\nx-check: 7\r\n\r\n";
    vec![
        empty("GET /"),
        empty("HEAD /"),
        empty("OPTIONS /"),
        empty("DELETE /"),
        sized("POST /", "hello"),
        sized("GET /", "hello"),
        sized("POST /", &"x".repeat(60_000)),
        (
            "POST /",
            chunked.to_owned(),
            b"hellox-check: 7\r\n\r\n".to_vec(),
        ),
        sized("POST /", &"0123456789abcdef".repeat(16 * 1024)),
    ]
}

fn is_safe(line: &str, body: &[u8]) -> bool {
    body.is_empty() && !line.starts_with("POST") && !line.starts_with("DELETE")
}

/// As [`each_request_of`], of a new service.
fn each_request(failing: Failing, is_repeated: impl Fn(&str, &[u8]) -> bool, status: u16) {
    let scene = Scene::service().enrolled(&["one", "two"]).start();
    each_request_of(&scene, failing, is_repeated, status);
}

/// Sends each request to two agents of which the first one to be tried fails. `is_repeated` tells
/// for each request whether it is sent again.
fn each_request_of(
    scene: &Scene,
    failing: Failing,
    is_repeated: impl Fn(&str, &[u8]) -> bool,
    status: u16,
) {
    for (line, rest, wanted) in requests() {
        if line.starts_with("HEAD") && matches!(failing, Failing::BrokenResponse) {
            // There is nothing to break off.
            continue;
        }
        // New tunnels have no history.
        let scripted = Scripted::of(scene, &["one", "two"], fail_first(failing));
        let mut caller = scene.connect();
        // Fails if the gateway answers before it has the whole request.
        let _ = caller.try_send(scene.request(line, &rest));
        let method = Method::from_bytes(line.split(' ').next().unwrap().as_bytes()).unwrap();
        let response = outcome(&mut caller, &method);
        let got = response.status.as_u16();
        let attempts = scripted.attempts();
        if is_repeated(line, &wanted) {
            let text = String::from_utf8_lossy(&response.body);
            assert_eq!(got, 200, "{failing:?} {line}: {attempts:?} {text}");
            assert!(
                method == Method::HEAD || response.body == wanted,
                "{failing:?} {line}"
            );
            assert_eq!(attempts.len(), 2, "{failing:?} {line}");
            assert_ne!(attempts[0].agent, attempts[1].agent);
        } else {
            assert_eq!((got, attempts.len()), (status, 1), "{failing:?} {line}");
        }
        scene.wait_until_idle();
    }
}

#[test]
fn what_was_never_sent_goes_to_another_agent_whatever_the_method() {
    for code in [
        "GW_BACKEND_UNREACHABLE",
        "GW_BACKEND_TLS",
        "GW_AGENT_CONCURRENCY_LIMIT",
        "GW_BACKEND_RESET",
    ] {
        each_request(Failing::Unsent(code), |_, _| true, 0);
    }
}

#[test]
fn what_may_have_been_sent_goes_to_another_agent_only_if_it_is_safe_and_has_no_body() {
    for failing in [
        Failing::Refused("GW_BACKEND_UNREACHABLE"),
        Failing::Refused("GW_BACKEND_TLS"),
        Failing::Refused("GW_BACKEND_RESET"),
        Failing::Reset,
        Failing::Violation,
        Failing::BrokenResponse,
        Failing::Closed,
    ] {
        each_request(failing, is_safe, 502);
    }
}

#[test]
fn a_service_without_retries_sends_again_only_what_was_never_sent() {
    let without_retries = || {
        let scene = Scene::service().enrolled(&["one", "two"]).start();
        scene.set_retries(false);
        scene
    };
    for failing in [
        Failing::Refused("GW_BACKEND_UNREACHABLE"),
        Failing::Reset,
        Failing::BrokenResponse,
        Failing::Closed,
    ] {
        each_request_of(&without_retries(), failing, |_, _| false, 502);
    }
    let unsent = Failing::Unsent("GW_BACKEND_UNREACHABLE");
    each_request_of(&without_retries(), unsent, |_, _| true, 0);
}

#[test]
fn the_setting_retries_applies_to_the_next_request_on_open_tunnels() {
    let scene = Scene::service().enrolled(&["one", "two"]).start();
    let scripted = Scripted::of(&scene, &["one", "two"], fail_first(Failing::Reset));
    let mut caller = scene.connect();
    for (retries, status, attempts) in [(true, 200, 2), (false, 502, 1), (true, 200, 2)] {
        scene.set_retries(retries);
        assert_eq!(caller.ask(scene.get("/")).status, status);
        assert_eq!(scripted.attempts().len(), attempts);
    }
}

#[test]
fn nothing_is_sent_again_after_an_interim_response_was_passed_on() {
    each_request(Failing::BrokenAfterInterim, |_, _| false, 502);
    each_request(Failing::UnsentAfterInterim, |_, _| false, 502);
}

#[test]
fn one_agent_alone_gets_a_request_once() {
    let scene = Scene::service().enrolled(&["one"]).start();
    for failing in [Failing::Unsent("GW_BACKEND_UNREACHABLE"), Failing::Reset] {
        let scripted = Scripted::of(&scene, &["one"], fail_first(failing));
        let chunked = "Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n";
        for (line, rest) in [("GET /", "\r\n"), ("POST /", chunked)] {
            let response = scene.connect().ask(scene.request(line, rest));
            assert_eq!(response.status, 502, "{failing:?} {line}");
            let attempts = scripted.attempts();
            assert_eq!(attempts.len(), 1);
            let head = &attempts[0].head;
            assert!(!head.contains("x-gw-await-acceptance"), "{head}");
        }
    }
}

#[test]
fn a_request_goes_to_three_agents_at_most_and_ends_with_the_last_error() {
    let names = ["one", "two", "three", "four"];
    let scene = Scene::service().enrolled(&names).start();
    let scripted = Scripted::new();
    for (count, name) in names.into_iter().enumerate() {
        scripted.serve(count, scene.tunnel(name), |tunnel, attempt| {
            let codes = ["GW_BACKEND_TLS", "GW_BACKEND_TLS", "GW_BACKEND_UNREACHABLE"];
            let code = codes[attempt.nth.min(2)];
            tunnel.0.send(refused_unsent(attempt.stream, code));
            true
        });
        // The number of agents is that of the tunnels, up to three.
        let mut caller = scene.connect();
        let response = caller.ask(scene.request("POST /", "Content-Length: 2\r\n\r\nhi"));
        let attempts = scripted.attempts();
        let mut agents: Vec<usize> = attempts.iter().map(|attempt| attempt.agent).collect();
        agents.sort_unstable();
        agents.dedup();
        let expected = (count + 1).min(3);
        assert_eq!(
            (attempts.len(), agents.len()),
            (expected, expected),
            "{attempts:?}"
        );
        let code = if count >= 2 {
            "GW_BACKEND_UNREACHABLE"
        } else {
            "GW_BACKEND_TLS"
        };
        assert_eq!(response.code(), code);
    }
}

/// Reports statistics of an agent, and waits until the gateway has them.
fn report(tunnel: &mut Tunnel, slots: u32, backend: &str, standby: bool) {
    tunnel.0.send(statistics(slots, backend, standby));
    tunnel.until_handled();
}

/// Refuses a request of which nothing was sent to a backend.
fn refuse(tunnel: &mut Tunnel, attempt: &Attempt) -> bool {
    let refused = refused_unsent(attempt.stream, "GW_BACKEND_UNREACHABLE");
    tunnel.0.send(refused);
    true
}

#[test]
fn the_budget_bounds_attempts_until_an_agent_recovers() {
    const REQUESTS: usize = 600;
    let names = ["one", "two", "three"];
    let scene = Scene::service().enrolled(&names).start();
    let scripted = Scripted::new();
    let is_well = Arc::new(AtomicBool::new(false));
    for (number, name) in names.into_iter().enumerate() {
        let is_well = Arc::clone(&is_well);
        let mut tunnel = scene.tunnel(name);
        report(&mut tunnel, 128, "unhealthy", false);
        let was_well = AtomicBool::new(false);
        scripted.serve(number, tunnel, move |tunnel, attempt| {
            if number != 1 || !is_well.load(Ordering::SeqCst) {
                return refuse(tunnel, attempt);
            }
            if !was_well.swap(true, Ordering::SeqCst) {
                report(tunnel, 128, "healthy", false);
            }
            answer(tunnel, attempt)
        });
    }
    let mut caller = scene.connect();
    let started = Instant::now();
    let mut attempts = 0;
    for _ in 0..REQUESTS {
        assert_eq!(caller.ask(scene.get("/")).code(), "GW_BACKEND_UNREACHABLE");
        attempts += scripted.attempts().len();
    }
    let seconds = started.elapsed().as_secs() as usize + 1;
    let most = REQUESTS + REQUESTS / 5 + 100 + 10 * seconds;
    assert!(
        attempts > REQUESTS && attempts <= most,
        "{attempts} of {most}"
    );
    is_well.store(true, Ordering::SeqCst);
    // The first request that reaches it is answered, and each later one goes there.
    eventually("the agent is found", || {
        (caller.ask(scene.get("/")).status == 200).then_some(())
    });
    scripted.attempts();
    for _ in 0..20 {
        assert_eq!(caller.ask(scene.get("/")).status, 200);
    }
    assert!(scripted.attempts().iter().all(|attempt| attempt.agent == 1));
}

/// A new connection, on which a GET was sent.
fn begin(scene: &Scene, target: &str) -> Caller {
    let mut caller = scene.connect();
    caller.send(scene.get(target));
    caller
}

#[test]
fn a_standby_gets_requests_that_no_other_agent_can_take() {
    let scene = Scene::service().enrolled(&["one", "spare"]).start();
    let scripted = Scripted::new();
    for (number, name) in ["one", "spare"].into_iter().enumerate() {
        let mut tunnel = scene.tunnel(name);
        report(&mut tunnel, 1, "healthy", number == 1);
        scripted.serve(number, tunnel, move |tunnel, attempt| {
            match attempt.head.split(' ').nth(1) {
                Some("/refused") if number == 0 => refuse(tunnel, attempt),
                // Never answered.
                Some("/held") => true,
                _ => answer(tunnel, attempt),
            }
        });
    }
    let status = |target| begin(&scene, target).response().status;
    for _ in 0..20 {
        assert_eq!(status("/"), 200);
        assert_eq!(scripted.next().agent, 0);
    }
    assert_eq!(status("/refused"), 200);
    assert_eq!([scripted.next().agent, scripted.next().agent], [0, 1]);
    let held = begin(&scene, "/held");
    assert_eq!(scripted.next().agent, 0);
    assert_eq!(status("/"), 200, "the agent has no free slot");
    assert_eq!(scripted.next().agent, 1);
    let also_held = begin(&scene, "/held");
    assert_eq!(scripted.next().agent, 1);
    let refused = begin(&scene, "/").response();
    assert_eq!(refused.code(), "GW_AGENT_CONCURRENCY_LIMIT", "all are full");
    drop((held, also_held));
}

#[test]
fn an_older_tunnel_of_an_agent_is_a_reserve() {
    let scene = Scene::service().enrolled(&["one"]).start();
    let scripted = Scripted::new();
    let act = |tunnel: &mut Tunnel, attempt: &Attempt| {
        match attempt.head.split(' ').nth(1) {
            // Never answered.
            Some("/held") => {}
            Some("/end") => tunnel.close(),
            Some("/drain") => {
                tunnel.0.send(message(r#"{"type":"drain"}"#));
                tunnel.until_handled();
                tunnel.0.send(ok(attempt.stream, b"drains"));
            }
            _ => return answer(tunnel, attempt),
        }
        true
    };
    let status = |target| begin(&scene, target).response().status;
    for number in 0..3 {
        scripted.serve(number, scene.tunnel("one"), act);
        assert_eq!(status("/"), 200);
        assert_eq!(scripted.next().agent, number, "the newest serves");
        assert_eq!(scene.tunnels().len(), 1);
    }
    assert_eq!(begin(&scene, "/end").response().code(), "GW_RELAY_ERROR");
    assert_eq!(scripted.next().agent, 2);
    let watch = Stopwatch::start();
    assert_eq!(status("/"), 200);
    assert_eq!(scripted.next().agent, 1, "the one before");
    // A request keeps the tunnel open while its agent stops.
    let long = begin(&scene, "/held");
    assert_eq!(scripted.next().agent, 1);
    assert_eq!(status("/drain"), 200);
    assert_eq!(scripted.next().agent, 1);
    assert_eq!(status("/"), 200);
    assert_eq!(
        scripted.next().agent,
        0,
        "the oldest, although the one before has a request"
    );
    watch.assert_within(Duration::from_secs(4), "the use of older tunnels");
    drop(long);
}
