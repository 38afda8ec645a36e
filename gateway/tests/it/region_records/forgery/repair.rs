//! A forged key, and the repair of the region.

use std::path::{Path, PathBuf};
use std::process::Output;

use gw_control_plane::control::CallerSecretChanges;
use gw_control_plane::control::records::caller_secret;

use super::*;
use crate::support::peers::held_backend::HeldBackend;
use crate::support::processes::process::hold;
use crate::support::setup;

#[test]
fn a_forged_key_gives_no_access_and_the_region_is_repaired() {
    let Some(postgres) = Postgres::with_region() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let backend = HeldBackend::start();
    let node = Node::start(&postgres, folder.path(), "a");
    let control = node.gateway.control();
    setup::service(control, "demo", "echo");
    let (key_id, good) = setup::service_key(control, "demo", &["echo"]);
    let (revoked_id, revoked) = setup::service_key(control, "demo", &["echo"]);
    let disabled = CallerSecretChanges {
        enabled: Some(false),
        ..CallerSecretChanges::default()
    };
    caller_secret::change::<KeyId>(control, &Actor::Admin, "demo", &revoked_id, &disabled).unwrap();
    let _agent = node.agent(folder.path(), &backend.url);
    eventually("a request is relayed", || {
        (node.response(&good).status == 200).then_some(())
    });
    let copied = || {
        std::fs::metadata(node.data_dir.join("records.sealed"))
            .and_then(|file| file.modified())
            .ok()
    };
    eventually("the copy is written", copied);

    let evil = "gw_sk_eeeeeeeeeeeeeeee.secret";
    forge_keys(&postgres, &key_id, &revoked_id);
    wait_for_refused_records(&node, |count| count > 0.0);
    let outcomes = |node: &Node| [&good, evil, &revoked].map(|key| node.response(key).status);
    assert_eq!(outcomes(&node), [200, 502, 502]);
    let new = NewAccount {
        id: "acme".to_owned(),
        capture_allowed: None,
        domains_max: None,
        managed_by: None,
    };
    a_change_is_refused(&node, &new);

    let node = start_again(&postgres, node);
    eventually("a request is relayed", || {
        (node.response(&good).status == 200).then_some(())
    });
    assert_eq!(outcomes(&node), [200, 502, 502]);
    wait_for_refused_records(&node, |count| count == 2.0);

    let empty = folder.path().join("b");
    a_node_without_a_copy_does_not_start(&postgres, &empty);

    let path = folder.path().join("gateway.toml");
    std::fs::write(&path, postgres.config_text(&node.data_dir)).unwrap();
    let ended = repair(&path, &[]);
    assert!(ended.status.success(), "{ended:?}");
    assert!(
        String::from_utf8_lossy(&ended.stdout).contains("Wrote the records of revision"),
        "{ended:?}"
    );
    wait_for_refused_records(&node, |count| count == 0.0);
    assert_eq!(outcomes(&node), [200, 502, 502]);
    account::create(node.gateway.control(), &Actor::Admin, &new).unwrap();
    let _other = a_node_without_a_copy_starts_again(&postgres, empty);
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
    let hash = serde_json::to_string(&SecretHash::of("secret")).unwrap();
    let mut forged: Value = serde_json::from_str(&document).unwrap();
    (forged["id"], forged["secret"]) =
        ("e".repeat(16).into(), serde_json::from_str(&hash).unwrap());
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

fn a_change_is_refused(node: &Node, new: &NewAccount) {
    let refused = account::create(node.gateway.control(), &Actor::Admin, new)
        .unwrap_err()
        .to_string();
    assert!(
        refused.contains("gw.changes has no valid tag") && refused.contains("region repair"),
        "{refused}"
    );
}

/// Starts a node again, at the same port. It uses the copy in its data folder.
fn start_again(postgres: &Postgres, node: Node) -> Node {
    let port = node.gateway.address().port();
    let _port = hold(node.gateway.address());
    node.gateway.drain();
    let mut config = postgres.config(&node.data_dir);
    config.listen.set_port(port);
    Node {
        gateway: Gateway::start(&config).unwrap(),
        data_dir: node.data_dir,
    }
}

fn a_node_without_a_copy_does_not_start(postgres: &Postgres, folder: &Path) {
    let refused = Gateway::start(&postgres.config(folder))
        .err()
        .unwrap()
        .to_string();
    assert!(
        refused.contains("service_key eeeeeeeeeeeeeeee"),
        "{refused}"
    );
}

fn a_node_without_a_copy_starts_again(postgres: &Postgres, data_dir: PathBuf) -> Node {
    let other = Node {
        gateway: Gateway::start(&postgres.config(&data_dir)).unwrap(),
        data_dir,
    };
    assert_eq!(other.gateway.control().records().service_keys.len(), 2);
    assert_eq!(
        postgres.sql("SELECT actor FROM gw.audit WHERE action = 'region.repair'"),
        "operator"
    );
    other
}

fn wait_for_refused_records(node: &Node, is_expected: fn(f64) -> bool) {
    eventually("the node refuses this number of records", || {
        is_expected(node.metric("gw_store_refused_records ")).then_some(())
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
