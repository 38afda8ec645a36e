//! The administration API and the commands that use it.

mod audit;
mod commands;
mod consequences;

use serde_json::{Value, json};

use crate::support::admin_api::Api;
use crate::support::peers::caller::HOST;
use crate::support::scene::Scene;
use crate::support::stopwatch::within_a_second;

/// Path of the service of the demo.
const ECHO: &str = "/accounts/demo/services/echo";

#[test]
fn each_kind_of_resource_is_created_read_changed_and_deleted() {
    let scene = Scene::service().agent().start();
    let api = Api::of(&scene.about);
    let created = api.ask("POST", "/accounts", &json!({ "id": "acme" }));
    assert_eq!(
        (created.status, created.location.as_str()),
        (201, "/api/v1/accounts/acme")
    );
    assert_eq!(
        api.ask("POST", "/accounts", &json!({ "id": "acme" }))
            .status,
        200
    );

    services_are_created_once_and_changed(&api);

    for (collection, id, secret, prefix) in [
        ("credentials", "client_id", "client_secret", "gw_cs_"),
        ("service-keys", "key_id", "service_key", "gw_sk_"),
    ] {
        secrets_are_shown_once_and_rotated(&api, collection, id, secret, prefix);
    }
    enrollment_tokens_are_shown_once_and_deleted(&api);
    agents_are_changed_revoked_and_deleted(&api);

    assert_eq!(
        api.ask("DELETE", "/accounts/acme", &Value::Null).status,
        409
    );
    assert_eq!(
        api.ask("DELETE", "/accounts/acme/services/api", &Value::Null)
            .status,
        204
    );
    assert_eq!(
        api.ask("DELETE", "/accounts/acme", &Value::Null).status,
        204
    );
    assert_eq!(api.get("/accounts/acme").status, 404);

    the_audit_log_has_every_change_and_no_secret(&api);
}

fn services_are_created_once_and_changed(api: &Api) {
    let service = json!({ "id": "api", "modes": ["jwt"], "burst": 7 });
    let created = api.ask("POST", "/accounts/acme/services", &service);
    assert_eq!(
        (created.status, &created.body["hostname"]),
        (201, &json!("acme--api.eu1.gw.localhost"))
    );
    assert_eq!(
        api.get(created.location.trim_start_matches("/api/v1")).body,
        created.body
    );
    assert_eq!(
        api.ask("POST", "/accounts/acme/services", &service).status,
        200
    );
    assert_eq!(
        api.ask(
            "POST",
            "/accounts/acme/services",
            &json!({ "id": "api", "burst": 8 })
        )
        .status,
        409
    );
    let changed = api.ask(
        "PATCH",
        "/accounts/acme/services/api",
        &json!({ "enabled": false, "refill_per_minute": 9 }),
    );
    assert_eq!(
        (&changed.body["enabled"], &changed.body["burst"]),
        (&json!(false), &json!(7))
    );
    assert_eq!(api.get("/accounts/acme/services/api").body, changed.body);
    assert_eq!(
        (&changed.body["retries"], &changed.body["affinity"]),
        (&json!(true), &json!("none"))
    );
    let several_agents = json!({ "retries": false, "affinity": "header:X-Session" });
    let changed = api.ask("PATCH", "/accounts/acme/services/api", &several_agents);
    assert_eq!(
        (&changed.body["retries"], &changed.body["affinity"]),
        (&json!(false), &json!("header:x-session"))
    );
    assert_eq!(api.get("/accounts/acme/services/api").body, changed.body);
}

fn secrets_are_shown_once_and_rotated(
    api: &Api,
    collection: &str,
    id: &str,
    secret: &str,
    prefix: &str,
) {
    let path = format!("/accounts/acme/{collection}");
    let new = json!({ "name": "ci", "allowed_services": ["api"] });
    let created = api.ask("POST", &path, &new);
    assert_eq!(
        (created.status, created.cache_control.as_str()),
        (201, "no-store")
    );
    assert!(created.body[secret].as_str().unwrap().starts_with(prefix));
    let item = format!("{path}/{}", created.body[id].as_str().unwrap());
    // The secret is shown once.
    let again = api.ask("POST", &path, &new);
    assert_eq!(
        (again.status, again.body.get(secret), &again.body[id]),
        (200, None, &created.body[id])
    );
    assert_eq!(api.get(&item).body.get(secret), None);
    assert_eq!(api.get(&path).body["items"][0].get(secret), None);
    assert_eq!(
        api.ask(
            "POST",
            &path,
            &json!({ "name": "ci", "allowed_services": [] })
        )
        .status,
        409
    );
    let rotated = api.ask("POST", &format!("{item}/rotate-secret"), &Value::Null);
    assert_eq!(
        (rotated.status, rotated.cache_control.as_str()),
        (200, "no-store")
    );
    assert_ne!(rotated.body[secret], created.body[secret]);
    let off = api.ask("PATCH", &item, &json!({ "enabled": false }));
    assert_eq!((off.status, &off.body["enabled"]), (200, &json!(false)));
    assert_eq!(api.ask("DELETE", &item, &Value::Null).status, 204);
    assert_eq!(api.get(&item).status, 404);
}

