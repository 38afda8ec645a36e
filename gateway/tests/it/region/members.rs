//! A region of several node processes on PostgreSQL: joins, losses, drains and replacements.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::commands::{run, stored_status};
use super::{OK, assert_served, await_end, owner_and_others, stop};
use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::processes::process::Running;
use crate::support::processes::region::Region;
use crate::support::processes::successor::replace;

/// A region with an agent, which is connected; also returns the number of the owner and of two
/// other nodes.
fn with_agent() -> Option<(Region, Running, [usize; 3])> {
    let region = Region::start(3)?;
    let agent = region.run_agent(&backend::answering(OK));
    let nodes = owner_and_others(&region);
    Some((region, agent, nodes))
}

fn epoch(region: &Region, node: usize) -> u64 {
    region.status(node)["epoch"].as_u64().unwrap()
}

/// The number of services that each node owns.
fn owned_services(status: &Value) -> Vec<u64> {
    let nodes = status["nodes"].as_array().unwrap().iter();
    nodes
        .map(|node| node["services"].as_u64().unwrap())
        .collect()
}

/// The state of each node, as a status has it.
fn states(status: &Value) -> Vec<&str> {
    let nodes = status["nodes"].as_array().unwrap().iter();
    nodes.map(|node| node["state"].as_str().unwrap()).collect()
}

#[test]
fn every_node_relays_and_one_owns_the_service() {
    let Some((region, _agent, [owner, ..])) = with_agent() else {
        return;
    };
    assert_served(&region, 0..3);
    let mut owned = [0_u64; 3];
    owned[owner] = 1;
    for node in 0..3 {
        let status = region.status(node);
        assert_eq!(owned_services(&status), owned, "{status}");
        assert_eq!(status["node"], node);
    }
    // Each node counts the services that it owns.
    let without_tunnel = |node| region.metric(node, "gw_services_without_tunnel");
    assert_eq!((0..3).map(without_tunnel).sum::<f64>(), 0.0);
    the_numbers_follow_the_records(&region);
}

fn the_numbers_follow_the_records(region: &Region) {
    let api = region.api(0);
    for number in 0..20 {
        api.create_service("demo", &format!("s{number}"));
    }
    api.delete("/accounts/demo/services/s0");
    for node in 0..3 {
        eventually("the node counts 20 services", || {
            let all: u64 = owned_services(&region.status(node)).iter().sum();
            (all == 20).then_some(())
        });
    }
}

#[test]
fn agents_enroll_through_any_nodes() {
    let Some(region) = Region::start(3) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    // The requests of an enrollment arrive at different nodes.
    for number in 0..20 {
        let token = region
            .api(number % 3)
            .create_enrollment_token("demo", &["echo"]);
        region.enroll(token, &folder.path().join(number.to_string()));
    }
    assert_eq!(region.api(0).agents("demo").len(), 20);
}

#[test]
fn services_of_a_killed_node_move_and_no_request_at_the_others_fails() {
    let Some((mut region, _agent, [owner, other, third])) = with_agent() else {
        return;
    };
    assert_served(&region, [other]);
    region.wait_for_trust();
    region.kill(owner);
    // A request that is sent before the end of the link is known may have reached the backend, and
    // fails.
    eventually("the end of the link is known", || {
        (region.metric(other, "gw_node_links") == 0.0).then_some(())
    });
    // Waits for the next owner and its tunnel.
    assert_served(&region, [other, third]);
    region.wait_for_members(2);
    let before = epoch(&region, other);
    region.restart(owner);
    region.wait_for_members(3);
    assert!(epoch(&region, other) > before);
    assert_served(&region, 0..3);
    // The node has its slot and its services back.
    region.await_owner(owner);
}

#[test]
fn a_node_that_stops_leaves_first() {
    let Some((mut region, _agent, [owner, other, third])) = with_agent() else {
        return;
    };
    region.node(owner).process.signal("TERM");
    assert_served(&region, [other, third]);
    await_end(&mut region, owner);
    eventually("the node has left", || {
        states(&region.status(other))
            .contains(&"left")
            .then_some(())
    });
    assert_served(&region, [third]);
}

