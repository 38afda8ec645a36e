//! Agents of one service that become silent, or end, with requests in flight.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use gw_shared::tunnel::frame::StreamId;
use http::Method;

use crate::support::agents::modified_agent::Tunnel;
use crate::support::agents::scripted::{Attempt, Scripted, answered, body, statistics};
use crate::support::agents::tunnel_frames::{ok, ping, uploaded};
use crate::support::eventually;
use crate::support::limits::{FIRST_TUNNEL_BACK, WAITING_REQUESTS};
use crate::support::peers::caller::{Caller, HOST, use_once};
use crate::support::peers::held_backend::HeldBackend;
use crate::support::peers::http1_peer::{Peer, Response};
use crate::support::peers::http2_caller;
use crate::support::peers::http2_caller::on_a_reactor;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process;
use crate::support::scene::Scene;
use crate::support::stopwatch::{Stopwatch, in_time, within};

/// Requests that the first of two agents holds when it becomes silent, with their streams.
fn held_by_one(
    scene: &Scene,
    one: &mut Tunnel,
    two: &mut Tunnel,
    request: &str,
    count: usize,
) -> Vec<(Caller, StreamId)> {
    report(two, "unhealthy");
    let mut callers = Vec::new();
    for _ in 0..count {
        let mut caller = scene.connect();
        caller.send(request);
        callers.push((caller, one.request()));
    }
    report(two, "healthy");
    callers
}

/// Reports this state of the backend.
fn report(tunnel: &mut Tunnel, backend: &str) {
    tunnel.0.send(statistics(1000, backend, false));
    tunnel.until_handled();
}

/// Answers all requests of a tunnel with `two`.
fn answer_two(tunnel: &mut Tunnel, attempt: &Attempt) -> bool {
    tunnel.0.send(ok(attempt.stream, b"two"));
    true
}

#[test]
fn requests_leave_a_silent_agent_and_new_ones_go_elsewhere() {
    let scene = Scene::service().enrolled(&["one", "two"]).start();
    let mut one = scene.tunnel("one");
    let mut two = scene.tunnel("two");
    let mut callers = held_by_one(&scene, &mut one, &mut two, &scene.get("/"), 10);
    let post = scene.request("POST /", "Content-Length: 1\r\n\r\na");
    let (mut post, of_post) = held_by_one(&scene, &mut one, &mut two, &post, 1).remove(0);
    // From now on `one` neither reads nor answers.
    let silent = Stopwatch::start();
    let scripted = Scripted::new();
    scripted.serve(1, two, answer_two);
    for (caller, _) in &mut callers {
        assert_eq!(caller.response().body, b"two");
    }
    silent.assert_within(Duration::from_secs(10), "the move of the requests");
    for _ in 0..20 {
        assert_eq!(scene.connect().ask(scene.get("/")).body, b"two");
    }
    // The agent answers again: the POST, which cannot be sent twice, has stayed with it.
    let answer = [ping(), uploaded(of_post, 1), ok(of_post, b"one")];
    one.0.send(answer.concat());
    assert_eq!(post.response().body, b"one");
    thread::spawn(move || while one.next().is_ok() {});
    scene.wait_until_idle();
}

#[test]
fn requests_stay_with_a_silent_agent_if_the_service_has_no_retries() {
    let scene = Scene::service().enrolled(&["one", "two"]).start();
    scene.set_retries(false);
    let mut one = scene.tunnel("one");
    let mut two = scene.tunnel("two");
    let callers = held_by_one(&scene, &mut one, &mut two, &scene.get("/"), 3);
    let scripted = Scripted::new();
    scripted.serve(1, two, answer_two);
    // Longer than requests with retries take to leave.
    eventually("the agent is silent", || {
        let mut tunnels = scene.tunnels().into_iter();
        tunnels.find(|tunnel| tunnel.state == "suspect" && tunnel.state_seconds >= 2)
    });
    assert_eq!(scripted.attempts().len(), 0);
    assert_eq!(scene.connect().ask(scene.get("/")).body, b"two");
    for (mut caller, stream) in callers {
        one.0.send(ok(stream, b"one"));
        assert_eq!(caller.response().body, b"one");
    }
    scene.wait_until_idle();
}

#[test]
fn a_killed_agent_costs_no_get() {
    let prepared = Prepared::with_agents(&["one", "two"]);
    let served = prepared.serve_with(&prepared.config());
    let backend = HeldBackend::start();
    let one = prepared.run_agent_of("one", served.address.port(), &backend.url);
    let _two = prepared.run_agent_of("two", served.address.port(), &backend.url);
    eventually("both agents have a tunnel", || {
        (served.metrics().count("gw_tunnels") == 2).then_some(())
    });
    let mut callers: Vec<_> = (0..24)
        .map(|_| {
            let mut caller = prepared.connect(served.address);
            caller.send(prepared.get("/held"));
            caller
        })
        .collect();
    callers.iter().for_each(|_| backend.wait_for_held());
    // The supervisor of the agent would start another worker.
    let workers = process::children(one.id());
    one.signal("STOP");
    for id in workers.into_iter().chain([one.id()]) {
        assert!(process::send_signal(id, "KILL"));
    }
    let (sender, answered) = mpsc::channel();
    thread::scope(|scope| {
        for caller in &mut callers {
            let sender = sender.clone();
            scope.spawn(move || sender.send(caller.response().status).unwrap());
        }
        // The backend holds those that were repeated, too.
        for _ in 0..24 {
            loop {
                backend.release();
                if let Ok(status) = answered.recv_timeout(Duration::from_millis(20)) {
                    assert_eq!(status, 200);
                    break;
                }
            }
        }
    });
}