fn enrollment_tokens_are_shown_once_and_deleted(api: &Api) {
    let token = api.ask(
        "POST",
        "/accounts/acme/enrollment-tokens",
        &json!({ "services": ["api"] }),
    );
    assert_eq!(
        (token.status, token.cache_control.as_str()),
        (201, "no-store")
    );
    let item = format!(
        "/accounts/acme/enrollment-tokens/{}",
        token.body["id"].as_str().unwrap()
    );
    assert_eq!(api.get(&item).body.get("token"), None);
    assert_eq!(api.ask("DELETE", &item, &Value::Null).status, 204);
}

fn agents_are_changed_revoked_and_deleted(api: &Api) {
    let agents = api.get("/accounts/demo/agents").body;
    let agent = &agents["items"][0];
    assert_eq!(
        (&agent["status"], &agent["tunnels"][0]["service"]),
        (&json!("approved"), &json!("demo--echo"))
    );
    let item = format!(
        "/accounts/demo/agents/{}",
        agent["agent_id"].as_str().unwrap()
    );
    assert_eq!(
        (
            &agent["standby"],
            api.ask("PATCH", &item, &json!({ "standby": 1 })).status
        ),
        (&json!(false), 422)
    );
    let changed = api.ask("PATCH", &item, &json!({ "standby": true }));
    assert_eq!(
        (&changed.body["standby"], &changed.body["name"]),
        (&json!(true), &agent["name"])
    );
    assert_eq!(
        api.ask("POST", &format!("{item}/revoke"), &Value::Null)
            .body["status"],
        "revoked"
    );
    assert_eq!(
        api.ask("POST", &format!("{item}/approve"), &Value::Null)
            .status,
        409
    );
    assert_eq!(api.ask("DELETE", &item, &Value::Null).status, 204);
}