#[test]
fn a_replaced_process_keeps_its_place() {
    let Some((region, _agent, [owner, other, _])) = with_agent() else {
        return;
    };
    let before = epoch(&region, other);
    let node = region.node(owner);
    let _successor = replace(node.process.id(), &node.log);
    assert_served(&region, [other; 20]);
    eventually("the successor answers", || {
        (region.metric(owner, "gw_tunnels") >= 1.0).then_some(())
    });
    region.wait_for_members(3);
    assert_eq!(epoch(&region, other), before);
    assert_served(&region, [other]);
}

#[test]
fn tunnels_through_a_replaced_process_move_before_it_ends() {
    let Some((mut region, mut agent, [owner, other, third])) = with_agent() else {
        return;
    };
    // The balancer passes connections to the nodes in turn.
    let between = loop {
        let splices = |node: &usize| region.metric(*node, "gw_tunnels_spliced_total") > 0.0;
        if let Some(node) = [other, third].into_iter().find(splices) {
            break node;
        }
        drop(agent);
        eventually("the tunnel has ended", || {
            (region.metric(owner, "gw_tunnels") == 0.0).then_some(())
        });
        agent = region.run_agent(&backend::answering(OK));
        region.owner();
    };
    let generation =
        |region: &Region| region.api(owner).agents("demo")[0]["tunnels"][0]["generation"].as_u64();
    let before = generation(&region);
    let began = Instant::now();
    let _successor = replace(region.node(between).process.id(), &region.node(between).log);
    // Sooner than the drain would cut the tunnel.
    eventually("the agent has another tunnel", || {
        generation(&region).filter(|now| Some(*now) != before)
    });
    let replaced = region.nodes[between].as_mut().unwrap();
    assert_eq!(replaced.process.exit_code(), Some(0));
    let took = began.elapsed();
    assert!(took < Duration::from_secs(25), "{took:?}");
    assert_served(&region, [other, third]);
}

#[test]
fn a_revocation_is_answered_when_all_nodes_refuse_and_names_those_that_do_not_answer() {
    const REFUSED: &str = "502 GW_SERVICE_KEY_INVALID";
    let Some((region, _agent, [owner, other, third])) = with_agent() else {
        return;
    };
    let keys = region.api(owner).list("/accounts/demo/service-keys");
    let key = keys[0]["key_id"].as_str().unwrap();
    let path = format!("/accounts/demo/service-keys/{key}");
    let enable = |node, enabled: bool| {
        let body = json!({ "enabled": enabled });
        let reply = region.api(node).ask("PATCH", &path, &body);
        (reply.status, reply.pending_nodes)
    };
    assert_eq!(enable(owner, false), (200, String::new()));
    // Without waiting: all nodes refuse the key when the response is there.
    for node in 0..3 {
        assert_eq!(region.request(node), REFUSED, "at node {node}");
    }
    assert_eq!(enable(other, true), (200, String::new()));
    assert_served(&region, [third]);
    region.node(third).process.signal("STOP");
    let pending = enable(owner, false);
    let slot = region.status(owner)["nodes"][third]["slot"].to_string();
    assert_eq!(pending, (200, slot));
    assert_eq!(region.request(other), REFUSED);
    region.node(third).process.signal("CONT");
    eventually("the node refuses the key", || {
        (region.request(third) == REFUSED).then_some(())
    });
}

#[test]
fn nodes_serve_on_without_postgresql_and_one_of_them_restarts_meanwhile() {
    let Some((mut region, _agent, [owner, other, _])) = with_agent() else {
        return;
    };
    let before = epoch(&region, other);
    region.wait_for_copies();
    region.postgres.stop();
    eventually("the nodes notice", || {
        (region.metric(other, "gw_store_away_seconds") > 0.0).then_some(())
    });
    assert_served(&region, [owner, other]);
    region.kill(owner);
    region.restart(owner);
    assert_eq!(region.owner(), owner, "the node is the member that it was");
    assert_served(&region, 0..3);
    region.postgres.resume();
    region.wait_for_members(3);
    assert_eq!(epoch(&region, other), before, "no node was declared dead");
    assert_served(&region, 0..3);
}

