//! What a node acknowledges of a change: that it is in its history, and that it knows it after a
//! crash.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;

use serde_json::{Value, json};

use super::OK;
use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::peers::gate::Passage;
use crate::support::processes::process::send_signal;
use crate::support::processes::region::Region;
use crate::support::processes::successor::replace;

const REFUSED: &str = "502 GW_SERVICE_KEY_INVALID";

/// Enables or disables the service key at a node. Returns the nodes that do not keep the change.
fn enable_key(region: &Region, node: usize, enabled: bool) -> String {
    let key = region.service_key().trim_start_matches("gw_sk_");
    let (id, _) = key.split_once('.').unwrap();
    let path = format!("/accounts/demo/service-keys/{id}");
    let body = json!({ "enabled": enabled });
    let reply = region.api(node).ask("PATCH", &path, &body);
    assert_eq!(reply.status, 200);
    reply.pending_nodes
}

fn slot(region: &Region, node: usize) -> String {
    let text = fs::read_to_string(region.data(node).join("node.json")).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()["slot"].to_string()
}

/// Makes it impossible to write this file of a data folder.
fn block(file: &Path) {
    drop(fs::remove_file(file));
    fs::create_dir_all(file.join("in the way")).unwrap();
}

/// Keeps the copy of the records of a node as it is.
fn block_copy(region: &Region, node: usize) {
    let data = region.data(node);
    let journal = data.join("records.journal");
    eventually("the node has a copy", || journal.exists().then_some(()));
    block(&data.join("records.sealed.new"));
}

#[test]
fn a_node_with_another_history_does_not_acknowledge_a_change() {
    let Some(region) = Region::start_gated(2) else {
        return;
    };
    assert_eq!(enable_key(&region, 0, true), "");
    region.postgres.sql(
        "CREATE TABLE kept_records AS TABLE gw.records;
         CREATE TABLE kept_changes AS TABLE gw.changes;
         CREATE TABLE kept AS TABLE gw.region",
    );
    let kept = region.metric(0, "gw_store_revision");
    for account in ["red", "green", "blue"] {
        region.api(0).create_account(account);
    }
    eventually("the other node follows", || {
        (region.metric(1, "gw_store_revision") == kept + 3.0).then_some(())
    });
    let named = slot(&region, 1);

    // As after a failover to a standby that lacks the last changes.
    region.engine_gates[1].set(Passage::Stalled);
    region.postgres.sql(&format!(
        "BEGIN; DELETE FROM gw.records; DELETE FROM gw.changes;
         INSERT INTO gw.records TABLE kept_records; INSERT INTO gw.changes TABLE kept_changes;
         DELETE FROM gw.audit WHERE number > {kept};
         UPDATE gw.region SET revision = kept.revision, last_change = kept.last_change,
             tag = kept.tag FROM kept;
         COMMIT"
    ));
    eventually("one node follows the other history", || {
        (region.metric(0, "gw_store_revision") == kept).then_some(())
    });
    // On a slow machine it is declared dead meanwhile.
    let pending = enable_key(&region, 0, false);
    assert_eq!(pending.trim_end_matches(";dead"), named);
    assert!(region.metric(1, "gw_store_revision") > region.metric(0, "gw_store_revision"));

    region.engine_gates[1].set(Passage::Open);
    eventually("all nodes acknowledge", || {
        enable_key(&region, 0, false).is_empty().then_some(())
    });
}

#[test]
fn a_node_that_acknowledged_a_revocation_refuses_after_a_crash_and_a_start_without_postgresql() {
    let Some(mut region) = Region::start(2) else {
        return;
    };
    let _agent = region.run_agent(&backend::answering(OK));
    let owner = region.owner();
    block_copy(&region, owner);
    assert_eq!(enable_key(&region, 1 - owner, false), "");
    region.postgres.stop();
    region.kill(owner);
    // What a crash leaves of the next change.
    let journal = region.data(owner).join("records.journal");
    let mut journal = OpenOptions::new().append(true).open(journal).unwrap();
    journal.write_all(b"c29tZSBieXRlcw").unwrap();
    region.restart(owner);
    let is_late = |answer: &str| answer.starts_with("503") || answer.starts_with("504");
    let answer = eventually("the node is a member", || {
        Some(region.request(owner)).filter(|answer| !is_late(answer))
    });
    assert_eq!(answer, REFUSED);
}

#[test]
fn a_single_node_refuses_after_a_replacement_a_crash_and_a_start_without_postgresql() {
    let Some(mut region) = Region::start(1) else {
        return;
    };
    let successor = replace(region.node(0).process.id(), &region.node(0).log);
    region.wait_for_members(1);
    assert_eq!(enable_key(&region, 0, true), "");
    block_copy(&region, 0);
    assert_eq!(enable_key(&region, 0, false), "");
    assert!(send_signal(successor.0, "KILL"));
    eventually("the successor has ended", || {
        successor.has_ended().then_some(())
    });
    drop(region.nodes[0].take());
    region.postgres.stop();
    region.restart(0);
    assert_eq!(region.request(0), REFUSED);
}

#[test]
fn a_node_that_cannot_write_its_records_is_named_until_it_can() {
    let Some(mut region) = Region::start(2) else {
        return;
    };
    assert_eq!(enable_key(&region, 0, true), "");
    region.node(1).process.signal("TERM");
    assert_eq!(region.nodes[1].take().unwrap().process.exit_code(), Some(0));
    let files = ["records.sealed.new", "records.journal"].map(|file| region.data(1).join(file));
    files.iter().for_each(|file| block(file));
    region.restart(1);
    region.wait_for_members(2);
    let named = slot(&region, 1);
    assert_eq!(enable_key(&region, 0, false), named);
    assert_eq!(region.request(1), REFUSED, "it uses the change");
    let by_itself = enable_key(&region, 1, true);
    assert_eq!(by_itself, named, "the node that makes the change, too");
    assert_eq!(region.metric(1, "gw_store_copy_failing"), 1.0);

    files
        .iter()
        .for_each(|file| fs::remove_dir_all(file).unwrap());
    eventually("the records are written", || {
        (region.metric(1, "gw_store_copy_failing") == 0.0).then_some(())
    });
    assert_eq!(enable_key(&region, 0, false), "");
    assert_eq!(enable_key(&region, 1, true), "");
}