/// The log lists the newest change first.
fn the_audit_log_has_every_change_and_no_secret(api: &Api) {
    let log = api.get("/audit-log?account=acme").body;
    let actions: Vec<&str> = log["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| e["action"].as_str().unwrap())
        .collect();
    assert_eq!(
        (actions[0], actions[1], actions.last()),
        ("account.delete", "service.delete", Some(&"account.create"))
    );
    assert!(
        log["items"]
            .as_array()
            .unwrap()
            .iter()
            .all(|entry| entry["actor"] == "admin")
    );
    let text = log.to_string();
    assert!(
        !text.contains("gw_cs_") && !text.contains("gw_sk_") && !text.contains("gw_et_"),
        "{text}"
    );
}

#[test]
fn lists_are_paginated() {
    let scene = Scene::service().agent().start();
    let api = Api::of(&scene.about);
    for number in 0..7 {
        assert_eq!(
            api.ask(
                "POST",
                "/accounts",
                &json!({ "id": format!("acc{number}") })
            )
            .status,
            201
        );
    }
    for path in ["/accounts", "/audit-log"] {
        let whole = api.get(&format!("{path}?limit=1000")).body;
        assert!(whole["next_cursor"].is_null());
        let mut seen = Vec::new();
        let mut cursor = String::new();
        loop {
            let page = api.get(&format!("{path}?limit=3{cursor}")).body;
            seen.extend(page["items"].as_array().unwrap().iter().cloned());
            let Some(next) = page["next_cursor"].as_str() else {
                break;
            };
            cursor = format!("&cursor={next}");
        }
        assert_eq!(&seen, whole["items"].as_array().unwrap(), "{path}");
    }
}

/// Method, path and body of a request, and status, kind and a part of the detail of its refusal.
const REFUSED: [(&str, &str, &str, u16, &str, &str); 16] = [
    (
        "GET",
        "/accounts/nobody",
        "",
        404,
        "not-found",
        "no account nobody",
    ),
    ("GET", "/nowhere", "", 404, "not-found", "openapi.json"),
    ("PUT", "/accounts", "", 405, "method-not-allowed", "Allow"),
    (
        "POST",
        "/accounts",
        r#"{"id": "NO"}"#,
        422,
        "invalid",
        "3 to 15 characters",
    ),
    (
        "POST",
        "/accounts",
        r#"{"name": "acme"}"#,
        422,
        "invalid",
        "unknown field `name`",
    ),
    ("POST", "/accounts", "[]", 422, "invalid", "map"),
    ("GET", "/accounts?limit=0", "", 422, "invalid", "1 to 1000"),
    ("GET", "/accounts?limit=x", "", 400, "bad-request", "limit"),
    (
        "PATCH",
        ECHO,
        r#"{"modes": []}"#,
        422,
        "invalid",
        "at least one",
    ),
    (
        "PATCH",
        ECHO,
        r#"{"burst": 0}"#,
        422,
        "invalid",
        "at least 1",
    ),
    (
        "PATCH",
        ECHO,
        r#"{"hsts_max_age_seconds": 63072001}"#,
        422,
        "invalid",
        "from 0 to 63072000",
    ),
    (
        "PATCH",
        ECHO,
        r#"{"affinity": "sticky"}"#,
        422,
        "invalid",
        "\"header:NAME\" or \"client\"",
    ),
    (
        "PATCH",
        ECHO,
        r#"{"affinity": "cookie:a b"}"#,
        422,
        "invalid",
        "name of the cookie",
    ),
    (
        "PATCH",
        ECHO,
        r#"{"affinity": "header:Host"}"#,
        422,
        "invalid",
        "host does not reach the agent",
    ),
    (
        "POST",
        "/accounts/demo/credentials",
        r#"{"allowed_services": ["no"]}"#,
        409,
        "conflict",
        "no service no",
    ),
    (
        "DELETE",
        "/accounts/demo",
        "",
        409,
        "conflict",
        "delete them first",
    ),
];

#[test]
fn errors_are_problem_details() {
    let scene = Scene::service().agent().start();
    let api = Api::of(&scene.about);
    let large = json!({ "id": "x".repeat(70_000) }).to_string();
    let refused_for_its_size = ("POST", "/accounts", &*large, 413, "too-large", "limit");
    for (method, path, body, status, kind, says) in
        REFUSED.into_iter().chain([refused_for_its_size])
    {
        let reply = api.ask_raw(method, path, body);
        assert_eq!(
            (reply.status, reply.content_type.as_str()),
            (status, "application/problem+json"),
            "{reply:?}"
        );
        assert_eq!(
            reply.body["type"],
            format!("urn:gw:problem:{kind}"),
            "{reply:?}"
        );
        assert_eq!(reply.body["status"], status, "{reply:?}");
        assert!(
            reply.body["detail"].as_str().unwrap().contains(says),
            "{says}: {reply:?}"
        );
    }
    for (field, value) in [("burst", json!(0)), ("affinity", json!("sticky"))] {
        assert_eq!(
            api.ask("PATCH", ECHO, &json!({ field: value })).body["field"],
            field
        );
    }
    let token = format!("Bearer {}", scene.about.admin_token);
    assert_eq!(
        api.send("POST", "/accounts", &token, "text/plain", "{}")
            .status,
        415
    );
    assert_eq!(
        api.send("POST", "/accounts", &token, "application/json", "{")
            .status,
        400
    );
    assert_eq!(
        api.send("PATCH", ECHO, &token, "application/merge-patch+json", "{}")
            .status,
        200
    );
    for wrong in [
        "",
        "Bearer",
        "Bearer x",
        "Basic x",
        &token[..token.len() - 1],
    ] {
        let reply = api.send("GET", "/accounts", wrong, "application/json", "");
        assert_eq!(
            (reply.status, reply.body["type"].as_str()),
            (401, Some("urn:gw:problem:unauthorized")),
            "{wrong}"
        );
    }
    let document = api.send("GET", "/openapi.json", "", "application/json", "");
    assert_eq!(
        (document.status, document.body["openapi"].as_str()),
        (200, Some("3.1.0"))
    );
}

#[test]
fn a_key_is_refused_as_soon_as_it_is_disabled() {
    let scene = Scene::service().agent().start();
    let api = Api::of(&scene.about);
    let new = api
        .ask(
            "POST",
            "/accounts/demo/service-keys",
            &json!({ "allowed_services": ["echo"] }),
        )
        .body;
    let mut caller = scene.connect();
    let mut call = || {
        let key = new["service_key"].as_str().unwrap();
        caller.send(format!(
            "GET / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n\r\n"
        ));
        caller.response()
    };
    let item = format!(
        "/accounts/demo/service-keys/{}",
        new["key_id"].as_str().unwrap()
    );
    // After each change, the first request that follows it at the worker has its effect.
    for _ in 0..5 {
        assert_eq!(
            api.ask("PATCH", &item, &json!({ "enabled": true })).status,
            200
        );
        api.await_workers();
        assert_eq!(call().status, 200);
        assert_eq!(
            api.ask("PATCH", &item, &json!({ "enabled": false })).status,
            200
        );
        within_a_second("the change at the workers", || api.await_workers());
        let refused = call();
        assert_eq!(
            (refused.status.as_u16(), refused.code().as_str()),
            (502, "GW_SERVICE_KEY_INVALID")
        );
    }
}
