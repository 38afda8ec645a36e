//! Effects of a change on other records and on the audit log.

use serde_json::{Value, json};

use crate::support::scene::Scene;

#[test]
fn a_deleted_service_leaves_the_lists_of_all_other_records() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    let account = "/accounts/demo";
    let create = |collection: &str, body: &Value| {
        let made = api.ask("POST", &format!("{account}/{collection}"), body);
        assert_eq!(made.status, 201, "{collection}: {}", made.body);
        made.location.trim_start_matches("/api/v1").to_owned()
    };
    create("services", &json!({ "id": "api" }));
    let allowed = json!({ "allowed_services": ["api", "echo"] });
    let services = json!({ "services": ["api", "echo"] });
    let agent = api.agents("demo").remove(0);
    let agent = format!("{account}/agents/{}", agent["agent_id"].as_str().unwrap());
    api.patch(&agent, &services);
    let records = [
        (create("credentials", &allowed), "allowed_services"),
        (create("service-keys", &allowed), "allowed_services"),
        (create("enrollment-tokens", &services), "services"),
        (agent, "services"),
    ];
    let list = |record: &str, member: &str| {
        // A token has no page of its own.
        let (collection, id) = record.rsplit_once('/').unwrap();
        let mut items = api.list(collection).into_iter();
        let of_record = items.find(|item| item.to_string().contains(id));
        of_record.unwrap()[member].clone()
    };
    for (record, member) in &records {
        assert_eq!(list(record, member), json!(["api", "echo"]), "{record}");
    }
    api.delete(&format!("{account}/services/api"));
    for (record, member) in &records {
        assert_eq!(list(record, member), json!(["echo"]), "{record}");
    }
}

#[test]
fn the_audit_log_names_the_signing_key_that_a_rotation_has_deleted() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    let rotate = |body: &Value| {
        let made = api.ask("POST", "/signing-keys/rotate", body);
        assert!([200, 201].contains(&made.status), "{}", made.body);
        let entries = api.list("/audit-log?limit=1");
        (made.body, entries[0]["detail"]["deleted"].clone())
    };
    let immediately = json!({ "immediately": true });
    let (_, deleted) = rotate(&immediately);
    assert_eq!(deleted, Value::Null);
    let (waiting, deleted) = rotate(&json!({}));
    assert_eq!(deleted, Value::Null);
    let (_, deleted) = rotate(&immediately);
    assert_eq!(deleted, json!([waiting["kid"]]));
}
