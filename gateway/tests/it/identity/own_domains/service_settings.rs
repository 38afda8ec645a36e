//! Tokens and limits that a service and its domains share.

use serde_json::json;

use super::DOMAIN;
use super::setup::Setup;
use crate::support::apex::APEX;
use crate::support::peers::caller::{Caller, HOST, connect_to};
use crate::support::peers::http1_peer::Response;

/// An access token of the gateway for a service of the scene's account.
fn token(setup: &Setup, service: &str) -> String {
    let api = setup.api();
    let (client_id, client_secret) = api.create_credential("demo", &[service]);
    api.await_workers();
    let body = json!({
        "grant_type": "client_credentials",
        "client_id": client_id,
        "client_secret": client_secret,
        "scope": format!("account:demo service:{service}"),
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

/// The response to a request for `host` with an access token.
fn ask_with(caller: &mut Caller, host: &str, token: &str) -> Response {
    caller.send(format!(
        "GET / HTTP/1.1\r\nHost: {host}\r\nX-Gw-Authorization: Bearer {token}\r\n\r\n"
    ));
    caller.response()
}

#[test]
fn a_token_for_the_address_of_the_service_counts_under_its_domain() {
    let Some(setup) = Setup::new() else {
        return;
    };
    setup.serve_uploaded(DOMAIN);
    let api = setup.api();
    api.create_service("demo", "other");
    let [accepted, refused] = ["echo", "other"].map(|service| token(&setup, service));
    let config = setup.caller(&[b"http/1.1"]);
    let mut by_domain = setup.connect(&config, DOMAIN).unwrap();
    let mut by_hostname = setup.prepared.connect(setup.address());
    for (caller, host) in [(&mut by_domain, DOMAIN), (&mut by_hostname, HOST)] {
        assert_eq!(ask_with(caller, host, &accepted).status, 200);
        let code = ask_with(caller, host, &refused).code();
        assert_eq!(code, "GW_TOKEN_AUDIENCE_MISMATCH", "{host}");
    }
}

#[test]
fn a_service_and_its_domain_share_one_rate_limit() {
    const BURST: usize = 6;
    let Some(setup) = Setup::new() else {
        return;
    };
    setup.serve_uploaded(DOMAIN);
    let rate = json!({ "burst": BURST, "refill_per_minute": 1 });
    let api = setup.api();
    api.change_service("demo", "echo", &rate);
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
