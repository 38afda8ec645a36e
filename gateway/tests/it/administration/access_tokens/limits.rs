//! Limits of token requests and of failed authentication.

use std::time::Instant;

use super::{SCOPE, bearer, call, outcome};
use crate::support::apex::{ask, demo_token, token};
use crate::support::scene::Scene;

use crate::support::peers::proxy_protocol::trusted;

#[test]
fn the_token_endpoint_allows_sixty_requests_a_minute_across_workers() {
    let scene = Scene::service().agent().workers(4).start();
    // Failed requests count as well.
    let begun = Instant::now();
    let mut answered = 0;
    let last = loop {
        let answer = token(&scene, "gw_ci_x", "x", SCOPE);
        if answer.status == 429 {
            break answer;
        }
        answered += 1;
        let refilled = begun.elapsed().as_secs() + 1;
        assert!(
            answered <= 60 + refilled,
            "{answered} answered, {refilled} refilled"
        );
    };
    assert!(answered >= 60, "{answered}");
    assert_eq!(last.json()["error"], "rate_limit_exceeded");
    let seconds: u32 = last.header("retry-after").parse().unwrap();
    assert!((50..=60).contains(&seconds), "{seconds}");
    // The other endpoints are limited separately.
    assert_eq!(ask(&scene, "GET /enroll/status", "", "").status, 400);
    let keys = ask(&scene, "GET /.well-known/jwks.json", "", "");
    assert_eq!(keys.status, 200);
}

#[test]
fn token_requests_are_limited_by_the_address_that_a_trusted_proxy_forwards() {
    let low_limit = "token_requests_per_minute = 2\n";
    let start = |more: &str| {
        let configuration = format!("{low_limit}{more}");
        Scene::service().configuration(configuration).start()
    };
    let ask_as = |scene: &Scene, forwarded_for: &str| {
        let field = format!("X-Forwarded-For: {forwarded_for}\r\n");
        let response = ask(scene, "POST /oauth/token", &field, "");
        response.status.as_u16()
    };
    let trusting = start(&trusted(&[("127.0.0.0/8", "off")]));
    let statuses = [
        "192.0.2.1",
        "192.0.2.1",
        "192.0.2.1",
        "192.0.2.2",
        "6.6.6.6, 192.0.2.1",
        "2001:db8::1",
        "2001:db8::2",
        "2001:db8::3",
    ]
    .map(|client| ask_as(&trusting, client));
    assert_eq!(
        statuses,
        [400, 400, 429, 400, 429, 400, 400, 429],
        "IPv6 addresses are counted by /64"
    );
    let plain = start("");
    let statuses = [1, 2, 3, 4].map(|n| ask_as(&plain, &format!("192.0.2.{n}")));
    assert_eq!(
        statuses,
        [400, 400, 429, 429],
        "the field is ignored without a trusted proxy"
    );
}

#[test]
fn failed_authentication_is_limited_without_locking_out_valid_callers() {
    let scene = Scene::service()
        .agent()
        .workers(1)
        .configuration("auth_failures_per_minute = 2\n")
        .start();
    let known = bearer(&demo_token(&scene));
    let fresh = bearer(&demo_token(&scene));
    let key = format!("X-Gw-Service-Key: {}\r\n", scene.about.service_key);
    let mut caller = scene.connect();
    assert_eq!(outcome(&call(&mut caller, &known)), "200 ");
    let guess = "X-Gw-Service-Key: gw_sk_0123456789abcdef.guess\r\n";
    let guesses = [(); 4].map(|()| outcome(&call(&mut caller, guess)));
    assert_eq!(guesses[..2], ["502 GW_SERVICE_KEY_INVALID"; 2]);
    assert_eq!(guesses[2..], ["429 GW_AUTH_RATE_LIMITED"; 2]);
    let response = call(&mut caller, guess);
    assert_eq!(response.header("x-gw-status"), "RateLimited");
    assert!((1..=60).contains(&response.header("retry-after").parse::<u32>().unwrap()));
    // Valid callers at the same address are still served.
    for fields in [&key, &known, &fresh] {
        assert_eq!(outcome(&call(&mut caller, fields)), "200 ");
    }
    // Only at the address that sends forged tokens are new tokens limited, because each costs a
    // signature check.
    let unseen = bearer(&demo_token(&scene));
    let (message, _) = unseen.trim_end().rsplit_once('.').unwrap();
    for number in 0..6 {
        let forged = format!("{message}.{}\r\n", format!("{number}").repeat(86));
        let refused = outcome(&call(&mut caller, &forged));
        assert_eq!(refused, "429 GW_AUTH_RATE_LIMITED");
    }
    let refused = outcome(&call(&mut caller, &unseen));
    assert_eq!(refused, "429 GW_AUTH_RATE_LIMITED");
    assert_eq!(outcome(&call(&mut caller, &fresh)), "200 ");
}
