//! A region of several nodes.

// Once:
mod control;

// Once, slow:
mod commands;
mod console;
mod logs;
mod members;
mod moves;
mod refusals;
mod session_tickets;

// On each driver:
mod apex;
mod strangers;

// On each driver, slow:
mod requests;
mod tunnels;

use crate::support::processes::region::Region;

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// The node that owns the scene's service, and the other two of three nodes.
fn owner_and_others(region: &Region) -> [usize; 3] {
    let owner = region.owner();
    [owner, (owner + 1) % 3, (owner + 2) % 3]
}

/// Asserts that each of these nodes relays a request.
#[track_caller]
fn assert_served(region: &Region, nodes: impl IntoIterator<Item = usize>) {
    for node in nodes {
        assert_eq!(region.request(node), "200", "at node {node}");
    }
}

/// Waits until a node that leaves the region has ended.
#[track_caller]
fn await_end(region: &mut Region, node: usize) {
    let mut left = region.nodes[node].take().unwrap();
    assert_eq!(left.process.exit_code(), Some(0));
}

/// Has a node leave the region, and waits until it has ended.
#[track_caller]
fn stop(region: &mut Region, node: usize) {
    region.node(node).process.signal("TERM");
    await_end(region, node);
}
