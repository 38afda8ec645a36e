//! A region whose nodes fail, stop or lose contact.

// Once, slow:
mod partitions;
mod suspended;
mod two_primaries;

// On each driver, slow:
mod failover;
mod freezes;
mod isolation;
pub(crate) mod load;
mod lost_nodes;

use std::fs;

use serde_json::Value;

use crate::support::eventually;
use crate::support::processes::process::Running;
use crate::support::processes::region::Region;

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// Waits until the node `at` shows that `node` was declared dead.
pub(crate) fn wait_until_dead(region: &Region, node: usize, at: usize) {
    let kept = fs::read(region.data(node).join("node.json")).unwrap();
    let slot = serde_json::from_slice::<Value>(&kept).unwrap()["slot"].take();
    eventually("the node is declared dead", || {
        let status = region.status(at);
        let mut nodes = status["nodes"].as_array()?.iter();
        let is_dead = |row: &Value| row["slot"] == slot && row["state"] == "dead";
        nodes.any(is_dead).then_some(())
    });
}

/// Waits until a node has no tunnels.
fn wait_until_left(region: &Region, node: usize) {
    eventually("the tunnels have ended", || {
        (region.metric(node, "gw_tunnels") == 0.0).then_some(())
    });
}

/// Ends the agent, and starts it with a connection through `node`. The owner of its service stays
/// the same.
fn connected_through(region: &Region, node: usize, agent: Running, backend: &str) -> Running {
    let owner = region.owner();
    drop(agent);
    wait_until_left(region, owner);
    region.balance_to(&[node]);
    let agent = region.run_agent(backend);
    assert_eq!(region.owner(), owner);
    agent
}
