//! Paths and queries pass unchanged, over every HTTP version on both sides.

use serde_json::{Value, json};

use super::{exchange_frames, target_backend};
use crate::support::peers::caller::HOST;
use crate::support::peers::http2_backend;
use crate::support::peers::http2_frames::{self, END_STREAM};
use crate::support::request_log::{capture_bodies, record, replay};
use crate::support::scene::Scene;

/// Targets with every visible ASCII character except `#` and, in the path, `?`; each short enough
/// for an HPACK string with a one-byte length.
fn targets() -> Vec<String> {
    let visible: Vec<char> = ('!'..='~').filter(|character| *character != '#').collect();
    let pieces = visible
        .chunks(32)
        .map(|piece| piece.iter().collect::<String>());
    let mut targets: Vec<String> = pieces
        .flat_map(|piece| [format!("/{}", piece.replace('?', "")), format!("/?{piece}")])
        .collect();
    let others = [
        "/?filter={\"a\":1}",
        "/`a`<b>\"c\"|^\\{}",
        "//",
        "/?",
        "/??",
        "/%zz%",
        "/ü?ü=é",
    ];
    targets.extend(others.map(str::to_owned));
    targets
}

/// Sends a GET as raw HTTP/2 frames. Returns the response body, or the error code of a reset.
fn get_over_http_2(scene: &Scene, target: &str) -> Result<String, u32> {
    let block = http2_frames::get(target, Some(&scene.about.service_key));
    let body = exchange_frames(scene, &http2_frames::headers(1, END_STREAM, &block))?;
    Ok(String::from_utf8(body).unwrap())
}

#[test]
fn every_visible_byte_reaches_an_http1_backend() {
    let scene = Scene::service().agent_to(target_backend()).start();
    let mut caller = scene.connect();
    for target in targets() {
        let response = caller.ask(scene.get(&target));
        assert_eq!(response.status, 200, "{target}");
        assert_eq!(String::from_utf8(response.body).unwrap(), target);
        assert_eq!(get_over_http_2(&scene, &target), Ok(target));
    }
}

#[test]
fn every_visible_byte_reaches_an_http2_backend() {
    let scene = Scene::service().agent_to(http2_backend::http2()).start();
    let mut caller = scene.connect();
    for target in targets() {
        let response = caller.ask(scene.get(&target));
        let over_http1 = String::from_utf8(response.body).unwrap();
        let over_http2 = get_over_http_2(&scene, &target).unwrap();
        for text in [over_http1, over_http2] {
            assert!(
                text.contains(&format!("{HOST}{target} ")),
                "{text}: {target}"
            );
        }
    }
}

#[test]
fn fragments_and_invalid_target_bytes_are_refused() {
    const PROTOCOL_ERROR: u32 = 1;
    let scene = Scene::service().agent_to(target_backend()).start();
    for target in ["/a#b", "/#", "/?a#b", "#", "/a\x7f", "/a\x01"] {
        let response = scene.connect().ask(scene.get(target));
        assert_eq!(response.code(), "GW_BAD_REQUEST", "{target:?}");
        let answer = get_over_http_2(&scene, target);
        assert_eq!(answer, Err(PROTOCOL_ERROR), "{target:?}");
    }
    // In HTTP/1.1, a space ends the target.
    assert_eq!(get_over_http_2(&scene, "/a b"), Err(PROTOCOL_ERROR));
}

/// Sends a GET for `target`; returns its record, once it is in the log.
fn logged(scene: &Scene, target: &str) -> Value {
    let response = scene.connect().ask(scene.get(target));
    assert_eq!(String::from_utf8_lossy(&response.body), target);
    record(&scene.api(), response.header("x-gw-request-id"))
}

/// The target of a record.
fn shown(record: &Value) -> String {
    let path = record["path"].as_str().unwrap();
    let query = record["query"].as_str();
    query.map_or(path.to_owned(), |query| format!("{path}?{query}"))
}

#[test]
fn every_visible_byte_is_logged_and_replayed() {
    let scene = Scene::service().agent_to(target_backend()).start();
    let api = scene.api();
    capture_bodies(&api);
    let mut targets = targets();
    targets.retain(|target| !target.ends_with("/?"));
    for target in targets {
        let original = logged(&scene, &target);
        assert_eq!(shown(&original), target);
        let id = original["id"].as_str().unwrap();
        let again = replay(&api, id, &json!({}));
        assert_eq!((again.status, shown(&again.body)), (201, target.clone()));
        assert_eq!(again.body["status"], 200, "{target}");
        // The backend was asked for the target.
        assert_eq!(again.body["bytes_out"], target.len(), "{target}");
        let edited = replay(&api, id, &json!({ "target": target }));
        assert_eq!((edited.status, shown(&edited.body)), (201, target));
    }
}

#[test]
fn keys_in_a_logged_target_are_masked() {
    let scene = Scene::service().agent_to(target_backend()).start();
    capture_bodies(&scene.api());
    let masked = logged(&scene, "/\"gw_sk_a.b\"?<k>={\"gw_sk_abc.DEF123\"}`");
    let expected = "/\"gw_sk_a.***\"?<k>={\"gw_sk_abc.***\"}`";
    assert_eq!(shown(&masked), expected);
}
