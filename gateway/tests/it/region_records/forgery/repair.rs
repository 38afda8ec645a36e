//! A forged key, and the repair of the region.

use std::path::Path;
use std::process::Output;

use serde_json::{Value, json};

use super::{forge, hash_of};
use crate::region_records::records::Node;
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::peers::held_backend::HeldBackend;
use crate::support::processes::postgres::Postgres;
use crate::support::processes::process::gw_gateway;

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
    eventually("a request is relayed", || {
        (node.response(&good).status == 200).then_some(())
    });
    let copied = || {
        std::fs::metadata(node.file("records.sealed"))
            .and_then(|file| file.modified())
            .ok()
    };
    eventually("the copy is written", copied);

    let evil = "gw_sk_eeeeeeeeeeeeeeee.secret";
    forge_keys(&postgres, &key_id, &revoked_id);
    wait_for_refused_records(&node, |count| count > 0.0);
    let outcomes = |node: &Node| [&good, evil, &revoked].map(|key| node.response(key).status);
    assert_eq!(outcomes(&node), [200, 502, 502]);
    a_change_is_refused(&node);

    // It uses the copy in its data folder.
    let node = node.restart(&postgres);
    eventually("a request is relayed", || {
        (node.response(&good).status == 200).then_some(())
    });
    assert_eq!(outcomes(&node), [200, 502, 502]);
    wait_for_refused_records(&node, |count| count == 2.0);

    a_node_without_a_copy_does_not_start(&postgres, &folder.path().join("b"));

    let path = folder.path().join("gateway.toml");
    std::fs::write(&path, postgres.config(node.gateway.data_dir())).unwrap();
    let ended = repair(&path, &[]);
    assert!(ended.status.success(), "{ended:?}");
    assert!(
        String::from_utf8_lossy(&ended.stdout).contains("Wrote the records of revision"),
        "{ended:?}"
    );
    wait_for_refused_records(&node, |count| count == 0.0);
    assert_eq!(outcomes(&node), [200, 502, 502]);
    node.gateway.api().create_account("acme");
    let _other = a_node_without_a_copy_starts_again(&postgres, folder.path());
    let ended = repair(&path, &[]);
    assert!(
        String::from_utf8_lossy(&ended.stderr).contains("there is nothing to repair"),
        "{ended:?}"
    );

    missing_changes_are_discarded_on_demand_only(&postgres, &node, &path);
}

/// Writes another secret for a genuine key, and a revoked key that is enabled again.
fn forge_keys(postgres: &Postgres, key_id: &str, revoked_id: &str) {
    let document = postgres.sql(&format!(
        "SELECT document FROM gw.records WHERE id = '{key_id}'"
    ));
    let mut forged: Value = serde_json::from_str(&document).unwrap();
    (forged["id"], forged["secret"]) = ("e".repeat(16).into(), hash_of("secret"));
    forge(
        postgres,
        "service_key",
        &"e".repeat(16),
        &forged.to_string(),
    );
    let document = postgres.sql(&format!(
        "SELECT document FROM gw.records WHERE id = '{revoked_id}'"
    ));
    forge(
        postgres,
        "service_key",
        revoked_id,
        &document.replace("false", "true"),
    );
}

fn a_change_is_refused(node: &Node) {
    let body = json!({ "id": "acme" });
    let reply = node.gateway.api().ask("POST", "/accounts", &body);
    let detail = reply.body["detail"].as_str().unwrap_or_default();
    assert!(
        detail.contains("gw.changes has no valid tag") && detail.contains("region repair"),
        "{reply:?}"
    );
}

fn a_node_without_a_copy_does_not_start(postgres: &Postgres, folder: &Path) {
    let refused = Gateway::try_start(&postgres.config(folder)).err().unwrap();
    assert!(
        refused.contains("service_key eeeeeeeeeeeeeeee"),
        "{refused}"
    );
}

fn a_node_without_a_copy_starts_again(postgres: &Postgres, folder: &Path) -> Node {
    let other = Node::start(postgres, folder, "b");
    let keys = other.gateway.api().list("/accounts/demo/service-keys");
    assert_eq!(keys.len(), 2);
    assert_eq!(
        postgres.sql("SELECT actor FROM gw.audit WHERE action = 'region.repair'"),
        "operator"
    );
    other
}

fn wait_for_refused_records(node: &Node, is_expected: fn(f64) -> bool) {
    eventually("the node refuses this number of records", || {
        is_expected(node.metric("gw_store_refused_records")).then_some(())
    });
}

/// Runs `gw-gateway region repair`.
fn repair(config: &Path, more: &[&str]) -> Output {
    gw_gateway()
        .args(["region", "repair", "--config"])
        .arg(config)
        .args(more)
        .output()
        .unwrap()
}

fn missing_changes_are_discarded_on_demand_only(postgres: &Postgres, node: &Node, config: &Path) {
    postgres.sql(
        "UPDATE gw.region SET revision = revision + 5; UPDATE gw.records SET tag = ''; DELETE \
              FROM gw.changes",
    );
    let repair = |more: &[&str]| {
        let ended = repair(config, more);
        String::from_utf8([ended.stdout, ended.stderr].concat()).unwrap()
    };
    assert!(
        repair(&[]).contains("does not have all changes after revision"),
        "{}",
        repair(&[])
    );
    assert!(repair(&["--discard-later-changes"]).contains("Wrote the records of revision"));
    wait_for_refused_records(node, |count| count == 0.0);
}
