//! A caller's connection of HTTP/2. Between its bytes and the frames of the tunnel, all code is
//! that of the gateway: codec, frame meter, route, authentication, relay, tunnel. Only sockets, TLS
//! and the listener are missing. Caller and agent are in memory.

mod agent;
mod caller;
mod frames;
mod reactor;
mod steps;

use std::rc::Rc;

use gw_shared::runtime;

use self::agent::Agent;
use self::caller::Caller;
use self::steps::Step;
use super::super::memory_worker::MemoryWorker;

/// Most steps of an input.
const STEPS_MAX: usize = 200;
/// Turns of the reactor within which everything ends after the end of the connection.
const LAST_TURNS: usize = 100;

/// A connection, as steps on separate lines: see [`Step::parse`]. Every request ends with the
/// connection, no memory stays charged, and what the gateway sends is valid: frames, windows, the
/// order of a response, and no byte of another response.
pub fn caller_h2(data: &[u8]) {
    reactor::run(data);
}

/// Takes the steps of one input on the reactor of this thread.
async fn connection(data: &[u8]) {
    let panics = runtime::contained_panics();
    let agent = Agent::new();
    let started = MemoryWorker::start(1, agent.gateway_end()).await;
    let gateway = started.expect("a worker with a tunnel");
    let caller = Caller::new();
    let served = gateway.serve_http2(caller.clone());
    served.expect("a free place");
    let lines = data.split(|byte| *byte == b'\n');
    for step in lines.filter_map(Step::parse).take(STEPS_MAX) {
        step.take(&caller, &agent, &gateway.worker.connections);
        turn().await;
        caller.assert_bounded(agent.sent());
        let memory = &gateway.worker.tunnels.relay_memory;
        assert!(memory.charged() <= memory.limit());
    }

    caller.reset();
    let connections = &gateway.worker.connections;
    until(|| connections.len() == 0, "the connection ends").await;
    until(|| agent.requests() == 0, "every request ends").await;
    agent.lose();
    let session = &gateway.session;
    let is_quiet = || session.open_streams() == 0 && Rc::strong_count(session) == 1;
    until(is_quiet, "the tunnel ends").await;
    assert_eq!(gateway.worker.tunnels.relay_memory.charged(), 0);
    assert_eq!(runtime::contained_panics(), panics, "a task panicked");
}

/// Lets the tasks run that can. Cheaper than a turn of the reactor.
async fn turn() {
    const POLLS: usize = 8;
    let mut polls = 0;
    std::future::poll_fn(|cx| {
        polls += 1;
        if polls > POLLS {
            return std::task::Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        std::task::Poll::Pending
    })
    .await;
}

async fn until(is_so: impl Fn() -> bool, expected: &str) {
    for _ in 0..LAST_TURNS {
        turn().await;
        if is_so() {
            return;
        }
        runtime::yield_now().await;
    }
    panic!("not in {LAST_TURNS} turns: {expected}");
}
