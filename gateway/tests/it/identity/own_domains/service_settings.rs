//! Tokens and limits that a service and its domains share.

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use gw_store::{SigningKeyRecord, SqliteStore, Store, StoreSource};
use jsonwebtoken::{Algorithm, EncodingKey};
use serde_json::{Value, json};

use super::setup::Setup;
use super::{DOMAIN, PROGRAMS};
use crate::support::apex::APEX;
use crate::support::peers::caller::{Caller, HOST, connect_to};
use crate::support::programs::usable;

/// An access token of the gateway for the demo's service.
fn token(setup: &Setup) -> String {
    let created = setup.command(&["credential", "create", "demo", "--service", "echo"]);
    let created = created.unwrap();
    let body = json!({
        "grant_type": "client_credentials",
        "client_id": created["client_id"],
        "client_secret": created["client_secret"],
        "scope": "account:demo service:echo",
    });
    let body = body.to_string();
    let about = setup.prepared.about(setup.address());
    let mut caller = connect_to(&about, APEX, &[b"http/1.1"], None);
    caller.send(format!(
        "POST /oauth/token HTTP/1.1\r\nHost: {APEX}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    ));
    let response = caller.response();
    assert_eq!(response.status, 200, "{}", response.json());
    response.json()["access_token"].as_str().unwrap().to_owned()
}

/// Status of a request for `host` with an access token.
fn ask_with(caller: &mut Caller, host: &str, token: &str) -> u16 {
    caller.send(format!(
        "GET / HTTP/1.1\r\nHost: {host}\r\nX-Gw-Authorization: Bearer {token}\r\n\r\n"
    ));
    caller.response().status.as_u16()
}

/// The claims of `token` for the service at `host`, signed with `key`.
fn signed_for(host: &str, token: &str, key: &SigningKeyRecord) -> String {
    let claims = token.split('.').nth(1).unwrap();
    let claims = BASE64_URL_SAFE_NO_PAD.decode(claims).unwrap();
    let mut claims: Value = serde_json::from_slice(&claims).unwrap();
    claims["aud"] = format!("https://{host}").into();
    let header = json!({ "typ": "at+jwt", "alg": "EdDSA", "kid": key.id });
    let [header, claims] =
        [header, claims].map(|part| BASE64_URL_SAFE_NO_PAD.encode(part.to_string()));
    let signed = format!("{header}.{claims}");
    let private = BASE64_URL_SAFE_NO_PAD
        .decode(key.private_key.reveal())
        .unwrap();
    let key = EncodingKey::from_ed_der(&private);
    let signature = jsonwebtoken::crypto::sign(signed.as_bytes(), &key, Algorithm::EdDSA);
    format!("{signed}.{}", signature.unwrap())
}

#[test]
fn a_token_for_the_address_of_the_service_counts_under_its_domain() {
    if !usable(&PROGRAMS) {
        return;
    }
    let mut setup = Setup::new();
    setup.serve_uploaded(DOMAIN);
    let token = token(&setup);
    let mut keys = Vec::new();
    setup.restart("TERM", |setup| {
        let path = StoreSource::sqlite_in(&setup.prepared.path("data"));
        let records = SqliteStore::open(&path).unwrap().load().unwrap().records;
        keys.extend(records.signing_keys.into_values());
    });
    setup.prepared.wait_for_tunnel(setup.address());
    let [key] = keys.as_slice() else {
        panic!("one signing key: {}", keys.len());
    };
    let config = setup.caller(&[b"http/1.1"]);
    let mut by_domain = setup.connect(&config, DOMAIN).unwrap();
    let mut by_hostname = setup.prepared.connect(setup.address());
    let accepted = signed_for(HOST, &token, key);
    for token in [&token, &accepted] {
        assert_eq!(ask_with(&mut by_domain, DOMAIN, token), 200);
        assert_eq!(ask_with(&mut by_hostname, HOST, token), 200);
    }
    let refused = signed_for(DOMAIN, &token, key);
    for (caller, host) in [(&mut by_domain, DOMAIN), (&mut by_hostname, HOST)] {
        caller.send(format!(
            "GET / HTTP/1.1\r\nHost: {host}\r\nX-Gw-Authorization: Bearer {refused}\r\n\r\n"
        ));
        let code = caller.response().code();
        assert_eq!(code, "GW_TOKEN_AUDIENCE_MISMATCH", "{host}");
    }
}

#[test]
fn a_service_and_its_domain_share_one_rate_limit() {
    const BURST: usize = 6;
    if !usable(&PROGRAMS) {
        return;
    }
    let setup = Setup::new();
    setup.serve_uploaded(DOMAIN);
    let rate = json!({ "burst": BURST, "refill_per_minute": 1 });
    let address = setup.served.admin_address;
    let path = "/accounts/demo/services/echo";
    let changed = setup.prepared.administer(address, "PATCH", path, &rate);
    assert_eq!(changed, 200);
    let config = setup.caller(&[b"http/1.1"]);
    let mut by_domain = setup.connect(&config, DOMAIN).unwrap();
    let mut by_hostname = setup.prepared.connect(setup.address());
    let mut admitted = 0;
    while setup.ask(&mut by_domain, DOMAIN) == 200 {
        admitted += 1;
        assert!(admitted <= BURST, "{admitted} requests are admitted");
        if setup.ask(&mut by_hostname, HOST) == 200 {
            admitted += 1;
        }
    }
    assert_eq!(admitted, BURST);
    assert_eq!(setup.ask(&mut by_domain, DOMAIN), 429);
    assert_eq!(setup.ask(&mut by_hostname, HOST), 429);
}
