//! Rotation of the keys that sign access tokens.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use gw_base::service::rate::Rate;
use gw_control_plane::control::records::signing_key;
use gw_control_plane::control::{Actor, Rotation};
use gw_gateway::demo::{Demo, Options};
use gw_store::SigningKeyRecord;
use jsonwebtoken::{Algorithm, EncodingKey};

use super::{bearer, call, outcome};
use crate::support::apex::{ask, demo_token};
use crate::support::peers::caller::connect;
use crate::support::{demo, eventually};

#[test]
fn signing_keys_rotate_without_invalidating_tokens() {
    let demo = Demo::start(&Options {
        adjust: |config| config.token_requests = Rate::new(10_000, 10_000).unwrap(),
        ..crate::support::options(None)
    })
    .unwrap();
    let control = demo.gateway().control();
    let kids = || -> Vec<String> {
        let keys = ask(&demo, "GET /.well-known/jwks.json", "", "").json();
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
        let header: serde_json::Value = serde_json::from_slice(&header).unwrap();
        header["kid"].as_str().unwrap().to_owned()
    };
    let first = demo_token(&demo);
    // The new key is published before use: the next token is still signed with the old key.
    let next = signing_key::rotate(control, &Actor::Admin, &Rotation::default())
        .unwrap()
        .kid
        .to_string();
    eventually("the next key is published", || {
        kids().contains(&next).then_some(())
    });
    assert_eq!(kid_of(&demo_token(&demo)), kid_of(&first));
    let repeated = signing_key::rotate(control, &Actor::Admin, &Rotation::default()).unwrap();
    assert_eq!(
        repeated.kid.as_str(),
        next,
        "the pending key is the next one"
    );
    let next = signing_key::rotate(control, &Actor::Admin, &Rotation { immediately: true })
        .unwrap()
        .kid
        .to_string();
    let second = eventually("the new key signs", || {
        Some(demo_token(&demo)).filter(|token| kid_of(token) == next)
    });
    let mut caller = connect(&demo);
    for token in [&first, &second] {
        assert_eq!(outcome(&call(&mut caller, &bearer(token))), "200 ");
    }
    // Tokens of a withdrawn key are refused, including tokens that were verified before.
    signing_key::delete(control, &Actor::Admin, &kid_of(&first)).unwrap();
    eventually("tokens of the withdrawn key are refused", || {
        (outcome(&call(&mut caller, &bearer(&first))) == "502 GW_TOKEN_INVALID").then_some(())
    });
    assert_eq!(kids(), [next.as_str()]);
    assert_eq!(outcome(&call(&mut caller, &bearer(&second))), "200 ");
    let error = signing_key::delete(control, &Actor::Admin, &next).unwrap_err();
    assert!(error.to_string().contains("is active"), "{error}");
}

/// The remedy for stolen signing keys, as `docs/authentication.md` has it.
#[test]
fn a_stolen_waiting_key_signs_nothing_after_an_immediate_rotation() {
    let demo = demo(None);
    let control = demo.gateway().control();
    let genuine = demo_token(&demo);
    signing_key::rotate(control, &Actor::Admin, &Rotation::default()).unwrap();
    let stolen = control.records().signing_keys;
    assert_eq!(stolen.len(), 2, "the active key and the waiting one");
    let new = signing_key::rotate(control, &Actor::Admin, &Rotation { immediately: true })
        .unwrap()
        .kid;
    let remedied = || {
        let keys = control.records().signing_keys;
        keys.keys()
            .filter(|kid| **kid != new)
            .all(|kid| signing_key::delete(control, &Actor::Admin, kid.as_str()).is_ok())
    };
    eventually("the other keys are deleted", || remedied().then_some(()));
    let mut caller = connect(&demo);
    for key in stolen.values() {
        let forged = bearer(&signed_with(key, &genuine));
        eventually("tokens of stolen keys are refused", || {
            (outcome(&call(&mut caller, &forged)) == "502 GW_TOKEN_INVALID").then_some(())
        });
    }
    assert_eq!(
        outcome(&call(&mut caller, &bearer(&demo_token(&demo)))),
        "200 "
    );
}

/// The claims of `token`, signed with `key`.
fn signed_with(key: &SigningKeyRecord, token: &str) -> String {
    let header = URL_SAFE_NO_PAD.encode(format!(
        r#"{{"typ":"at+jwt","alg":"EdDSA","kid":"{}"}}"#,
        key.id
    ));
    let signed = format!("{header}.{}", token.split('.').nth(1).unwrap());
    let private = URL_SAFE_NO_PAD.decode(key.private_key.reveal()).unwrap();
    let signature = jsonwebtoken::crypto::sign(
        signed.as_bytes(),
        &EncodingKey::from_ed_der(&private),
        Algorithm::EdDSA,
    );
    format!("{signed}.{}", signature.unwrap())
}
