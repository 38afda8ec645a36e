//! Calls and their records in the request log.

use gw_gateway::demo::Demo;
use serde_json::{Value, json};

use super::admin_api::Api;
use super::caller::connect;
use super::eventually;

/// The record of the request that was answered with this id, once it is there.
pub(crate) fn record(api: &Api<'_>, id: &str) -> Value {
    eventually("the request is in the log", || {
        let reply = api.get(&format!("/requests/{id}"));
        (reply.status == 200).then_some(reply.body)
    })
}

/// Has the demo's service keep bodies.
pub(crate) fn keep_bodies(api: &Api<'_>) {
    let changes = json!({ "capture_request_body": true, "capture_response_body": true });
    assert_eq!(api.ask("PATCH", "/accounts/demo/services/echo", &changes).status, 200);
}

/// Status of what a caller gets for `request`, and the request's id.
pub(crate) fn call(demo: &Demo, request: &str) -> (u16, String) {
    let mut caller = connect(demo);
    caller.send(request);
    let response = caller.response();
    (response.status.as_u16(), response.header("x-gw-request-id").to_owned())
}
