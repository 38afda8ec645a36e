//! Requests that wait for the agent of their service while the service moves to another node, or
//! another process of its node.

use serde_json::json;

use super::stop;
use crate::support::peers::held_backend::HeldBackend;
use crate::support::processes::process::Running;
use crate::support::processes::region::Region;
use crate::support::processes::successor::replace;
use crate::support::waiting_requests::{Loss, WaitingRequests, until_quick};

/// A region with an agent, and the number of the node that owns its service.
fn with_agent(backend: &HeldBackend) -> Option<(Region, Running, usize)> {
    let region = Region::start(3)?;
    let agent = region.run_agent(&backend.url);
    let owner = region.owner();
    Some((region, agent, owner))
}

/// Ends the agent, whose tunnel is at `owner`, and waits until the node knows. `None` if that took
/// too long.
fn lose(region: &Region, agent: Running, owner: usize) -> Option<Loss> {
    let loss = Loss::of(agent);
    loss.wait_for("the tunnel has ended", || {
        region.metric(owner, "gw_tunnels") == 0.0
    })?;
    Some(loss)
}

/// Sends requests to these nodes.
fn send(region: &Region, nodes: impl IntoIterator<Item = usize>) -> Vec<WaitingRequests> {
    let to = |node| WaitingRequests::send(|| region.connect(node), region.service_key());
    nodes.into_iter().map(to).collect()
}

/// Ends the agent, and sends requests to every node. Returns them once they wait at the owner;
/// `None` if that took too long.
fn waiting(region: &Region, agent: Running, owner: usize) -> Option<(Loss, Vec<WaitingRequests>)> {
    // As many tokens as requests: one that is charged again after it has moved is refused.
    let limit = json!({ "burst": 3 * WaitingRequests::COUNT, "refill_per_minute": 1 });
    let api = region.api(owner);
    api.patch("/accounts/demo/services/echo", &limit);
    let loss = lose(region, agent, owner)?;
    let requests = send(region, 0..3);
    loss.wait_for("the requests wait", || {
        let charged = region.metric(owner, "gw_relay_memory_bytes");
        let of_others = region.metric(owner, "gw_node_requests");
        let are_there = of_others as usize == 2 * WaitingRequests::COUNT;
        are_there && charged as usize >= 3 * WaitingRequests::MEMORY
    })?;
    Some((loss, requests))
}

/// Starts the agent, which is returned, and waits for the responses. `None` if a request was
/// refused because the agent came back too late.
fn are_answered(
    region: &Region,
    backend: &HeldBackend,
    loss: &Loss,
    requests: Vec<WaitingRequests>,
) -> Option<Running> {
    let before = backend.requests();
    let agent = region.run_agent(&backend.url);
    region.owner();
    let is_late = loss.is_long_ago();
    let count = requests.len() * WaitingRequests::COUNT;
    for requests in requests {
        requests.are_answered(is_late)?;
    }
    assert_eq!(backend.requests() - before, count);
    Some(agent)
}

#[test]
fn requests_that_wait_move_with_their_service_when_its_node_leaves() {
    until_quick(|| {
        let backend = HeldBackend::start();
        let Some((mut region, agent, owner)) = with_agent(&backend) else {
            return Some(());
        };
        let (loss, requests) = waiting(&region, agent, owner)?;
        region.node(owner).process.signal("TERM");
        let mut left = region.nodes[owner].take().unwrap();
        let _agent = are_answered(&region, &backend, &loss, requests)?;
        assert_eq!(left.process.exit_code(), Some(0));
        Some(())
    });
}

#[test]
fn requests_that_wait_move_with_their_service_when_its_node_comes_back() {
    until_quick(|| {
        let backend = HeldBackend::start();
        let Some((mut region, agent, owner)) = with_agent(&backend) else {
            return Some(());
        };
        stop(&mut region, owner);
        region.wait_for_members(2);
        let other = region.owner();
        let loss = lose(&region, agent, other)?;
        let requests = send(&region, [other, 3 - owner - other]);
        region.restart(owner);
        // With the node, its service has come back.
        region.wait_for_members(3);
        let _agent = are_answered(&region, &backend, &loss, requests)?;
        region.await_owner(owner);
        Some(())
    });
}

#[test]
fn requests_that_wait_move_to_the_successor_of_their_node() {
    until_quick(|| {
        let backend = HeldBackend::start();
        let Some((region, agent, owner)) = with_agent(&backend) else {
            return Some(());
        };
        let (loss, requests) = waiting(&region, agent, owner)?;
        let node = region.node(owner);
        let _successor = replace(node.process.id(), &node.log);
        let _agent = are_answered(&region, &backend, &loss, requests)?;
        Some(())
    });
}

#[test]
fn requests_that_wait_are_served_when_their_node_is_killed_and_comes_back() {
    until_quick(|| {
        let backend = HeldBackend::start();
        let Some((mut region, agent, owner)) = with_agent(&backend) else {
            return Some(());
        };
        let loss = lose(&region, agent, owner)?;
        let requests = send(&region, (0..3).filter(|node| *node != owner));
        loss.wait_for("the requests wait at the owner", || {
            let of_others = region.metric(owner, "gw_node_requests");
            of_others as usize == 2 * WaitingRequests::COUNT
        })?;
        region.kill(owner);
        region.restart(owner);
        region.wait_for_members(3);
        let _agent = are_answered(&region, &backend, &loss, requests)?;
        Some(())
    });
}
