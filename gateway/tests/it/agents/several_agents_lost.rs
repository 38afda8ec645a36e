//! Agents of one service that become silent, or end, with requests in flight.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use gw_control_plane::control::Actor;
use gw_control_plane::control::records::agent;
use gw_shared::tunnel::frame::StreamId;
use http::Method;

use crate::support::agents::modified_agent::Tunnel;
use crate::support::agents::several::{Scripted, Several, answered, body, statistics};
use crate::support::agents::tunnel_frames::{ok, ping, uploaded};
use crate::support::eventually;
use crate::support::peers::caller::Caller;
use crate::support::peers::held_backend::HeldBackend;
use crate::support::peers::http2_caller;
use crate::support::peers::http2_caller::on_a_reactor;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process;
use crate::support::processes::successor::admin;

/// GETs that the first of two agents holds when it becomes silent, with their streams.
fn held_by_one(
    several: &Several,
    one: &mut Tunnel,
    two: &mut Tunnel,
    count: usize,
) -> Vec<(Caller, StreamId)> {
    two.0.send(statistics(1000, "unhealthy", false));
    two.until_handled();
    let mut callers = Vec::new();
    for _ in 0..count {
        let mut caller = several.connect();
        caller.send(several.get());
        callers.push((caller, one.request()));
    }
    two.0.send(statistics(1000, "healthy", false));
    two.until_handled();
    callers
}

#[test]
fn requests_leave_a_silent_agent_and_new_ones_go_elsewhere() {
    let several = Several::start(&["one", "two"]);
    let mut one = several.tunnel("one");
    let mut two = several.tunnel("two");
    let mut callers = held_by_one(&several, &mut one, &mut two, 10);
    let mut post = several.connect();
    two.0.send(statistics(1000, "unhealthy", false));
    two.until_handled();
    post.send(several.request("POST /", "Content-Length: 1\r\n\r\na"));
    let of_post = one.request();
    two.0.send(statistics(1000, "healthy", false));
    two.until_handled();
    // From now on `one` neither reads nor answers.
    let silent_since = Instant::now();
    let scripted = Scripted::new();
    scripted.serve(1, two, |tunnel, attempt| {
        tunnel.0.send(ok(attempt.stream, b"two"));
        true
    });
    for (caller, _) in &mut callers {
        assert_eq!(caller.response().body, b"two");
    }
    assert!(
        silent_since.elapsed() < Duration::from_secs(10),
        "{:?}",
        silent_since.elapsed()
    );
    for _ in 0..20 {
        let mut caller = several.connect();
        caller.send(several.get());
        assert_eq!(caller.response().body, b"two");
    }
    // The agent answers again: what cannot be sent twice has stayed with it.
    one.0.send(ping());
    one.0
        .send([uploaded(of_post, 1), ok(of_post, b"one")].concat());
    assert_eq!(post.response().body, b"one");
    thread::spawn(move || while one.next().is_ok() {});
    several.wait_until_idle();
}

#[test]
fn requests_stay_with_a_silent_agent_if_the_service_has_no_retries() {
    let several = Several::start(&["one", "two"]);
    several.set_retries(false);
    let mut one = several.tunnel("one");
    let mut two = several.tunnel("two");
    let callers = held_by_one(&several, &mut one, &mut two, 3);
    let scripted = Scripted::new();
    scripted.serve(1, two, |tunnel, attempt| {
        tunnel.0.send(ok(attempt.stream, b"two"));
        true
    });
    // Longer than requests with retries take to leave.
    eventually("the agent is silent", || {
        several
            .tunnels()
            .iter()
            .any(|tunnel| tunnel.state == "suspect" && tunnel.state_seconds >= 2)
            .then_some(())
    });
    assert_eq!(scripted.attempts().len(), 0);
    let mut new = several.connect();
    new.send(several.get());
    assert_eq!(new.response().body, b"two");
    for (mut caller, stream) in callers {
        one.0.send(ok(stream, b"one"));
        assert_eq!(caller.response().body, b"one");
    }
    several.wait_until_idle();
}

