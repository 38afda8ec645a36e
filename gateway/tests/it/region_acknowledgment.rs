//! What a node acknowledges of a change: that it is in its history.

use std::fs;

use serde_json::{Value, json};

use crate::support::eventually;
use crate::support::gate::Passage;
use crate::support::region::Region;

/// Enables or disables the service key at a node. Returns the nodes that do not keep the change.
fn enable_key(region: &Region, node: usize, enabled: bool) -> Option<String> {
    let key = region.service_key().trim_start_matches("gw_sk_").split('.').next().unwrap();
    let path = format!("/api/v1/accounts/demo/service-keys/{key}");
    let (status, pending) = region.patch(node, &path, &json!({ "enabled": enabled }));
    assert_eq!(status, 200);
    pending
}

fn slot(region: &Region, node: usize) -> Option<String> {
    let text = fs::read_to_string(region.data(node).join("node.json")).unwrap();
    Some(serde_json::from_str::<Value>(&text).unwrap()["slot"].to_string())
}

#[test]
fn a_node_with_another_history_does_not_acknowledge_a_change() {
    let Some(region) = Region::start_gated(2) else { return };
    assert_eq!(enable_key(&region, 0, true), None);
    region.postgres.sql(
        "CREATE TABLE kept_records AS TABLE gw.records; CREATE TABLE kept_changes AS TABLE gw.changes;
         CREATE TABLE kept AS TABLE gw.region",
    );
    let kept = region.metric(0, "gw_store_revision");
    for account in ["red", "green", "blue"] {
        region.post(0, "/accounts", &json!({ "id": account }));
    }
    eventually("the other node follows", || (region.metric(1, "gw_store_revision") == kept + 3.0).then_some(()));
    let named = slot(&region, 1);

    // As after a failover to a standby that lacks the last changes.
    region.engine_gates[1].set(Passage::Stalled);
    region.postgres.sql(&format!(
        "BEGIN; TRUNCATE gw.records, gw.changes; INSERT INTO gw.records TABLE kept_records; INSERT INTO gw.changes TABLE kept_changes;
         DELETE FROM gw.audit WHERE number > {kept};
         UPDATE gw.region SET revision = kept.revision, last_change = kept.last_change, tag = kept.tag FROM kept;
         COMMIT"
    ));
    eventually("one node follows the other history", || (region.metric(0, "gw_store_revision") == kept).then_some(()));
    // On a slow machine it is declared dead meanwhile.
    let pending = enable_key(&region, 0, false);
    assert_eq!(pending.as_deref().map(|node| node.trim_end_matches(";dead")), named.as_deref());
    assert!(region.metric(1, "gw_store_revision") > region.metric(0, "gw_store_revision"));

    region.engine_gates[1].set(Passage::Open);
    eventually("all nodes acknowledge", || enable_key(&region, 0, false).is_none().then_some(()));
}
