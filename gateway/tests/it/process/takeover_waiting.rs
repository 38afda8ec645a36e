//! Requests that wait for the agent of their service while another process takes over.

use std::time::{Duration, Instant};

use http::Method;

use crate::support::eventually;
use crate::support::peers::held_backend::HeldBackend;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process;
use crate::support::processes::process::{Running, Served};
use crate::support::processes::successor::{Successor, replace};
use crate::support::waiting_requests::{Loss, WaitingRequests, until_quick};

/// A replaced process closes connections that are idle for five seconds. An attempt that takes
/// nearly as long shows nothing.
const IDLE: Duration = Duration::from_secs(4);

/// Whether the process that serves has this number of tunnels.
fn has_tunnels(served: &Served, count: u64) -> bool {
    served.metrics().count("gw_tunnels") == count
}

/// Ends the agent, and takes over from the gateway. Calls `between` before, and returns its result
/// with the successor. `None` if the machine was too busy.
fn take_over<T>(
    served: &Served,
    agent: Running,
    between: impl FnOnce(&Loss) -> Option<T>,
) -> Option<(Loss, T, Successor)> {
    let loss = Loss::of(agent);
    loss.wait_for("the tunnel has ended", || has_tunnels(served, 0))?;
    let result = between(&loss)?;
    let successor = replace(served.process.id(), &served.log);
    Some((loss, result, successor))
}

#[test]
fn requests_that_wait_for_their_agent_move_to_the_successor() {
    until_quick(|| {
        let prepared = Prepared::new();
        let backend = HeldBackend::start();
        let (served, agent) = prepared.start(&backend.url);
        let _port = process::hold(served.address);
        let before = backend.requests();
        let connect = || prepared.connect(served.address);
        let (loss, waiting, _successor) = take_over(&served, agent, |loss| {
            let waiting = WaitingRequests::send(connect, prepared.service_key());
            loss.wait_for("the requests wait", || {
                let charged = served.metrics().sum("gw_relay_memory_bytes");
                charged >= WaitingRequests::MEMORY as f64
            })?;
            Some(waiting)
        })?;
        // A new request waits, too: the successor knows that the agent was there a moment ago.
        let new = WaitingRequests::send(connect, prepared.service_key());
        let _agent = prepared.run_agent(served.address.port(), &backend.url);
        eventually("the agent is back", || {
            has_tunnels(&served, 1).then_some(())
        });
        let is_late = loss.is_long_ago();
        waiting.are_answered(is_late)?;
        new.are_answered(is_late)?;
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
        assert_eq!(kept.ask(prepared.get("/")).status, 200);
        let before = backend.requests();
        let began = Instant::now();
        let (_, (), _successor) = take_over(&served, agent, |_| Some(()))?;
        let _agent = prepared.run_agent(served.address.port(), &backend.url);
        prepared.wait_for_tunnel(served.address);
        // The predecessor never had a tunnel of this agent process.
        let length = "Content-Length: 100000\r\n\r\n";
        let request = prepared
            .get("/")
            .replace("GET", "POST")
            .replace("\r\n\r\n", &format!("\r\n{length}{}", "a".repeat(100_000)));
        let sent = kept.try_send(request);
        let response = match sent.and_then(|()| kept.try_response(&Method::POST)) {
            Err(_) if began.elapsed() > IDLE => return None,
            response => response.unwrap(),
        };
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
