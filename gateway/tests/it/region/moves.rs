//! Requests that wait for the agent of their service while the service moves to another node, or another process of its node.

use crate::support::eventually;
use crate::support::peers::held_backend::HeldBackend;
use crate::support::processes::process::Running;
use crate::support::processes::region::Region;
use crate::support::processes::successor::replace;
use crate::support::waiting_requests::WaitingRequests;

/// A region with an agent, and the number of the node that owns its service.
fn with_agent(backend: &HeldBackend) -> Option<(Region, Running, usize)> {
    let region = Region::start(3)?;
    let agent = region.run_agent(&backend.url);
    let owner = region.owner();
    Some((region, agent, owner))
}

/// Ends the agent, and sends requests to every node. Returns them once they wait at the owner.
fn waiting(region: &Region, agent: Running, owner: usize) -> Vec<WaitingRequests> {
    drop(agent);
    eventually("the tunnel has ended", || {
        (region.metric(owner, "gw_tunnels") == 0.0).then_some(())
    });
    let to = |node| WaitingRequests::send(|| region.connect(node), region.service_key());
    let requests = (0..3).map(to).collect();
    eventually("the requests wait", || {
        let charged = region.metric(owner, "gw_relay_memory_bytes");
        let of_others = region.metric(owner, "gw_node_requests");
        let are_there = of_others as usize == 2 * WaitingRequests::COUNT;
        (are_there && charged as usize >= 3 * WaitingRequests::MEMORY).then_some(())
    });
    requests
}

/// Starts the agent, which is returned, and waits for the responses.
fn are_answered(region: &Region, backend: &HeldBackend, requests: Vec<WaitingRequests>) -> Running {
    let before = backend.requests();
    let agent = region.run_agent(&backend.url);
    let count = requests.len() * WaitingRequests::COUNT;
    for requests in requests {
        requests.are_answered();
    }
    assert_eq!(backend.requests() - before, count);
    agent
}

#[test]
fn requests_that_wait_move_with_their_service_when_its_node_leaves() {
    let backend = HeldBackend::start();
    let Some((mut region, agent, owner)) = with_agent(&backend) else {
        return;
    };
    let requests = waiting(&region, agent, owner);
    region.node(owner).process.signal("TERM");
    let _agent = are_answered(&region, &backend, requests);
    let mut left = region.nodes[owner].take().unwrap();
    assert_eq!(left.process.exit_code(), Some(0));
}

#[test]
fn requests_that_wait_move_with_their_service_when_its_node_comes_back() {
    let backend = HeldBackend::start();
    let Some((mut region, agent, owner)) = with_agent(&backend) else {
        return;
    };
    region.node(owner).process.signal("TERM");
    let mut left = region.nodes[owner].take().unwrap();
    assert_eq!(left.process.exit_code(), Some(0));
    region.wait_for_members(2);
    let other = region.owner();
    drop(agent);
    eventually("the tunnel has ended", || {
        (region.metric(other, "gw_tunnels") == 0.0).then_some(())
    });
    let nodes = [other, 3 - owner - other];
    let to = |node| WaitingRequests::send(|| region.connect(node), region.service_key());
    let requests = nodes.into_iter().map(to).collect();
    region.restart(owner);
    // With the node, its service has come back.
    region.wait_for_members(3);
    let _agent = are_answered(&region, &backend, requests);
    assert_eq!(region.owner(), owner);
}

#[test]
fn requests_that_wait_move_to_the_successor_of_their_node() {
    let backend = HeldBackend::start();
    let Some((region, agent, owner)) = with_agent(&backend) else {
        return;
    };
    let requests = waiting(&region, agent, owner);
    let node = region.node(owner);
    let _successor = replace(node.process.id(), &node.log);
    let _agent = are_answered(&region, &backend, requests);
}

#[test]
fn requests_that_wait_are_served_when_their_node_is_killed_and_comes_back() {
    let backend = HeldBackend::start();
    let Some((mut region, agent, owner)) = with_agent(&backend) else {
        return;
    };
    drop(agent);
    eventually("the tunnel has ended", || {
        (region.metric(owner, "gw_tunnels") == 0.0).then_some(())
    });
    let others = (0..3).filter(|node| *node != owner);
    let to = |node| WaitingRequests::send(|| region.connect(node), region.service_key());
    let requests = others.map(to).collect::<Vec<_>>();
    eventually("the requests wait at the owner", || {
        let of_others = region.metric(owner, "gw_node_requests");
        (of_others as usize == 2 * WaitingRequests::COUNT).then_some(())
    });
    region.kill(owner);
    region.restart(owner);
    region.wait_for_members(3);
    let _agent = are_answered(&region, &backend, requests);
}
