//! Requests that wait for the agent of their service while another process takes over.

use std::time::{Duration, Instant};

use crate::support::eventually;
use crate::support::peers::held_backend::HeldBackend;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process;
use crate::support::processes::process::{Running, Served};
use crate::support::processes::successor::{Successor, admin, replace};
use crate::support::waiting_requests::WaitingRequests;

/// A request that waits is refused after five seconds. A takeover that takes nearly as long shows nothing.
const SHORT: Duration = Duration::from_secs(4);

/// Takes over from a gateway whose agent was killed a moment ago. Calls `between` before, and returns its result with the
/// successor. `None` if the machine was too busy.
fn take_over<T>(
    served: &Served,
    agent: Running,
    between: impl FnOnce() -> T,
) -> Option<(T, Successor)> {
    drop(agent);
    let lost = Instant::now();
    eventually("the tunnel has ended", || {
        let (_, metrics) = admin(served.admin_address, "/metrics");
        metrics
            .lines()
            .any(|line| line == "gw_tunnels 0")
            .then_some(())
    });
    let result = between();
    let successor = replace(served.process.id(), &served.log);
    (lost.elapsed() < SHORT).then_some((result, successor))
}

/// Repeats an attempt that a busy machine can spoil.
fn until_quick(mut attempt: impl FnMut() -> Option<()>) {
    while attempt().is_none() {}
}

#[test]
fn requests_that_wait_for_their_agent_move_to_the_successor() {
    until_quick(|| {
        let prepared = Prepared::new();
        let backend = HeldBackend::start();
        let (served, agent) = prepared.start(&backend.url);
        let _port = process::hold(served.address);
        let before = backend.requests();
        let (waiting, _successor) = take_over(&served, agent, || {
            let connect = || prepared.connect(served.address);
            let waiting = WaitingRequests::send(connect, prepared.service_key());
            eventually("the requests wait", || {
                let charged = served.metric("gw_relay_memory_bytes", "");
                (charged >= WaitingRequests::MEMORY).then_some(())
            });
            waiting
        })?;
        // A new request waits, too: the successor knows that the agent was there a moment ago.
        let connect = || prepared.connect(served.address);
        let new = WaitingRequests::send(connect, prepared.service_key());
        let _agent = prepared.run_agent(served.address.port(), &backend.url);
        waiting.are_answered();
        new.are_answered();
        assert_eq!(backend.requests() - before, 2 * WaitingRequests::COUNT);
        Some(())
    });
}

#[test]
fn kept_connections_are_served_by_an_agent_of_the_successor() {
    until_quick(|| {
        let prepared = Prepared::new();
        let backend = HeldBackend::start();
        let (served, agent) = prepared.start(&backend.url);
        let _port = process::hold(served.address);
        let mut kept = prepared.connect(served.address);
        kept.send(prepared.get("/"));
        assert_eq!(kept.response().status, 200);
        let before = backend.requests();
        let ((), _successor) = take_over(&served, agent, || ())?;
        let _agent = prepared.run_agent(served.address.port(), &backend.url);
        prepared.wait_for_tunnel(served.address);
        // The predecessor never had a tunnel of this agent process.
        let length = "Content-Length: 100000\r\n\r\n";
        kept.send(
            prepared
                .get("/")
                .replace("GET", "POST")
                .replace("\r\n\r\n", &format!("\r\n{length}{}", "a".repeat(100_000))),
        );
        let response = kept.response();
        assert_eq!(
            (
                response.status.as_u16(),
                String::from_utf8_lossy(&response.body).as_ref(),
                response.header("connection")
            ),
            (200, "00100000", "close")
        );
        assert!(backend.requests() > before);
        Some(())
    });
}
