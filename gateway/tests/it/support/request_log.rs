//! Requests to a scene and their records in the request log.

use serde_json::{Value, json};

use super::admin_api::{Api, Reply};
use super::eventually;
use super::scene::Scene;

/// Waits for the record of the request with this id.
pub(crate) fn record(api: &Api, id: &str) -> Value {
    eventually("the request is in the log", || {
        let reply = api.get(&format!("/requests/{id}"));
        (reply.status == 200).then_some(reply.body)
    })
}

/// Asserts that `value` has these fields with these values. A field that is missing equals `null`.
#[track_caller]
pub(crate) fn assert_fields(value: &Value, expected: &Value) {
    for (field, expected) in expected.as_object().unwrap() {
        assert_eq!(&value[field], expected, "{field} of {value}");
    }
}

/// Asks for a replay of the request with this id.
pub(crate) fn replay(api: &Api, id: &str, edits: &Value) -> Reply {
    api.ask("POST", &format!("/requests/{id}/replay"), edits)
}

/// Turns on capture of request and response bodies for the scene's service.
#[track_caller]
pub(crate) fn capture_bodies(api: &Api) {
    let changes = json!({ "capture_request_body": true, "capture_response_body": true });
    api.change_service("demo", "echo", &changes);
}

/// Sends `request` on a new connection; returns the status and the request id of the response.
pub(crate) fn call(scene: &Scene, request: &str) -> (u16, String) {
    let mut caller = scene.connect();
    caller.send(request);
    let response = caller.response();
    (
        response.status.as_u16(),
        response.header("x-gw-request-id").to_owned(),
    )
}
