//! A region whose nodes cannot reach PostgreSQL or each other.

use super::{OK, wait_until_dead};
use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::peers::gate::{Gate, Passage};
use crate::support::processes::process::Running;
use crate::support::processes::region::Region;

fn with_agent() -> Option<(Region, Running, [usize; 3])> {
    let region = Region::start_gated(3)?;
    let agent = region.run_agent(&backend::answering(OK));
    let owner = region.owner();
    Some((region, agent, [owner, (owner + 1) % 3, (owner + 2) % 3]))
}

fn set(gates: &[Gate], passage: Passage) {
    gates.iter().for_each(|gate| gate.set(passage));
}

/// Waits until requests at all nodes are relayed.
fn wait_until_relayed(region: &Region) {
    eventually("all nodes relay", || {
        (0..3)
            .all(|node| region.request(node) == "200")
            .then_some(())
    });
}

#[test]
fn an_owner_without_postgresql_is_replaced_and_comes_back() {
    let Some((region, _agent, [owner, other, _])) = with_agent() else {
        return;
    };
    region.engine_gates[owner].set(Passage::Stalled);
    wait_until_dead(&region, owner, other);
    // Its peers tell the node, so it forwards requests to the new owner.
    wait_until_relayed(&region);
    region.engine_gates[owner].set(Passage::Open);
    region.wait_for_members(3);
    region.await_owner(owner);
    wait_until_relayed(&region);
}

#[test]
fn nodes_that_do_not_reach_each_other_stay_members_and_answer() {
    let Some((region, _agent, [owner, other, third])) = with_agent() else {
        return;
    };
    assert_eq!([other, third].map(|node| region.request(node)), ["200"; 2]);
    let before = region.status(owner)["epoch"].clone();
    set(&region.peer_gates, Passage::Stalled);
    // Links notice that they are dead after a while; until then requests of the other nodes'
    // callers wait.
    let refused = region.request(other);
    let mut reasons = ["503 GW_NODE_UNAVAILABLE", "502 "].iter();
    assert!(reasons.any(|it| refused.starts_with(it)), "{refused}");
    let epoch = &region.status(owner)["epoch"];
    assert_eq!(*epoch, before, "all nodes reach PostgreSQL");
    set(&region.peer_gates, Passage::Open);
    wait_until_relayed(&region);
}
