//! The administration API and the commands that use it.

mod audit;
mod commands;
mod consequences;

use serde_json::{Value, json};

use super::assert_says;
use crate::support::peers::caller::HOST;
use crate::support::scene::Scene;
use crate::support::stopwatch::within_a_second;

/// Path of the service of the demo.
const ECHO: &str = "/accounts/demo/services/echo";

#[test]
fn an_account_is_created_once_and_deleted_when_it_has_no_service() {
    let scene = Scene::service().start();
    let api = scene.api();
    let acme = json!({ "id": "acme" });
    let created = api.ask("POST", "/accounts", &acme);
    assert_eq!(created.status, 201);
    assert_eq!(created.location, "/api/v1/accounts/acme");
    assert_eq!(api.ask("POST", "/accounts", &acme).status, 200);
    api.post("/accounts/acme/services", &json!({ "id": "api" }));
    for (path, status) in [
        ("/accounts/acme", 409),
        ("/accounts/acme/services/api", 204),
        ("/accounts/acme", 204),
    ] {
        let deleted = api.ask("DELETE", path, &Value::Null);
        assert_eq!(deleted.status, status, "{path}: {deleted:?}");
    }
    assert_eq!(api.get("/accounts/acme").status, 404);
}

#[test]
fn a_service_is_created_once_and_changed() {
    let scene = Scene::service().start();
    let api = scene.api();
    api.create_account("acme");
    let create = |service: &Value| api.ask("POST", "/accounts/acme/services", service);
    let new = json!({ "id": "api", "modes": ["jwt"], "burst": 7 });
    let created = create(&new);
    assert_eq!(created.status, 201);
    assert_eq!(created.body["hostname"], "acme--api.eu1.gw.localhost");
    let path = created.location.trim_start_matches("/api/v1");
    assert_eq!(api.get(path).body, created.body);
    assert_eq!(create(&new).status, 200);
    assert_eq!(create(&json!({ "id": "api", "burst": 8 })).status, 409);
    for (changes, expected) in [
        (
            json!({ "enabled": false, "refill_per_minute": 9 }),
            json!({ "enabled": false, "burst": 7, "retries": true, "affinity": "none" }),
        ),
        (
            json!({ "retries": false, "affinity": "header:X-Session" }),
            json!({ "retries": false, "affinity": "header:x-session" }),
        ),
    ] {
        let changed = api.patch("/accounts/acme/services/api", &changes);
        for (setting, value) in expected.as_object().unwrap() {
            assert_eq!(&changed[setting], value, "{setting} after {changes}");
        }
        assert_eq!(api.get("/accounts/acme/services/api").body, changed);
    }
}

#[test]
fn a_secret_is_shown_once_and_rotated() {
    let scene = Scene::service().start();
    let api = scene.api();
    api.create_service("acme", "api");
    for (collection, id, secret, prefix) in [
        ("credentials", "client_id", "client_secret", "gw_cs_"),
        ("service-keys", "key_id", "service_key", "gw_sk_"),
    ] {
        let path = format!("/accounts/acme/{collection}");
        let new = json!({ "name": "ci", "allowed_services": ["api"] });
        let created = api.ask("POST", &path, &new);
        assert_eq!((created.status, &*created.cache_control), (201, "no-store"));
        assert!(created.body[secret].as_str().unwrap().starts_with(prefix));
        let item = format!("{path}/{}", created.body[id].as_str().unwrap());
        let again = api.ask("POST", &path, &new);
        assert_eq!((again.status, again.body.get(secret)), (200, None));
        assert_eq!(again.body[id], created.body[id]);
        assert_eq!(api.get(&item).body.get(secret), None);
        assert_eq!(api.list(&path)[0].get(secret), None);
        let other = json!({ "name": "ci", "allowed_services": [] });
        assert_eq!(api.ask("POST", &path, &other).status, 409);
        let rotated = api.ask("POST", &format!("{item}/rotate-secret"), &Value::Null);
        assert_eq!((rotated.status, &*rotated.cache_control), (200, "no-store"));
        assert_ne!(rotated.body[secret], created.body[secret]);
        let off = api.ask("PATCH", &item, &json!({ "enabled": false }));
        assert_eq!((off.status, &off.body["enabled"]), (200, &json!(false)));
        assert_eq!(api.ask("DELETE", &item, &Value::Null).status, 204);
        assert_eq!(api.get(&item).status, 404);
    }
}

#[test]
fn an_enrollment_token_is_shown_once_and_deleted() {
    let scene = Scene::service().start();
    let api = scene.api();
    let path = "/accounts/demo/enrollment-tokens";
    let token = api.ask("POST", path, &json!({ "services": ["echo"] }));
    assert_eq!((token.status, &*token.cache_control), (201, "no-store"));
    let item = format!("{path}/{}", token.body["id"].as_str().unwrap());
    assert_eq!(api.get(&item).body.get("token"), None);
    assert_eq!(api.ask("DELETE", &item, &Value::Null).status, 204);
}

#[test]
fn an_agent_is_changed_revoked_and_deleted() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    let agent = api.agents("demo").remove(0);
    assert_eq!(agent["status"], "approved");
    assert_eq!(agent["standby"], false);
    assert_eq!(agent["tunnels"][0]["service"], "demo--echo");
    let item = format!(
        "/accounts/demo/agents/{}",
        agent["agent_id"].as_str().unwrap()
    );
    let wrong = api.ask("PATCH", &item, &json!({ "standby": 1 }));
    assert_eq!(wrong.status, 422, "{wrong:?}");
    let changed = api.patch(&item, &json!({ "standby": true }));
    assert_eq!(changed["standby"], true);
    assert_eq!(changed["name"], agent["name"]);
    let revoked = api.post(&format!("{item}/revoke"), &Value::Null);
    assert_eq!(revoked["status"], "revoked");
    let approved = api.ask("POST", &format!("{item}/approve"), &Value::Null);
    assert_eq!(approved.status, 409, "{approved:?}");
    assert_eq!(api.ask("DELETE", &item, &Value::Null).status, 204);
}

