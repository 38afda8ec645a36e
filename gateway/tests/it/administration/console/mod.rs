//! The console over HTTP: access control, pages, forms and recorded requests.

mod access;
pub(crate) mod browser;
mod fields;
mod forms;
mod own_domains;
mod own_name;
mod pages;
mod requests;

use serde_json::{Value, json};

use crate::support::apex;
use crate::support::scene::Scene;

/// Enrolls agents that never run, with a new token for all of them. Returns the id of the token,
/// and those of the agents.
fn enroll(scene: &Scene, account: &str, service: &str, count: usize) -> (String, Vec<String>) {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let path = format!("/accounts/{account}/enrollment-tokens");
    let new = json!({ "services": [service], "uses": count });
    let token = scene.api().post(&path, &new);
    let version = env!("CARGO_PKG_VERSION");
    let body = json!({ "token": token["token"], "name": "idle", "version": version });
    let agents = (0..count).map(|_| {
        let reply = apex::post_json(scene, "/enroll", "", &body);
        assert_eq!(reply.status, 201, "{}", reply.json());
        text(&reply.json()["agent_id"])
    });
    (text(&token["id"]), agents.collect())
}

/// A scene whose agents may enroll as fast as they can.
fn with_fast_enrollment() -> Scene {
    Scene::service()
        .agent()
        .configuration("enrollment_requests_per_minute = 1000000\n")
        .start()
}
