//! Paths and queries pass unchanged, over every HTTP version on both sides.

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::scene::Scene;

use crate::support::eventually;
use crate::support::peers::http2_caller::{on_a_reactor, tls};
use crate::support::peers::http2_frames::{
    DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, RST_STREAM, SETTINGS, frame,
};
use crate::support::peers::{backend, http2_backend, http2_frames};

/// A backend that answers with the request target.
fn target_backend() -> String {
    backend::start(|mut peer| {
        while let Ok((head, _, _)) = peer.request() {
            let target = head.target.as_str();
            peer.send(format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{target}",
                target.len()
            ));
        }
    })
}

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
    targets.extend(
        [
            "/?filter={\"a\":1}",
            "/`a`<b>\"c\"|^\\{}",
            "//",
            "/?",
            "/??",
            "/%zz%",
            "/ü?ü=é",
        ]
        .map(str::to_owned),
    );
    targets
}

/// Sends a GET as raw HTTP/2 frames. Returns the response body, or the error code of a reset.
fn get_over_http_2(scene: &Scene, target: &str) -> Result<Vec<u8>, u32> {
    on_a_reactor(async {
        let mut stream = tls(&scene.about).await;
        let block = http2_frames::get(target, Some(&scene.about.service_key));
        let head = frame(HEADERS, END_HEADERS | END_STREAM, 1, &block);
        let sent = [PREFACE, &frame(SETTINGS, 0, 0, &[]), &head].concat();
        AsyncWriteExt::write_all(&mut stream, &sent).await.unwrap();
        AsyncWriteExt::flush(&mut stream).await.unwrap();
        let mut body = Vec::new();
        loop {
            let mut head = [0; 9];
            stream.read_exact(&mut head).await.unwrap();
            let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
            stream.read_exact(&mut payload).await.unwrap();
            match head[3] {
                RST_STREAM => return Err(u32::from_be_bytes(payload.try_into().unwrap())),
                DATA => body.extend_from_slice(&payload),
                _ => {}
            }
            if matches!(head[3], HEADERS | DATA) && head[4] & END_STREAM != 0 {
                return Ok(body);
            }
        }
    })
}

#[test]
fn every_visible_byte_reaches_an_http1_backend() {
    let scene = Scene::service().agent_to(target_backend()).start();
    let mut caller = scene.connect();
    for target in targets() {
        caller.send(scene.get(&target));
        let response = caller.response();
        assert_eq!(
            (
                response.status.as_u16(),
                String::from_utf8(response.body).unwrap()
            ),
            (200, target.clone())
        );
        let body = get_over_http_2(&scene, &target)
            .unwrap_or_else(|reason| panic!("{target}: reset for {reason}"));
        assert_eq!(String::from_utf8(body).unwrap(), target);
    }
}

#[test]
fn every_visible_byte_reaches_an_http2_backend() {
    let scene = Scene::service().agent_to(http2_backend::http2()).start();
    let mut caller = scene.connect();
    for target in targets() {
        caller.send(scene.get(&target));
        let response = String::from_utf8(caller.response().body).unwrap();
        assert!(
            response.contains(&format!("{}{target} ", crate::support::peers::caller::HOST)),
            "{response} for {target}"
        );
        let body = get_over_http_2(&scene, &target)
            .unwrap_or_else(|reason| panic!("{target}: reset for {reason}"));
        let response = String::from_utf8(body).unwrap();
        assert!(
            response.contains(&format!("{}{target} ", crate::support::peers::caller::HOST)),
            "{response} for {target}"
        );
    }
}

#[test]
fn fragments_and_invalid_target_bytes_are_refused() {
    let scene = Scene::service().agent_to(target_backend()).start();
    for target in ["/a#b", "/#", "/?a#b", "#", "/a\x7f", "/a\x01"] {
        let mut caller = scene.connect();
        caller.send(scene.get(target));
        assert_eq!(caller.response().code(), "GW_BAD_REQUEST", "{target:?}");
        assert_eq!(get_over_http_2(&scene, target), Err(1), "{target:?}");
    }
    assert_eq!(get_over_http_2(&scene, "/a b"), Err(1));
}

#[test]
fn every_visible_byte_is_logged_and_replayed() {
    let scene = Scene::service().agent_to(target_backend()).start();
    let api = scene.api();
    let changes = json!({ "capture_request_body": true, "capture_response_body": true });
    assert_eq!(
        api.ask("PATCH", "/accounts/demo/services/echo", &changes)
            .status,
        200
    );
    let mut caller = scene.connect();
    let mut record = |target: &str| {
        caller.send(scene.get(target));
        let response = caller.response();
        assert_eq!(String::from_utf8_lossy(&response.body), target);
        let path = format!("/requests/{}", response.header("x-gw-request-id"));
        let found = eventually("the request is in the log", || {
            Some(api.get(&path)).filter(|reply| reply.status == 200)
        });
        (path, found.body)
    };
    let shown = |record: &Value| {
        let text = |field: &str| record[field].as_str().map(str::to_owned);
        text("query").map_or(text("path").unwrap(), |query| {
            format!("{}?{query}", text("path").unwrap())
        })
    };
    for target in targets()
        .into_iter()
        .filter(|target| !target.ends_with("/?"))
    {
        let (path, original) = record(&target);
        assert_eq!(shown(&original), target);
        let again = api.ask("POST", &format!("{path}/replay"), &json!({}));
        assert_eq!(
            (
                again.status,
                shown(&again.body),
                again.body["status"].as_u64()
            ),
            (201, target.clone(), Some(200))
        );
        let bytes = again.body["bytes_out"].as_u64().unwrap();
        assert_eq!(
            bytes,
            target.len() as u64,
            "the backend was asked for {target}"
        );
        let edited = api.ask(
            "POST",
            &format!("{path}/replay"),
            &json!({ "target": target }),
        );
        assert_eq!((edited.status, shown(&edited.body)), (201, target));
    }
    let (_, masked) = record("/\"gw_sk_a.b\"?<k>={\"gw_sk_abc.DEF123\"}`");
    assert_eq!(shown(&masked), "/\"gw_sk_a.***\"?<k>={\"gw_sk_abc.***\"}`");
}
