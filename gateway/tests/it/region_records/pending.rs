//! Changes while a node of the region is dead, and may still serve.

use super::region_command;
use crate::region_losses::wait_until_dead;
use crate::support::eventually;
use crate::support::peers::gate::Passage;
use crate::support::processes::region::Region;

const SERVICE: &str = "/accounts/demo/services/echo";

/// Cuts node 0 from PostgreSQL and from node 1, or heals the cut.
fn set(region: &Region, passage: Passage) {
    for gate in [
        &region.engine_gates[0],
        &region.peer_gates[0],
        &region.peer_gates[1],
    ] {
        gate.set(passage);
    }
}

/// Makes a change at node 1. Returns the nodes that are named as pending.
fn change(region: &Region) -> String {
    let body = serde_json::json!({ "burst": 1000 });
    let reply = region.api(1).ask("PATCH", SERVICE, &body);
    assert_eq!(reply.status, 200);
    reply.pending_nodes
}

/// Slot of node 0.
fn slot(region: &Region) -> String {
    region.status(0)["node"].to_string()
}

fn wait_until_none_is_named(region: &Region) {
    eventually("the node is not named any more", || {
        change(region).is_empty().then_some(())
    });
}

#[test]
fn a_dead_node_is_named_by_every_change_until_it_is_back_or_removed() {
    let Some(mut region) = Region::start_gated(2) else {
        return;
    };
    let slot = slot(&region);
    assert_eq!(change(&region), "");
    set(&region, Passage::Stalled);
    assert_eq!(change(&region), slot, "it does not answer");
    wait_until_dead(&region, 0, 1);
    let dead = format!("{slot};dead");
    assert_eq!(change(&region), dead);
    assert_eq!(change(&region), dead, "a later change, too");
    set(&region, Passage::Open);
    region.wait_for_members(2);
    assert_eq!(change(&region), "");

    region.kill(0);
    wait_until_dead(&region, 0, 1);
    assert_eq!(change(&region), dead);
    region_command("remove", &region.config(1), &[&slot]).done();
    wait_until_none_is_named(&region);
}

#[test]
fn a_dead_node_that_refuses_is_named_until_its_time_without_contact_has_passed() {
    let refuse = "isolation = \"refuse\"\nmax_staleness_seconds = 10\n";
    let Some(region) = Region::start_with(2, true, refuse) else {
        return;
    };
    let slot = slot(&region);
    set(&region, Passage::Stalled);
    wait_until_dead(&region, 0, 1);
    assert_eq!(change(&region), format!("{slot};dead"));
    wait_until_none_is_named(&region);
    let standing = &region.status(0)["standing"];
    assert_eq!(standing, "suspended", "only once it refuses");
}
