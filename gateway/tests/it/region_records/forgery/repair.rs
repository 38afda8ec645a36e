//! A forged key, and the repair of the region.

use std::path::Path;

use serde_json::{Value, json};

use super::{forge, hash_of};
use crate::region_records::records::Node;
use crate::region_records::{assert_says, config_file, region_command};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::peers::held_backend::HeldBackend;
use crate::support::processes::postgres::Postgres;

/// Part of the output of a repair.
const REPAIRED: &str = "Wrote the records of revision";

#[test]
fn a_forged_key_gives_no_access_and_the_region_is_repaired() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let backend = HeldBackend::start();
    let node = Node::start(&postgres, folder.path(), "a");
    let api = node.gateway.api();
    api.create_service("demo", "echo");
    let (key_id, good) = api.create_service_key("demo", &["echo"]);
    let (revoked_id, revoked) = api.create_service_key("demo", &["echo"]);
    let path = format!("/accounts/demo/service-keys/{revoked_id}");
    api.patch(&path, &json!({ "enabled": false }));
    let _agent = node.agent(folder.path(), &backend.url);
    node.wait_until_relayed(&good);
    wait_for_copy(&node);

    let evil = "gw_sk_eeeeeeeeeeeeeeee.secret";
    forge_keys(&postgres, &key_id, &revoked_id);
    wait_for_refused_records(&node, |count| count > 0.0);
    let outcomes = |node: &Node| [&good, evil, &revoked].map(|key| node.response(key).status);
    assert_eq!(outcomes(&node), [200, 502, 502]);
    a_change_is_refused(&node);

    // It uses the copy in its data folder.
    let node = node.restart(&postgres);
    node.wait_until_relayed(&good);
    assert_eq!(outcomes(&node), [200, 502, 502]);
    wait_for_refused_records(&node, |count| count == 2.0);

    a_node_without_a_copy_does_not_start(&postgres, &folder.path().join("b"));

    let config = config_file(&postgres, node.gateway.data_dir());
    let repair = || region_command("repair", &config, &[]);
    assert_says(&repair().done(), &[REPAIRED]);
    wait_for_refused_records(&node, |count| count == 0.0);
    assert_eq!(outcomes(&node), [200, 502, 502]);
    node.gateway.api().create_account("acme");
    let _other = a_node_without_a_copy_starts_again(&postgres, folder.path());
    assert_says(&repair().err, &["there is nothing to repair"]);
}

#[test]
fn missing_changes_are_discarded_on_demand_only() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(&postgres, folder.path(), "a");
    let api = node.gateway.api();
    api.create_service("demo", "echo");
    wait_for_copy(&node);
    postgres.sql(
        "UPDATE gw.region SET revision = revision + 5; UPDATE gw.records SET tag = '';
         DELETE FROM gw.changes",
    );
    let config = config_file(&postgres, node.gateway.data_dir());
    let repair = |more: &[&str]| region_command("repair", &config, more);
    repair(&[]).assert_failed(&["does not have all changes after revision"]);
    let repaired = repair(&["--discard-later-changes"]).done();
    assert_says(&repaired, &[REPAIRED]);
    wait_for_refused_records(&node, |count| count == 0.0);
    eventually("a change is made", || {
        let made = api.ask("POST", "/accounts", &json!({ "id": "acme" }));
        (made.status == 201).then_some(())
    });
}

fn wait_for_copy(node: &Node) {
    let copy = node.file("records.sealed");
    eventually("the copy is written", || copy.exists().then_some(()));
}

/// Writes another secret for a genuine key, and a revoked key that is enabled again.
fn forge_keys(postgres: &Postgres, key_id: &str, revoked_id: &str) {
    let document = |id: &str| {
        let document = format!("SELECT document FROM gw.records WHERE id = '{id}'");
        postgres.sql(&document)
    };
    let evil_id = "e".repeat(16);
    let mut forged: Value = serde_json::from_str(&document(key_id)).unwrap();
    forged["id"] = evil_id.as_str().into();
    forged["secret"] = hash_of("secret");
    forge(postgres, "service_key", &evil_id, &forged.to_string());
    let enabled = document(revoked_id).replace("false", "true");
    forge(postgres, "service_key", revoked_id, &enabled);
}

fn a_change_is_refused(node: &Node) {
    let body = json!({ "id": "acme" });
    let reply = node.gateway.api().ask("POST", "/accounts", &body);
    let detail = reply.body["detail"].as_str().unwrap_or_default();
    assert_says(detail, &["gw.changes has no valid tag", "region repair"]);
}

fn a_node_without_a_copy_does_not_start(postgres: &Postgres, folder: &Path) {
    let refused = Gateway::try_start(&postgres.config(folder)).err().unwrap();
    assert_says(&refused, &["service_key eeeeeeeeeeeeeeee"]);
}

fn a_node_without_a_copy_starts_again(postgres: &Postgres, folder: &Path) -> Node {
    let other = Node::start(postgres, folder, "b");
    let keys = other.gateway.api().list("/accounts/demo/service-keys");
    assert_eq!(keys.len(), 2);
    let actor = "SELECT actor FROM gw.audit WHERE action = 'region.repair'";
    assert_eq!(postgres.sql(actor), "operator");
    other
}

fn wait_for_refused_records(node: &Node, is_expected: fn(f64) -> bool) {
    eventually("the node refuses this number of records", || {
        is_expected(node.metric("gw_store_refused_records")).then_some(())
    });
}
