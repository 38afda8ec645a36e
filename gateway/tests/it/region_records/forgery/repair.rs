//! A forged key, and the repair of the region.

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

    // Another secret for a genuine key, and a revoked key that is enabled again.
    let document = postgres.sql(&format!(
        "SELECT document FROM gw.records WHERE id = '{key_id}'"
    ));
    let evil = "gw_sk_eeeeeeeeeeeeeeee.secret";
    let hash = serde_json::to_string(&SecretHash::of("secret")).unwrap();
    let mut forged: Value = serde_json::from_str(&document).unwrap();
    (forged["id"], forged["secret"]) =
        ("e".repeat(16).into(), serde_json::from_str(&hash).unwrap());
    forge(
        &postgres,
        "service_key",
        &"e".repeat(16),
        &forged.to_string(),
    );
    let document = postgres.sql(&format!(
        "SELECT document FROM gw.records WHERE id = '{revoked_id}'"
    ));
    forge(
        &postgres,
        "service_key",
        &revoked_id,
        &document.replace("false", "true"),
    );
    eventually("the node notices", || {
        (node.metric("gw_store_refused_records ") > 0.0).then_some(())
    });
    let outcomes = |node: &Node| [&good, evil, &revoked].map(|key| node.response(key).status);
    assert_eq!(outcomes(&node), [200, 502, 502]);
    let new = NewAccount {
        id: "acme".to_owned(),
        capture_allowed: None,
        domains_max: None,
        managed_by: None,
    };
    let refused = account::create(node.gateway.control(), &Actor::Admin, &new)
        .unwrap_err()
        .to_string();
    assert!(
        refused.contains("gw.changes has no valid tag") && refused.contains("region repair"),
        "{refused}"
    );

    // A node that starts now uses the copy in its data folder.
    let port = node.gateway.address().port();
    let _port = hold(node.gateway.address());
    node.gateway.drain();
    let mut config = postgres.config(&node.data_dir);
    config.listen.set_port(port);
    let node = Node {
        gateway: Gateway::start(&config).unwrap(),
        data_dir: node.data_dir,
    };
    eventually("a request is relayed", || {
        (node.response(&good).status == 200).then_some(())
    });
    assert_eq!(outcomes(&node), [200, 502, 502]);
    eventually("the node notices", || {
        (node.metric("gw_store_refused_records ") == 2.0).then_some(())
    });

    // A node without a copy does not start.
    let empty = folder.path().join("b");
    let refused = Gateway::start(&postgres.config(&empty))
        .err()
        .unwrap()
        .to_string();
    assert!(
        refused.contains("service_key eeeeeeeeeeeeeeee"),
        "{refused}"
    );

    let path = folder.path().join("gateway.toml");
    std::fs::write(&path, postgres.config_text(&node.data_dir)).unwrap();
    let ended = gw_gateway()
        .args(["region", "repair", "--config"])
        .arg(&path)
        .output()
        .unwrap();
    assert!(ended.status.success(), "{ended:?}");
    assert!(
        String::from_utf8_lossy(&ended.stdout).contains("Wrote the records of revision"),
        "{ended:?}"
    );
    eventually("the node uses the database again", || {
        (node.metric("gw_store_refused_records ") == 0.0).then_some(())
    });
    assert_eq!(outcomes(&node), [200, 502, 502]);
    account::create(node.gateway.control(), &Actor::Admin, &new).unwrap();
    let other = Node {
        gateway: Gateway::start(&postgres.config(&empty)).unwrap(),
        data_dir: empty,
    };
    assert_eq!(other.gateway.control().records().service_keys.len(), 2);
    assert_eq!(
        postgres.sql("SELECT actor FROM gw.audit WHERE action = 'region.repair'"),
        "operator"
    );
    let ended = gw_gateway()
        .args(["region", "repair", "--config"])
        .arg(&path)
        .output()
        .unwrap();
    assert!(
        String::from_utf8_lossy(&ended.stderr).contains("there is nothing to repair"),
        "{ended:?}"
    );

    // Changes that are missing are not discarded unasked.
    postgres.sql(
        "UPDATE gw.region SET revision = revision + 5; UPDATE gw.records SET tag = ''; DELETE \
              FROM gw.changes",
    );
    let repair = |more: &[&str]| {
        let ended = gw_gateway()
            .args(["region", "repair", "--config"])
            .arg(&path)
            .args(more)
            .output()
            .unwrap();
        String::from_utf8([ended.stdout, ended.stderr].concat()).unwrap()
    };
    assert!(
        repair(&[]).contains("does not have all changes after revision"),
        "{}",
        repair(&[])
    );
    assert!(repair(&["--discard-later-changes"]).contains("Wrote the records of revision"));
    eventually("the node uses the database again", || {
        (node.metric("gw_store_refused_records ") == 0.0).then_some(())
    });
}
