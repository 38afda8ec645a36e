//! Nodes of a region whose messages others refuse: not after a rejoin, and visible while it lasts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use super::commands::{run, stored_status};
use super::{OK, assert_served, owner_and_others, stop};
use crate::support::eventually;
use crate::support::peers::{backend, node_peer};
use crate::support::processes::region::Region;
use crate::support::processes::successor::admin;

/// The other nodes of a region, as a node shows them.
fn others(region: &Region, node: usize) -> Vec<Value> {
    let status = region.status(node);
    let nodes = status["nodes"].as_array().cloned().unwrap_or_default();
    nodes
        .into_iter()
        .filter(|other| other["slot"] != status["node"])
        .collect()
}

fn wait_until_dead(region: &Region, observer: usize) {
    eventually("the node is declared dead", || {
        others(region, observer)
            .iter()
            .any(|other| other["state"] == "dead")
            .then_some(())
    });
}

#[test]
fn a_node_that_was_frozen_is_accepted_again_and_keeps_levels_and_its_lease() {
    let refuse = "isolation = \"refuse\"\nmax_staleness_seconds = 10\n";
    let Some(mut region) = Region::start_with(3, false, refuse) else {
        return;
    };
    let _agent = region.run_agent(&backend::answering(OK));
    let [owner, other, third] = owner_and_others(&region);
    region.node(owner).process.signal("STOP");
    wait_until_dead(&region, other);
    region.node(owner).process.signal("CONT");
    region.wait_for_members(3);
    region.await_owner(owner);
    for node in 0..3 {
        eventually("no node refuses the messages of another", || {
            others(&region, node)
                .iter()
                .all(|other| other["refusal"].is_null())
                .then_some(())
        });
    }
    an_outage_of_the_database_suspends_neither(&mut region, [owner, other]);
    levels_arrive_at_the_next_owner(&mut region, [owner, other, third]);
}

/// The nodes hear each other, which prolongs their leases.
fn an_outage_of_the_database_suspends_neither(region: &mut Region, nodes: [usize; 2]) {
    region.postgres.stop();
    for node in nodes {
        eventually("the outage lasts longer than max_staleness_seconds", || {
            (region.status(node)["engine_silence_seconds"].as_f64()? > 13.0).then_some(())
        });
        assert_eq!(region.status(node)["standing"], "isolated");
        assert_served(region, [node]);
    }
    region.postgres.resume();
    region.wait_for_members(3);
}

fn levels_arrive_at_the_next_owner(region: &mut Region, [owner, other, third]: [usize; 3]) {
    const REFUSED: &str = "429 GW_RATE_LIMIT_EXCEEDED";
    let limit = json!({ "burst": 3, "refill_per_minute": 1 });
    let api = region.api(owner);
    let changed = api.ask("PATCH", "/accounts/demo/services/echo", &limit);
    assert_eq!((changed.status, &*changed.pending_nodes), (200, ""));
    eventually("the bucket is empty", || {
        (region.request(other) == REFUSED).then_some(())
    });
    stop(region, owner);
    for node in [other, third] {
        let outcome = region.request(node);
        assert_eq!(outcome, REFUSED, "a second burst at node {node}");
    }
}

#[test]
fn a_refusal_that_lasts_is_shown() {
    const REFUSED: &str = "HTTP/1.1 403 Forbidden\r\nContent-Length: 8\r\n\r\nbecause\n";
    const TAKEN: &str = "HTTP/1.1 204 No Content\r\n\r\n";
    let Some(mut region) = Region::start(2) else {
        return;
    };
    let slot = region.status(1)["node"].clone();
    let session = region.postgres.sql(&format!(
        "SELECT replace(session::text, '-', '') FROM gw.nodes WHERE slot = {slot}"
    ));
    region.kill(1);
    let refuses = Arc::new(AtomicBool::new(true));
    let answer = Arc::clone(&refuses);
    let answer = move || {
        if answer.load(Ordering::Relaxed) {
            REFUSED
        } else {
            TAKEN
        }
    };
    let uri = format!("gw://eu1.gw.localhost/node/{slot}/{}", session.trim());
    node_peer::serve_in_place(&region.data(0), &uri, region.peer_listen(1), answer);

    let refusal = eventually("the other node refuses the messages", || {
        let refusal = others(&region, 0).first()?["refusal"].clone();
        (refusal["seconds"].as_f64()? > 3.0).then_some(refusal)
    });
    assert_eq!(refusal["reason"], "403 Forbidden: because");
    assert_eq!(region.metric(0, "gw_region_refused_by"), 1.0);
    let node = region.node(0);
    let line = node
        .log
        .line_with("another node refuses the messages of this one");
    assert!(line.contains("403 Forbidden: because"), "{line}");
    // It does not hear the other either: a balancer keeps it.
    let (_, ready) = admin(node.admin_address, "/readyz");
    assert!(ready.ends_with("ready\n"), "{ready}");

    the_command_shows_the_refusal(&region, &slot);

    refuses.store(false, Ordering::Relaxed);
    let line = node.log.find(|line| {
        let line = line.to_string();
        line.contains("messages of this one").then_some(line)
    });
    assert!(
        line.contains("another node accepts the messages of this one again"),
        "logged once: {line}"
    );
    assert!(others(&region, 0)[0]["refusal"].is_null());
    assert_eq!(region.metric(0, "gw_region_refused_by"), 0.0);
}

fn the_command_shows_the_refusal(region: &Region, slot: &Value) {
    let shown = run(region, 0, &["status"]).done();
    let words = shown.split_whitespace().collect::<Vec<_>>().join(" ");
    let refused = format!(" refused by node {slot} for ");
    assert!(
        words.contains("This node: ") && words.contains(&refused),
        "{shown}"
    );
    let status = stored_status(region, 0);
    let nodes = status["this_node"]["nodes"].as_array().unwrap();
    let is_refusal = |node: &Value| node["refusal"]["reason"] == "403 Forbidden: because";
    assert!(nodes.iter().any(is_refusal), "{status}");
}
