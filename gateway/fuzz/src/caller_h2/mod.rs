//! A caller's connection of HTTP/2. Between its bytes and the frames of the tunnel, all code is
//! that of the gateway: codec, frame meter, route, authentication, relay, tunnel. Only sockets, TLS
//! and the listener are missing. Caller and agent are in memory.

mod reactor;
mod steps;

use gw_bed::agent::Agent;
use gw_bed::memory::CheckedCaller;
use gw_data_plane::support::memory_worker::MemoryWorker;
use gw_shared::runtime;

use self::steps::Step;

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
    let agent = Agent::default();
    let started = MemoryWorker::start(1, agent.gateway_end()).await;
    let gateway = started.expect("a worker with a tunnel");
    let mut caller = CheckedCaller::default();
    let served = gateway.serve_http2(caller.connection.clone());
    served.expect("a free place");
    let lines = data.split(|byte| *byte == b'\n');
    for step in lines.filter_map(Step::parse).take(STEPS_MAX) {
        step.take(&mut caller, &agent, &gateway);
        turn().await;
        caller.check(agent.sent());
        assert!(gateway.relay_bytes() <= gateway.relay_limit());
    }

    caller.connection.reset();
    until(|| gateway.connections() == 0, "the connection ends").await;
    until(|| agent.requests() == 0, "every request ends").await;
    agent.lose();
    until(|| gateway.has_lost_its_tunnel(), "the tunnel ends").await;
    assert_eq!(gateway.relay_bytes(), 0);
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