#[test]
fn a_killed_agent_costs_no_get() {
    let prepared = Prepared::with_agents(&["one", "two"]);
    let served = prepared.serve_with(&prepared.config());
    let backend = HeldBackend::start();
    let one = prepared.run_agent_of("one", served.address.port(), &backend.url);
    let _two = prepared.run_agent_of("two", served.address.port(), &backend.url);
    eventually("both agents have a tunnel", || {
        let (_, metrics) = admin(served.admin_address, "/metrics");
        metrics
            .lines()
            .any(|line| line == "gw_tunnels 2")
            .then_some(())
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
    let several = Several::start(&["one"]);
    let mut first = several.tunnel("one");
    let mut in_flight = several.connect();
    in_flight.send(several.request("POST /", "Content-Length: 1\r\n\r\na"));
    first.request();
    first.close();
    assert_eq!(in_flight.response().status, 502);
    let mut later: Vec<_> = (0..40)
        .map(|_| {
            let mut caller = several.connect();
            caller.send(several.request("POST /", "Content-Length: 1\r\n\r\na"));
            caller
        })
        .collect();
    let scripted = Scripted::new();
    scripted.serve(0, several.tunnel("one"), |tunnel, attempt| {
        let (body, _) = body(tunnel, attempt);
        tunnel.0.send(answered(attempt, body.len(), &body));
        true
    });
    for caller in &mut later {
        let response = caller.response();
        assert_eq!(
            (response.status.as_u16(), &response.body[..]),
            (200, &b"a"[..])
        );
    }
    assert_eq!(scripted.attempts().len(), 40);
    several.wait_until_idle();
}

#[test]
fn a_bounded_number_of_requests_waits_for_the_next_tunnel() {
    const WAITING: usize = 1024;
    const CONNECTIONS: usize = 11;
    /// Requests on each connection.
    const REQUESTS: usize = 100;
    let several = Several::start(&["one"]);
    let first = several.tunnel("one");
    let scripted = Scripted::new();
    on_a_reactor(async {
        let mut connections = Vec::new();
        for _ in 0..CONNECTIONS {
            connections.push(
                http2_caller::connect_to(&several.about(), &h2::client::Builder::new()).await,
            );
        }
        first.close();
        eventually("the tunnel is gone", || {
            several.tunnels().is_empty().then_some(())
        });
        let mut responses = FuturesUnordered::new();
        for connection in &connections {
            for _ in 0..REQUESTS {
                let (response, _) = connection
                    .begin(connection.request(&Method::GET, "/"), true)
                    .await;
                responses.push(http2_caller::whole(response));
            }
        }
        for _ in WAITING..CONNECTIONS * REQUESTS {
            let refused = responses.next().await.unwrap();
            assert_eq!(
                (refused.status.as_u16(), refused.header("x-gw-status")),
                (504, "AgentUnavailable")
            );
        }
        // Those that wait are served, so the others were not refused because their time was over.
        assert_eq!(several.left_to_owner(), WAITING);
        scripted.serve(0, several.tunnel("one"), |tunnel, attempt| {
            tunnel.0.send(ok(attempt.stream, b"one"));
            true
        });
        while let Some(response) = responses.next().await {
            assert_eq!(
                response.status,
                200,
                "{}",
                String::from_utf8_lossy(&response.body)
            );
        }
    });
    assert_eq!(scripted.attempts().len(), WAITING);
    several.wait_until_idle();
}

#[test]
fn requests_do_not_wait_for_an_agent_that_was_revoked() {
    let several = Several::start(&["one"]);
    let mut tunnel = several.tunnel("one");
    let agent = several.tunnels()[0].agent_id.clone();
    let control = several.gateway.control();
    agent::revoke(control, &Actor::Admin, "demo", &agent).unwrap();
    assert!(tunnel.is_cut());
    eventually("the tunnel is gone", || {
        several.tunnels().is_empty().then_some(())
    });
    let started = Instant::now();
    let mut caller = several.connect();
    caller.send(several.get());
    assert_eq!(caller.response().code(), "AGENT_UNAVAILABLE");
    assert!(
        started.elapsed() < Duration::from_secs(4),
        "{:?}",
        started.elapsed()
    );
}
