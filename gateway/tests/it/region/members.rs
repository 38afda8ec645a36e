//! A region of several node processes on PostgreSQL: joins, losses, drains and replacements.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::processes::process;
use crate::support::processes::process::Running;
use crate::support::processes::region::Region;
use crate::support::processes::successor::replace;

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// A region with an agent, which is connected; also returns the number of the owner and of two
/// other nodes.
fn with_agent() -> Option<(Region, Running, [usize; 3])> {
    let region = Region::start(3)?;
    let agent = region.run_agent(&backend::answering(OK));
    let owner = region.owner();
    Some((region, agent, [owner, (owner + 1) % 3, (owner + 2) % 3]))
}

fn epoch(region: &Region, node: usize) -> u64 {
    region.status(node)["epoch"].as_u64().unwrap()
}

/// The number of services that each node owns.
fn owned_services(status: &Value) -> Vec<u64> {
    let nodes = status["nodes"].as_array().unwrap();
    nodes
        .iter()
        .map(|node| node["services"].as_u64().unwrap())
        .collect()
}

#[test]
fn every_node_relays_and_one_owns_the_service() {
    let Some((region, _agent, [owner, ..])) = with_agent() else {
        return;
    };
    for node in 0..3 {
        assert_eq!(region.request(node), "200");
        let status = region.status(node);
        let owned = owned_services(&status);
        assert_eq!(owned.iter().sum::<u64>(), 1, "{status}");
        assert_eq!(owned[owner], 1, "{status}");
        assert_eq!(status["node"], node);
    }
    // Each node counts the services that it owns.
    assert_eq!(
        (0..3)
            .map(|node| region.metric(node, "gw_services_without_tunnel"))
            .sum::<f64>(),
        0.0
    );
    // A change of the records changes the numbers.
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
    assert_eq!(region.request(other), "200");
    region.wait_for_trust();
    region.kill(owner);
    // A request that is sent before the end of the link is known may have reached the backend, and
    // fails.
    eventually("the end of the link is known", || {
        (region.metric(other, "gw_node_links") == 0.0).then_some(())
    });
    // Waits for the next owner and its tunnel.
    assert_eq!(
        (region.request(other), region.request(third)),
        ("200".into(), "200".into())
    );
    region.wait_for_members(2);
    let before = epoch(&region, other);
    region.restart(owner);
    region.wait_for_members(3);
    assert!(epoch(&region, other) > before);
    for node in 0..3 {
        assert_eq!(region.request(node), "200");
    }
    // The node has its slot and its services back.
    region.await_owner(owner);
}

#[test]
fn a_node_that_stops_leaves_first() {
    let Some((mut region, _agent, [owner, other, third])) = with_agent() else {
        return;
    };
    region.node(owner).process.signal("TERM");
    assert_eq!(
        (region.request(other), region.request(third)),
        ("200".into(), "200".into())
    );
    assert_eq!(
        region.nodes[owner].take().unwrap().process.exit_code(),
        Some(0)
    );
    eventually("the node has left", || {
        let status = region.status(other);
        status["nodes"]
            .as_array()
            .unwrap()
            .iter()
            .any(|node| node["state"] == "left")
            .then_some(())
    });
    assert_eq!(region.request(third), "200");
}

