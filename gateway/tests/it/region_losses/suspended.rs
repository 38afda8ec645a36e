//! Nodes with `isolation = "refuse"` that reached neither PostgreSQL nor all other owners for too
//! long.

use super::{OK, wait_until_dead, wait_until_left};
use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::peers::gate::Passage;
use crate::support::processes::process::Running;
use crate::support::processes::region::Region;

const REFUSE: &str = "isolation = \"refuse\"\nmax_staleness_seconds = 10\n";

fn wait_until_suspended(region: &Region, node: usize) {
    eventually("the node is suspended", || {
        (region.status(node)["standing"] == "suspended").then_some(())
    });
}

/// Starts an agent that is connected to the owner itself. Each connection goes to another node.
fn run_agent_at_owner(region: &Region) -> (Running, usize) {
    loop {
        let spliced = || {
            let counts = [0, 1].map(|node| region.metric(node, "gw_tunnels_spliced_total"));
            counts.iter().sum::<f64>()
        };
        let before = spliced();
        let agent = region.run_agent(&backend::answering(OK));
        let owner = region.owner();
        if spliced() <= before {
            return (agent, owner);
        }
        drop(agent);
        wait_until_left(region, owner);
    }
}

#[test]
fn agents_leave_a_suspended_node_and_are_served_by_the_next_owner() {
    let Some(region) = Region::start_with(2, true, REFUSE) else {
        return;
    };
    let (_agent, owner) = run_agent_at_owner(&region);
    let other = 1 - owner;
    for gate in [
        &region.engine_gates[owner],
        &region.peer_gates[0],
        &region.peer_gates[1],
    ] {
        gate.set(Passage::Stalled);
    }
    wait_until_dead(&region, owner, other);
    eventually("the next owner has the tunnel", || {
        (region.metric(other, "gw_tunnels") >= 1.0).then_some(())
    });
    assert_eq!(region.status(owner)["standing"], "suspended");
    wait_until_left(&region, owner);
    assert_eq!(region.request(other), "200");
    let metrics = region.metrics(owner);
    assert_eq!(metrics.count_with("gw_tunnels_ended_total", "moved"), 1);
}

#[test]
fn a_suspended_owner_answers_other_nodes_that_it_is_unavailable_and_gets_its_agents_back() {
    let Some(mut region) = Region::start_with(3, false, REFUSE) else {
        return;
    };
    let _agent = region.run_agent(&backend::answering(OK));
    let owner = region.owner();
    let other = (owner + 1) % 3;
    let third = (owner + 2) % 3;
    assert_eq!(region.request(other), "200");
    region.postgres.stop();
    // An owner that is not heard any more.
    region.kill(third);
    wait_until_suspended(&region, owner);
    let answers = [other, owner].map(|node| region.request(node));
    assert_eq!(answers, ["503 GW_NODE_UNAVAILABLE"; 2]);
    wait_until_left(&region, owner);
    region.postgres.resume();
    region.wait_for_members(2);
    // Within ten seconds: the refusals did not make the agent wait for longer.
    eventually("the agent is back", || {
        (region.request(other) == "200").then_some(())
    });
}
