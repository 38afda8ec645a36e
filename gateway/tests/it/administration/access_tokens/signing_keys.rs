//! Rotation of the keys that sign access tokens.

use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::{Algorithm, EncodingKey};
use rusqlite::Connection;
use serde_json::{Value, json};

use super::{bearer, call, outcome};
use crate::support::admin_api::Api;
use crate::support::apex::{ask, demo_token};
use crate::support::scene::Scene;

use crate::support::eventually;

/// Makes a key that follows the active one, or that replaces it now. Returns its id.
fn rotate(api: &Api, immediately: bool) -> String {
    let key = api.post(
        "/signing-keys/rotate",
        &json!({ "immediately": immediately }),
    );
    api.await_workers();
    key["kid"].as_str().unwrap().to_owned()
}

/// The signing keys in the folder of a gateway that has ended.
pub(crate) fn stored(data_dir: &Path) -> Vec<Value> {
    let store = Connection::open(data_dir.join("gw.sqlite")).unwrap();
    let mut query = store
        .prepare("SELECT document FROM records WHERE kind = 'signing_key'")
        .unwrap();
    let documents = query.query_map([], |row| row.get::<_, String>(0)).unwrap();
    documents
        .map(|document| serde_json::from_str(&document.unwrap()).unwrap())
        .collect()
}

#[test]
fn signing_keys_rotate_without_invalidating_tokens() {
    let scene = Scene::service()
        .agent()
        .configuration("token_requests_per_minute = 10000\n")
        .start();
    let api = scene.api();
    let kids = || -> Vec<String> {
        let keys = ask(&scene, "GET /.well-known/jwks.json", "", "").json();
        keys["keys"]
            .as_array()
            .unwrap()
            .iter()
            .map(|key| key["kid"].as_str().unwrap().to_owned())
            .collect()
    };
    let kid_of = |token: &str| -> String {
        let header = URL_SAFE_NO_PAD
            .decode(token.split('.').next().unwrap())
            .unwrap();
        let header: Value = serde_json::from_slice(&header).unwrap();
        header["kid"].as_str().unwrap().to_owned()
    };
    let first = demo_token(&scene);
    // The new key is published before use: the next token is still signed with the old key.
    let next = rotate(&api, false);
    assert!(kids().contains(&next), "the next key is published");
    assert_eq!(kid_of(&demo_token(&scene)), kid_of(&first));
    let repeated = rotate(&api, false);
    assert_eq!(repeated, next, "the pending key is the next one");
    let next = rotate(&api, true);
    let second = eventually("the new key signs", || {
        Some(demo_token(&scene)).filter(|token| kid_of(token) == next)
    });
    let mut caller = scene.connect();
    for token in [&first, &second] {
        assert_eq!(outcome(&call(&mut caller, &bearer(token))), "200 ");
    }
    // Tokens of a withdrawn key are refused, including tokens that were verified before.
    api.delete(&format!("/signing-keys/{}", kid_of(&first)));
    api.await_workers();
    assert_eq!(
        outcome(&call(&mut caller, &bearer(&first))),
        "502 GW_TOKEN_INVALID"
    );
    assert_eq!(kids(), [next.as_str()]);
    assert_eq!(outcome(&call(&mut caller, &bearer(&second))), "200 ");
    let refused = api.ask("DELETE", &format!("/signing-keys/{next}"), &Value::Null);
    let detail = refused.body["detail"].as_str().unwrap();
    assert!(
        refused.status == 409 && detail.contains("is active"),
        "{refused:?}"
    );
}

/// The remedy for stolen signing keys, as `docs/authentication.md` has it.
#[test]
fn a_stolen_waiting_key_signs_nothing_after_an_immediate_rotation() {
    let folder = tempfile::tempdir().unwrap();
    let plan = Scene::service().data_dir(folder.path());
    let scene = plan.clone().start();
    rotate(&scene.api(), false);
    scene.stop();
    let stolen = stored(folder.path());
    assert_eq!(stolen.len(), 2, "the active key and the waiting one");

    let scene = plan.agent().start();
    let api = scene.api();
    let genuine = demo_token(&scene);
    let new = rotate(&api, true);
    let is_deleted = |key: &Value| {
        let kid = key["kid"].as_str().unwrap();
        let delete = || api.ask("DELETE", &format!("/signing-keys/{kid}"), &Value::Null);
        kid == new || delete().status == 204
    };
    // The earlier key is active until the end of the second of its creation.
    eventually("the other keys are deleted", || {
        let keys = api.list("/signing-keys");
        keys.iter().all(is_deleted).then_some(())
    });
    api.await_workers();
    let mut caller = scene.connect();
    for key in &stolen {
        let forged = bearer(&signed_with(key, &genuine));
        assert_eq!(outcome(&call(&mut caller, &forged)), "502 GW_TOKEN_INVALID");
    }
    assert_eq!(
        outcome(&call(&mut caller, &bearer(&demo_token(&scene)))),
        "200 "
    );
}

/// The claims of `token`, signed with `key`.
fn signed_with(key: &Value, token: &str) -> String {
    let text = |name: &str| key[name].as_str().unwrap();
    let header = URL_SAFE_NO_PAD.encode(format!(
        r#"{{"typ":"at+jwt","alg":"EdDSA","kid":"{}"}}"#,
        text("id")
    ));
    let signed = format!("{header}.{}", token.split('.').nth(1).unwrap());
    let private = URL_SAFE_NO_PAD.decode(text("private_key")).unwrap();
    let signature = jsonwebtoken::crypto::sign(
        signed.as_bytes(),
        &EncodingKey::from_ed_der(&private),
        Algorithm::EdDSA,
    );
    format!("{signed}.{}", signature.unwrap())
}