#[test]
fn a_replaced_process_keeps_its_place() {
    let Some((region, _agent, [owner, other, _])) = with_agent() else {
        return;
    };
    let before = epoch(&region, other);
    let node = region.node(owner);
    let _successor = replace(node.process.id(), &node.log);
    for _ in 0..20 {
        assert_eq!(region.request(other), "200");
    }
    eventually("the successor answers", || {
        (region.metric(owner, "gw_tunnels") >= 1.0).then_some(())
    });
    region.wait_for_members(3);
    assert_eq!(epoch(&region, other), before);
    assert_eq!(region.request(other), "200");
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
    assert_eq!(
        region.nodes[between].as_mut().unwrap().process.exit_code(),
        Some(0)
    );
    assert!(
        began.elapsed() < Duration::from_secs(25),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(
        (region.request(other), region.request(third)),
        ("200".into(), "200".into())
    );
}

#[test]
fn a_revocation_is_answered_when_all_nodes_refuse_and_names_those_that_do_not_answer() {
    let Some((region, _agent, [owner, other, third])) = with_agent() else {
        return;
    };
    let key = region
        .service_key()
        .trim_start_matches("gw_sk_")
        .split('.')
        .next()
        .unwrap()
        .to_owned();
    let path = format!("/accounts/demo/service-keys/{key}");
    let enable = |node, enabled: bool| {
        let body = serde_json::json!({ "enabled": enabled });
        let reply = region.api(node).ask("PATCH", &path, &body);
        (reply.status, reply.pending_nodes)
    };
    assert_eq!(enable(owner, false), (200, String::new()));
    // Without waiting: all nodes refuse the key when the response is there.
    for node in 0..3 {
        assert_eq!(
            region.request(node),
            "502 GW_SERVICE_KEY_INVALID",
            "at node {node}"
        );
    }
    assert_eq!(enable(other, true), (200, String::new()));
    assert_eq!(region.request(third), "200");
    region.node(third).process.signal("STOP");
    let pending = enable(owner, false);
    let slot = region.status(owner)["nodes"][third]["slot"].to_string();
    assert_eq!(pending, (200, slot));
    assert_eq!(region.request(other), "502 GW_SERVICE_KEY_INVALID");
    region.node(third).process.signal("CONT");
    eventually("the node refuses the key", || {
        (region.request(third) == "502 GW_SERVICE_KEY_INVALID").then_some(())
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
    assert_eq!(
        (region.request(owner), region.request(other)),
        ("200".into(), "200".into())
    );
    region.kill(owner);
    region.restart(owner);
    assert_eq!(region.owner(), owner, "the node is the member that it was");
    for node in 0..3 {
        assert_eq!(region.request(node), "200", "at node {node}");
    }
    region.postgres.resume();
    region.wait_for_members(3);
    assert_eq!(epoch(&region, other), before, "no node was declared dead");
    for node in 0..3 {
        assert_eq!(region.request(node), "200", "at node {node}");
    }
}

#[test]
fn the_limit_of_a_service_holds_over_all_nodes_and_over_moves() {
    const BURST: u64 = 60;
    let Some((mut region, _agent, [owner, other, third])) = with_agent() else {
        return;
    };
    // One request a second.
    let limit = serde_json::json!({ "burst": BURST, "refill_per_minute": 60 });
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
    region.node(owner).process.signal("TERM");
    assert_eq!(
        region.nodes[owner].take().unwrap().process.exit_code(),
        Some(0)
    );
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

/// Runs `gw-gateway region` with the configuration of a node. Returns exit code, output and errors.
fn run(region: &Region, node: usize, arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = process::gw_gateway();
    command
        .arg("region")
        .arg(arguments[0])
        .arg("--config")
        .arg(region.config(node))
        .args(&arguments[1..]);
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (
        output.status.code(),
        text(output.stdout),
        text(output.stderr),
    )
}

#[test]
fn an_operator_drains_and_removes_a_node() {
    let Some((mut region, _agent, [owner, other, third])) = with_agent() else {
        return;
    };
    let slot = region.status(owner)["node"].to_string();
    let run = |region: &Region, arguments: &[&str]| run(region, other, arguments);
    let (code, _, error) = run(&region, &["remove", &slot]);
    assert_eq!(code, Some(1));
    assert!(
        error.contains("has neither left nor been declared dead: drain it first"),
        "{error}"
    );
    let (code, _, error) = run(&region, &["drain", "77"]);
    assert!(
        code == Some(1) && error.contains("no node uses slot 77"),
        "{error}"
    );
    let (code, _, error) = run(&region, &["drain", "1024"]);
    assert!(
        code == Some(2) && error.contains("slots go from 0 to 1023"),
        "{error}"
    );

    let (code, out, error) = run(&region, &["drain", &slot]);
    assert_eq!(
        (code, out.as_str()),
        (
            Some(0),
            format!("Node {slot} has left. Its process ends after its running requests.\n")
                .as_str()
        ),
        "{error}"
    );
    assert_eq!(
        region.nodes[owner].take().unwrap().process.exit_code(),
        Some(0)
    );
    assert_eq!(
        (region.request(other), region.request(third)),
        ("200".into(), "200".into())
    );
    let (_, out, _) = run(&region, &["status", "--json"]);
    let status: Value = serde_json::from_str(&out).unwrap();
    let states: Vec<&str> = status["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| node["state"].as_str().unwrap())
        .collect();
    assert_eq!(
        states.iter().filter(|state| **state == "left").count(),
        1,
        "{states:?}"
    );
    let (code, out, error) = run(&region, &["remove", &slot]);
    assert_eq!(
        (code, out.as_str()),
        (
            Some(0),
            format!("Removed node {slot}. Another node can take its slot.\n").as_str()
        ),
        "{error}"
    );
    let (_, out, _) = run(&region, &["status"]);
    assert!(
        out.contains("EPOCHS BEHIND") && !out.contains(" left "),
        "{out}"
    );
}

#[test]
fn changes_are_refused_while_the_tables_are_two_versions_newer() {
    let Some(region) = Region::start(1) else {
        return;
    };
    let change = |burst: usize| {
        let body = serde_json::json!({ "burst": burst });
        let reply = region
            .api(0)
            .ask("PATCH", "/accounts/demo/services/echo", &body);
        (reply.status, reply.body.to_string())
    };
    let known: usize = region
        .postgres
        .sql("SELECT schema FROM gw.region")
        .parse()
        .unwrap();
    for newer in [1, 2, 0] {
        region
            .postgres
            .sql(&format!("UPDATE gw.region SET schema = {}", known + newer));
        if newer == 2 {
            region
                .node(0)
                .log
                .line_with("relaying goes on; changes are refused");
            let (status, problem) = change(100 + newer);
            assert_eq!(status, 503, "{problem}");
            let words = [
                format!("schema {}", known + 2),
                format!("schema {known}"),
                "replace the process".to_owned(),
            ];
            assert!(
                words.iter().all(|words| problem.contains(words)),
                "{problem}"
            );
        } else {
            // The version is read every second.
            eventually("changes are made", || {
                (change(100 + newer).0 == 200).then_some(())
            });
        }
    }
}