#[test]
fn the_audit_log_has_every_change_and_no_secret() {
    let scene = Scene::service().start();
    let api = scene.api();
    api.create_service("acme", "api");
    let (key, _) = api.create_service_key("acme", &["api"]);
    let (credential, _) = api.create_credential("acme", &["api"]);
    api.create_enrollment_token("acme", &["api"]);
    let token = api.list("/accounts/acme/enrollment-tokens").remove(0);
    let secrets = ["service-keys", "credentials"]
        .into_iter()
        .zip([key, credential]);
    for (collection, id) in secrets {
        let item = format!("/accounts/acme/{collection}/{id}");
        api.post(&format!("{item}/rotate-secret"), &Value::Null);
        api.delete(&item);
    }
    let token = token["id"].as_str().unwrap();
    api.delete(&format!("/accounts/acme/enrollment-tokens/{token}"));
    api.delete("/accounts/acme/services/api");
    api.delete("/accounts/acme");

    let entries = api.list("/audit-log?account=acme");
    let text = |entry: &Value, name: &str| entry[name].as_str().unwrap().to_owned();
    let actions: Vec<String> = entries.iter().map(|it| text(it, "action")).collect();
    // The newest change is the first entry.
    assert_eq!(actions[..2], ["account.delete", "service.delete"]);
    assert_eq!(actions.last().unwrap(), "account.create");
    for entry in &entries {
        assert_eq!(entry["actor"], "admin", "{entry}");
        for secret in ["gw_cs_", "gw_sk_", "gw_et_"] {
            assert!(!entry.to_string().contains(secret), "{secret} in {entry}");
        }
    }
}

#[test]
fn lists_are_paginated() {
    let scene = Scene::service().start();
    let api = scene.api();
    for number in 0..7 {
        api.create_account(&format!("acc{number}"));
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
    let scene = Scene::service().start();
    let api = scene.api();
    let large = json!({ "id": "x".repeat(70_000) }).to_string();
    let refused_for_its_size = ("POST", "/accounts", &*large, 413, "too-large", "limit");
    for (method, path, body, status, kind, says) in
        REFUSED.into_iter().chain([refused_for_its_size])
    {
        let reply = api.ask_raw(method, path, body);
        assert_eq!(reply.status, status, "{reply:?}");
        assert_eq!(reply.content_type, "application/problem+json", "{reply:?}");
        let kind = format!("urn:gw:problem:{kind}");
        assert_eq!(reply.body["type"], kind, "{reply:?}");
        assert_eq!(reply.body["status"], status, "{reply:?}");
        assert_says(reply.body["detail"].as_str().unwrap(), &[says]);
    }
    for (field, value) in [("burst", json!(0)), ("affinity", json!("sticky"))] {
        let refused = api.ask("PATCH", ECHO, &json!({ field: value }));
        assert_eq!(refused.body["field"], field);
    }
}

#[test]
fn a_body_is_json_or_a_merge_patch() {
    let scene = Scene::service().start();
    let token = format!("Bearer {}", scene.about.admin_token);
    for (method, path, media_type, body, status) in [
        ("POST", "/accounts", "text/plain", "{}", 415),
        ("POST", "/accounts", "application/json", "{", 400),
        ("PATCH", ECHO, "application/merge-patch+json", "{}", 200),
    ] {
        let reply = scene.api().send(method, path, &token, media_type, body);
        assert_eq!(reply.status, status, "{media_type} {body}: {reply:?}");
    }
}

#[test]
fn all_but_the_openapi_document_requires_the_admin_token() {
    let scene = Scene::service().start();
    let get = |path: &str, authorization: &str| {
        scene
            .api()
            .send("GET", path, authorization, "application/json", "")
    };
    let token = format!("Bearer {}", scene.about.admin_token);
    let cut = &token[..token.len() - 1];
    for wrong in ["", "Bearer", "Bearer x", "Basic x", cut] {
        let reply = get("/accounts", wrong);
        assert_eq!(reply.status, 401, "{wrong}: {reply:?}");
        assert_eq!(reply.body["type"], "urn:gw:problem:unauthorized", "{wrong}");
    }
    let document = get("/openapi.json", "");
    assert_eq!(
        (document.status, &document.body["openapi"]),
        (200, &json!("3.1.0"))
    );
}

#[test]
fn a_key_is_refused_as_soon_as_it_is_disabled() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    let (id, key) = api.create_service_key("demo", &["echo"]);
    let mut caller = scene.connect();
    let mut call = || {
        caller.send(format!(
            "GET / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n\r\n"
        ));
        caller.response()
    };
    let enable = |enabled: bool| {
        let item = format!("/accounts/demo/service-keys/{id}");
        api.patch(&item, &json!({ "enabled": enabled }));
    };
    // After each change, the first request that follows it at the worker has its effect.
    for _ in 0..5 {
        enable(true);
        api.await_workers();
        assert_eq!(call().status, 200);
        enable(false);
        within_a_second("the change at the workers", || api.await_workers());
        let refused = call();
        assert_eq!(refused.status, 502);
        assert_eq!(refused.code(), "GW_SERVICE_KEY_INVALID");
    }
}