#[test]
fn the_limit_of_a_service_holds_over_all_nodes_and_over_moves() {
    const BURST: u64 = 60;
    let Some((mut region, _agent, [owner, other, third])) = with_agent() else {
        return;
    };
    // One request a second.
    let limit = json!({ "burst": BURST, "refill_per_minute": 60 });
    let api = region.api(owner);
    api.patch("/accounts/demo/services/echo", &limit);
    let began = Instant::now();
    let mut admitted = 0;
    let mut send = |region: &Region, nodes: &[usize], times: usize| {
        for _ in 0..times {
            for node in nodes {
                match region.request(*node).as_str() {
                    "200" => admitted += 1,
                    "429 GW_RATE_LIMIT_EXCEEDED" => {}
                    outcome => panic!("{outcome} at node {node}"),
                }
            }
        }
    };
    send(&region, &[owner, other, third], 10);
    // The owner leaves, and takes its place again: the level goes along both times.
    stop(&mut region, owner);
    send(&region, &[other, third], 10);
    region.restart(owner);
    region.wait_for_members(3);
    region.await_owner(owner);
    send(&region, &[owner, other, third], 30);
    let most = BURST + began.elapsed().as_secs() + 1;
    assert!(
        (BURST..=most).contains(&admitted),
        "{admitted} of at most {most}"
    );
}

#[test]
fn an_operator_drains_and_removes_a_node() {
    let Some((mut region, _agent, [owner, other, third])) = with_agent() else {
        return;
    };
    let slot = region.status(owner)["node"].to_string();
    let left = format!("Node {slot} has left. Its process ends after its running requests.\n");
    assert_eq!(run(&region, other, &["drain", &slot]).done(), left);
    await_end(&mut region, owner);
    assert_served(&region, [other, third]);
    let mut expected = ["live"; 3];
    expected[owner] = "left";
    assert_eq!(states(&stored_status(&region, other)), expected);
    let removed = format!("Removed node {slot}. Another node can take its slot.\n");
    assert_eq!(run(&region, other, &["remove", &slot]).done(), removed);
    assert_eq!(states(&stored_status(&region, other)), ["live"; 2]);
    let shown = run(&region, other, &["status"]).done();
    assert!(
        shown.contains("EPOCHS BEHIND") && !shown.contains(" left "),
        "{shown}"
    );
}

#[test]
fn a_node_that_runs_is_not_removed_and_an_unknown_one_is_not_drained() {
    let Some(region) = Region::start(1) else {
        return;
    };
    let slot = region.status(0)["node"].to_string();
    let runs = "has neither left nor been declared dead: drain it first";
    for (command, slot, code, message) in [
        ("remove", &*slot, 1, runs),
        ("drain", "77", 1, "no node uses slot 77"),
        ("drain", "1024", 2, "slots go from 0 to 1023"),
    ] {
        run(&region, 0, &[command, slot]).assert_failed(code, &[message]);
    }
}

#[test]
fn changes_are_refused_while_the_tables_are_two_versions_newer() {
    let Some(region) = Region::start(1) else {
        return;
    };
    let api = region.api(0);
    let change = |burst: usize| {
        let body = json!({ "burst": burst });
        let reply = api.ask("PATCH", "/accounts/demo/services/echo", &body);
        (reply.status, reply.body.to_string())
    };
    // The version is read every second.
    let are_made = |burst| {
        eventually("changes are made", || {
            (change(burst).0 == 200).then_some(())
        });
    };
    let sql = |text: &str| region.postgres.sql(text);
    let known: usize = sql("SELECT schema FROM gw.region").parse().unwrap();
    let set = |version: usize| sql(&format!("UPDATE gw.region SET schema = {version}"));
    set(known + 1);
    are_made(101);
    set(known + 2);
    let log = &region.node(0).log;
    log.line_with("relaying goes on; changes are refused");
    let (status, problem) = change(102);
    assert_eq!(status, 503, "{problem}");
    let newer = format!("schema {}", known + 2);
    for words in [
        newer,
        format!("schema {known}"),
        "replace the process".to_owned(),
    ] {
        assert!(problem.contains(&words), "{problem}");
    }
    set(known);
    are_made(100);
}