#[test]
fn only_requests_in_flight_fail_when_the_only_tunnel_is_cut() {
    in_time("requests wait for the next tunnel", || {
        let scene = Scene::service().enrolled(&["one"]).start();
        let mut first = scene.tunnel("one");
        let mut in_flight = scene.connect();
        let post = scene.request("POST /", "Content-Length: 1\r\n\r\na");
        in_flight.send(&post);
        first.request();
        let connected = |_| {
            let mut caller = scene.connect();
            use_once(&mut caller, HOST, &scene.about.service_key);
            caller
        };
        let mut later: Vec<Caller> = (0..40).map(connected).collect();
        let lost = Instant::now();
        first.close();
        assert_eq!(in_flight.response().status, 502);
        later.iter_mut().for_each(|caller| caller.send(&post));
        let scripted = Scripted::new();
        scripted.serve(0, scene.tunnel("one"), |tunnel, attempt| {
            let (body, _) = body(tunnel, attempt);
            tunnel.0.send(answered(attempt, body.len(), &body));
            true
        });
        let responses: Vec<Response> = later.iter_mut().map(Peer::response).collect();
        if lost.elapsed() >= FIRST_TUNNEL_BACK {
            return None;
        }
        for response in responses {
            assert_eq!(
                (response.status.as_u16(), &*response.body),
                (200, &b"a"[..])
            );
        }
        assert_eq!(scripted.attempts().len(), 40);
        scene.wait_until_idle();
        Some(())
    });
}

#[test]
fn a_bounded_number_of_requests_waits_for_the_next_tunnel() {
    in_time("requests wait for the next tunnel", || {
        let scene = Scene::service().enrolled(&["one"]).start();
        let first = scene.tunnel("one");
        on_a_reactor(more_than_may_wait(&scene, &first))
    });
}

/// Ends the only tunnel, sends more requests than may wait, and opens another tunnel. `None` if the
/// time for which requests wait may have ended before the last response.
async fn more_than_may_wait(scene: &Scene, first: &Tunnel) -> Option<()> {
    const CONNECTIONS: usize = 11;
    /// Requests on each connection.
    const REQUESTS: usize = 100;
    let mut connections = Vec::new();
    for _ in 0..CONNECTIONS {
        connections.push(http2_caller::connect_to(&scene.about, &h2::client::Builder::new()).await);
    }
    let lost = Instant::now();
    first.close();
    scene.wait_for_tunnels(0);
    let mut responses = FuturesUnordered::new();
    for connection in &connections {
        for _ in 0..REQUESTS {
            let request = connection.request(&Method::GET, "/");
            let (response, _) = connection.begin(request, true).await;
            responses.push(http2_caller::whole(response));
        }
    }
    let mut refused = Vec::new();
    for _ in WAITING_REQUESTS..CONNECTIONS * REQUESTS {
        refused.push(responses.next().await.unwrap());
    }
    let waiting = scene.left_to_owner();
    let scripted = Scripted::new();
    scripted.serve(0, scene.tunnel("one"), |tunnel, attempt| {
        tunnel.0.send(ok(attempt.stream, b"one"));
        true
    });
    let served: Vec<_> = responses.collect().await;
    if lost.elapsed() >= FIRST_TUNNEL_BACK {
        return None;
    }
    for refused in refused {
        assert_eq!(
            (refused.status.as_u16(), refused.header("x-gw-status")),
            (504, "AgentUnavailable")
        );
    }
    assert_eq!(waiting, WAITING_REQUESTS as u64);
    for served in served {
        let text = String::from_utf8_lossy(&served.body);
        assert_eq!(served.status, 200, "{text}");
    }
    assert_eq!(scripted.attempts().len(), WAITING_REQUESTS);
    scene.wait_until_idle();
    Some(())
}

#[test]
fn requests_do_not_wait_for_an_agent_that_was_revoked() {
    let scene = Scene::service().enrolled(&["one"]).start();
    let mut tunnel = scene.tunnel("one");
    let agent = scene.tunnels()[0].agent_id.clone();
    scene.api().revoke_agent("demo", &agent);
    assert!(tunnel.is_cut());
    scene.wait_for_tunnels(0);
    within(Duration::from_secs(4), "the refusal", || {
        let refused = scene.connect().ask(scene.get("/"));
        assert_eq!(refused.code(), "AGENT_UNAVAILABLE");
    });
}
