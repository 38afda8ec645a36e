//! Access tokens: the token endpoint, the key set, service modes, revocation, key rotation and rate
//! limits.

mod limits;
pub(super) mod signing_keys;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use serde_json::{Value, json};

use super::assert_says;
use crate::support::admin_api::Api;
use crate::support::apex::{APEX, ask, connect, demo_token, token};
use crate::support::peers::caller::{Caller, HOST};
use crate::support::peers::http1_peer::Response;
use crate::support::scene::Scene;
use crate::support::stopwatch::within_a_second;

const SCOPE: &str = "account:demo service:echo";

fn call(caller: &mut Caller, fields: &str) -> Response {
    caller.send(format!("GET / HTTP/1.1\r\nHost: {HOST}\r\n{fields}\r\n"));
    caller.response()
}

fn bearer(token: &str) -> String {
    format!("X-Gw-Authorization: Bearer {token}\r\n")
}

/// Status and error code of a response; `200 ` for a relayed request.
fn outcome(response: &Response) -> String {
    let code = if response.status == 200 {
        String::new()
    } else {
        response.code()
    };
    format!("{} {code}", response.status.as_u16())
}

#[test]
fn a_token_is_minted_with_every_allowed_client_authentication() {
    let scene = Scene::service().agent().start();
    let id = scene.about.client_id.as_str();
    let secret = &scene.about.client_secret;
    let json = format!(
        r#"{{"grant_type":"client_credentials","client_id":"{id}","client_secret":"{secret}",
            "scope":"{SCOPE}"}}"#
    );
    let form = format!("scope=service%3Aecho+account%3Ademo&client_id={id}&client_secret={secret}");
    let basic = STANDARD.encode(format!("{id}:{secret}"));
    let with_basic = format!("{FORM}Authorization: Basic {basic}\r\n");
    let form_without_client = format!("grant_type=client_credentials&scope={SCOPE}");
    for (fields, body) in [
        (FORM, form),
        (JSON, json),
        (with_basic.as_str(), form_without_client),
    ] {
        let response = ask(&scene, "POST /oauth/token", fields, &body);
        assert_eq!(response.status, 200, "{}", response.json());
        assert_eq!(response.header("cache-control"), "no-store");
        assert_eq!(response.header("content-type"), "application/json");
        assert_eq!(response.header("x-gw-request-id").len(), 36);
        let reply = response.json();
        assert_eq!(reply["token_type"], "Bearer");
        assert_eq!(reply["expires_in"], 3600);
        let token = reply["access_token"].as_str().unwrap();
        assert_eq!(call(&mut scene.connect(), &bearer(token)).status, 200);

        let header = part(token, 0);
        let claims = part(token, 1);
        assert_eq!(header["alg"], "EdDSA");
        assert_eq!(header["typ"], "at+jwt");
        assert_eq!(claims["iss"], format!("https://{APEX}"));
        assert_eq!(claims["aud"], format!("https://{HOST}"));
        assert_eq!(claims["sub"], id);
        assert_eq!(claims["client_id"], id);
        assert_eq!(claims["scope"], SCOPE);
        let issued = claims["iat"].as_i64().unwrap();
        assert_eq!(claims["exp"], issued + 3600);
        assert_eq!(claims["nbf"], issued);
        assert!(claims["jti"].as_str().unwrap().len() >= 20);
        let keys = ask(&scene, "GET /.well-known/jwks.json", "", "");
        assert_eq!(keys.header("cache-control"), "public, max-age=300");
        let key = &keys.json()["keys"][0];
        assert_eq!(key["kid"], header["kid"]);
        for (member, value) in [
            ("kty", "OKP"),
            ("crv", "Ed25519"),
            ("use", "sig"),
            ("alg", "EdDSA"),
        ] {
            assert_eq!(key[member], value);
        }
    }
}

/// A part of a token: 0 is its header, 1 are its claims.
fn part(token: &str, at: usize) -> Value {
    let part = token.split('.').nth(at).unwrap();
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(part).unwrap()).unwrap()
}

#[test]
fn unknown_pairs_of_a_scope_are_not_granted() {
    let scene = Scene::service().agent().start();
    let id = &scene.about.client_id;
    let secret = &scene.about.client_secret;
    assert_eq!(token(&scene, id, secret, SCOPE).json().get("scope"), None);
    let scope = "tier:gold service:echo admin:yes account:demo admin:yes";
    let response = token(&scene, id, secret, scope);
    assert_eq!(response.status, 200, "{}", response.json());
    // RFC 6749 §5.1: the response names the granted scope if it differs from the requested one.
    assert_eq!(response.json()["scope"], SCOPE);
    let token = response.json()["access_token"].as_str().unwrap().to_owned();
    assert_eq!(part(&token, 1)["scope"], SCOPE);
    assert_eq!(call(&mut scene.connect(), &bearer(&token)).status, 200);
}

/// The media type of forms.
const FORM: &str = "Content-Type: application/x-www-form-urlencoded\r\n";
/// The media type of JSON.
const JSON: &str = "Content-Type: application/json\r\n";

/// A client of the account `demo`, and one that is disabled.
struct Clients {
    id: String,
    secret: String,
    disabled: String,
    disabled_secret: String,
}

impl Clients {
    fn create(api: &Api) -> Self {
        api.create_service("demo", "other");
        api.create_service("demo", "keysonly");
        api.create_service("rival", "api");
        let keys_only = json!({ "modes": ["service_key"] });
        api.change_service("demo", "keysonly", &keys_only);
        let (id, secret) = api.create_credential("demo", &["echo", "keysonly"]);
        let (disabled, disabled_secret) = api.create_credential("demo", &["echo"]);
        let path = format!("/accounts/demo/credentials/{disabled}");
        api.patch(&path, &json!({ "enabled": false }));
        api.await_workers();
        Self {
            id,
            secret,
            disabled,
            disabled_secret,
        }
    }

    /// A form with the credentials of the client.
    fn form(&self, more: &[(&str, &str)]) -> String {
        let client = [
            ("client_id", self.id.as_str()),
            ("client_secret", self.secret.as_str()),
        ];
        form(&[&client[..], more].concat())
    }
}

fn form(parameters: &[(&str, &str)]) -> String {
    form_urlencoded::Serializer::new(String::new())
        .extend_pairs(parameters)
        .finish()
}

fn post_form(scene: &Scene, form: &str) -> Response {
    ask(scene, "POST /oauth/token", FORM, form)
}

/// A mistake in a request, its form, and the status and error of its response.
type RefusedForm = (&'static str, String, u16, &'static str);

fn forms_without_a_valid_client(clients: &Clients) -> Vec<RefusedForm> {
    let Clients {
        id,
        secret,
        disabled,
        disabled_secret,
    } = clients;
    vec![
        (
            "other grant type",
            clients.form(&[("scope", SCOPE), ("grant_type", "password")]),
            400,
            "unsupported_grant_type",
        ),
        (
            "no client id",
            form(&[("client_secret", secret), ("scope", SCOPE)]),
            400,
            "invalid_request",
        ),
        (
            "no client secret",
            form(&[("client_id", id), ("scope", SCOPE)]),
            400,
            "invalid_request",
        ),
        (
            "empty client secret",
            form(&[("client_id", id), ("client_secret", ""), ("scope", SCOPE)]),
            400,
            "invalid_request",
        ),
        ("no scope", clients.form(&[]), 400, "invalid_request"),
        (
            "repeated field",
            clients.form(&[("scope", SCOPE), ("scope", SCOPE)]),
            400,
            "invalid_request",
        ),
        (
            "unknown client",
            form(&[
                ("client_id", "gw_ci_x"),
                ("client_secret", "x"),
                ("scope", SCOPE),
            ]),
            401,
            "invalid_client",
        ),
        (
            "wrong secret",
            form(&[("client_id", id), ("client_secret", "x"), ("scope", SCOPE)]),
            401,
            "invalid_client",
        ),
        (
            "disabled",
            form(&[
                ("client_id", disabled),
                ("client_secret", disabled_secret),
                ("scope", SCOPE),
            ]),
            401,
            "invalid_client",
        ),
    ]
}

/// A mistake in a scope, the scope, and the error of the response.
const REFUSED_SCOPES: [(&str, &str, &str); 9] = [
    (
        "other account",
        "account:rival service:api",
        "invalid_scope",
    ),
    ("account missing", "service:echo", "invalid_scope"),
    ("service missing", "account:demo", "invalid_scope"),
    (
        "account twice",
        "account:demo account:demo service:echo",
        "invalid_scope",
    ),
    (
        "service twice",
        "account:demo service:echo service:echo",
        "invalid_scope",
    ),
    ("not a pair", "demo echo", "invalid_scope"),
    (
        "service not allowed",
        "account:demo service:other",
        "unauthorized_client",
    ),
    (
        "no such service",
        "account:demo service:nothing",
        "unauthorized_client",
    ),
    (
        "no JWT there",
        "account:demo service:keysonly",
        "unauthorized_client",
    ),
];

/// All errors of the token endpoint, those of RFC 6749 §5.2 included.
#[test]
fn the_token_endpoint_reports_every_error() {
    let scene = Scene::service()
        .agent()
        .configuration("token_requests_per_minute = 1000\n")
        .start();
    let clients = Clients::create(&scene.api());
    let granted = post_form(&scene, &clients.form(&[("scope", SCOPE)]));
    assert_eq!(granted.status, 200, "{}", granted.json());

    let forms = forms_without_a_valid_client(&clients);
    let scopes = REFUSED_SCOPES
        .map(|(what, scope, error)| (what, clients.form(&[("scope", scope)]), 400, error));
    for (what, body, status, error) in forms.into_iter().chain(scopes) {
        let response = post_form(&scene, &body);
        let reply = response.json();
        assert_eq!(response.status, status, "{what}: {reply}");
        assert_eq!(reply["error"], error, "{what}: {reply}");
        let description = reply["error_description"].as_str().unwrap();
        assert!(!description.is_empty(), "{what}");
        assert_eq!(response.header("cache-control"), "no-store", "{what}");
        assert_eq!(response.header("x-gw-request-id").len(), 36, "{what}");
        let challenged = response.headers.contains("www-authenticate");
        assert_eq!(challenged, status == 401, "{what}");
    }
}

#[test]
fn other_token_requests_than_forms_and_objects_are_invalid() {
    let scene = Scene::service().start();
    let large = format!("scope={}", "x".repeat(70_000));
    for (line, fields, body, status) in [
        ("GET /oauth/token", "", "", 405),
        (
            "POST /oauth/token",
            "Content-Type: text/plain\r\n",
            "x",
            400,
        ),
        ("POST /oauth/token", "", "x", 400),
        ("POST /oauth/token", JSON, "{", 400),
        ("POST /oauth/token", JSON, "[]", 400),
    ] {
        let response = ask(&scene, line, fields, body);
        assert_eq!(response.status, status, "{line} {body}");
        assert_eq!(response.json()["error"], "invalid_request", "{line} {body}");
    }
    assert_eq!(post_form(&scene, &large).json()["error"], "invalid_request");
}

/// In a form, an empty parameter counts as omitted (RFC 6749 §3.2).
#[test]
fn an_empty_grant_type_counts_in_json_alone() {
    let scene = Scene::service().start();
    let id = &scene.about.client_id;
    let secret = &scene.about.client_secret;
    for (grant_type, status, error) in [
        ("", 400, json!("unsupported_grant_type")),
        ("client_credentials", 200, Value::Null),
    ] {
        let body = json!({
            "grant_type": grant_type, "client_id": id, "client_secret": secret, "scope": SCOPE
        });
        let response = ask(&scene, "POST /oauth/token", JSON, &body.to_string());
        assert_eq!(response.status, status, "{grant_type:?}");
        assert_eq!(response.json()["error"], error, "{grant_type:?}");
    }
    let omitted = form(&[
        ("client_id", id),
        ("client_secret", secret),
        ("grant_type", ""),
        ("scope", ""),
        ("scope", SCOPE),
    ]);
    assert_eq!(post_form(&scene, &omitted).status, 200);
}

#[test]
fn a_member_of_a_token_request_may_not_be_repeated() {
    let scene = Scene::service().start();
    let id = &scene.about.client_id;
    let secret = &scene.about.client_secret;
    let twice = format!(
        r#"{{"client_id":"x","client_id":"{id}","client_secret":"{secret}","scope":"{SCOPE}"}}"#
    );
    let response = ask(&scene, "POST /oauth/token", JSON, &twice);
    assert_eq!(response.status, 400);
    let reply = response.json();
    assert_eq!(reply["error"], "invalid_request");
    let description = reply["error_description"].as_str().unwrap();
    assert_says(description, &["duplicate field `client_id`"]);
}

#[test]
fn service_modes_select_the_accepted_credentials() {
    let scene = Scene::service().agent().start();
    let key = format!("X-Gw-Service-Key: {}\r\n", scene.about.service_key);
    let token = bearer(&demo_token(&scene));
    let mut caller = scene.connect();
    let api = scene.api();
    for (modes, by_token, by_key) in [
        (&["jwt", "service_key"][..], "200 ", "200 "),
        (&["jwt"], "200 ", "502 GW_AUTH_MODE_NOT_ALLOWED"),
        (&["service_key"], "502 GW_AUTH_MODE_NOT_ALLOWED", "200 "),
    ] {
        api.change_service("demo", "echo", &json!({ "modes": modes }));
        assert_eq!(outcome(&call(&mut caller, &token)), by_token, "{modes:?}");
        assert_eq!(outcome(&call(&mut caller, &key)), by_key, "{modes:?}");
    }
}

/// An empty field counts as absent; two fields that are not empty are ambiguous.
#[test]
fn a_request_has_one_credential() {
    let scene = Scene::service().agent().start();
    let key = format!("X-Gw-Service-Key: {}\r\n", scene.about.service_key);
    let token = bearer(&demo_token(&scene));
    let misplaced = "Authorization: Bearer x\r\n".to_owned();
    let mut caller = scene.connect();
    for (fields, expected) in [
        (format!("{token}X-Gw-Service-Key:\r\n"), "200 "),
        (format!("{key}X-Gw-Authorization: \r\n"), "200 "),
        (format!("{key}{token}"), "502 GW_AUTH_AMBIGUOUS"),
        (token.repeat(2), "502 GW_AUTH_AMBIGUOUS"),
        (misplaced, "502 GW_AUTH_REQUIRED"),
        (bearer("x"), "502 GW_TOKEN_INVALID"),
    ] {
        let response = call(&mut caller, &fields);
        assert_eq!(outcome(&response), expected, "{fields}");
    }
}

#[test]
fn tokens_and_keys_of_other_services_are_refused() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    api.create_service("demo", "other");
    api.create_service("rival", "api");
    let (other, other_secret) = api.create_credential("demo", &["other"]);
    let (_, rival_key) = api.create_service_key("rival", &["api"]);
    api.await_workers();
    let minted = token(&scene, &other, &other_secret, "account:demo service:other").json();
    let other_token = minted["access_token"].as_str().unwrap();
    let mut caller = scene.connect();
    let response = call(&mut caller, &bearer(other_token));
    assert_eq!(outcome(&response), "502 GW_TOKEN_AUDIENCE_MISMATCH");
    assert_eq!(response.header("x-gw-status"), "AuthDenied");
    let media_type = response.header("content-type");
    assert_eq!(media_type, "application/vnd.gw.error+json");
    let rival_key = format!("X-Gw-Service-Key: {rival_key}\r\n");
    let response = call(&mut caller, &rival_key);
    assert_eq!(outcome(&response), "502 GW_SERVICE_KEY_NOT_ALLOWED");
}

/// The outcome of the first request that follows a change at the workers.
fn outcome_after_change(api: &Api, caller: &mut Caller, fields: &str) -> String {
    within_a_second("the change at the workers", || api.await_workers());
    outcome(&call(caller, fields))
}

#[test]
fn changes_of_a_credential_reach_its_tokens_within_a_second() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    let (id, secret) = api.create_credential("demo", &["echo"]);
    api.await_workers();
    let minted = token(&scene, &id, &secret, SCOPE).json();
    let minted = bearer(minted["access_token"].as_str().unwrap());
    let mut caller = scene.connect();
    assert_eq!(outcome(&call(&mut caller, &minted)), "200 ");
    let credential = format!("/accounts/demo/credentials/{id}");
    for (changes, expected) in [
        (json!({ "enabled": false }), "502 GW_CREDENTIAL_REVOKED"),
        (json!({ "enabled": true }), "200 "),
        (
            json!({ "allowed_services": [] }),
            "502 GW_CREDENTIAL_REVOKED",
        ),
    ] {
        api.patch(&credential, &changes);
        let outcome = outcome_after_change(&api, &mut caller, &minted);
        assert_eq!(outcome, expected, "{changes}");
    }
    api.delete(&credential);
    let outcome = outcome_after_change(&api, &mut caller, &minted);
    assert_eq!(outcome, "502 GW_CREDENTIAL_REVOKED");
}

#[test]
fn the_rotation_of_a_key_is_in_force_within_a_second() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    let (id, key) = api.create_service_key("demo", &["echo"]);
    let key = format!("X-Gw-Service-Key: {key}\r\n");
    let mut caller = scene.connect();
    assert_eq!(outcome_after_change(&api, &mut caller, &key), "200 ");
    let rotate = format!("/accounts/demo/service-keys/{id}/rotate-secret");
    api.post(&rotate, &Value::Null);
    let outcome = outcome_after_change(&api, &mut caller, &key);
    assert_eq!(outcome, "502 GW_SERVICE_KEY_INVALID");
}

#[test]
fn unknown_paths_and_methods_of_the_apex_are_refused() {
    let scene = Scene::service().agent().start();
    let mut caller = connect(&scene);
    for (line, status, code) in [
        ("GET /", 404, "GW_NOT_FOUND"),
        ("GET /oauth", 404, "GW_NOT_FOUND"),
        ("POST /.well-known/jwks.json", 405, "GW_METHOD_NOT_ALLOWED"),
        ("GET /enroll", 405, "GW_METHOD_NOT_ALLOWED"),
        ("DELETE /csr", 405, "GW_METHOD_NOT_ALLOWED"),
        ("POST /enroll/status", 405, "GW_METHOD_NOT_ALLOWED"),
    ] {
        caller.send(format!(
            "{line} HTTP/1.1\r\nHost: {APEX}\r\nContent-Length: 0\r\n\r\n"
        ));
        let response = caller.response();
        assert_eq!(response.status, status, "{line}");
        assert_eq!(response.code(), code, "{line}");
        assert_eq!(response.headers.contains("allow"), status == 405, "{line}");
    }
    caller.send(format!(
        "HEAD /.well-known/jwks.json HTTP/1.1\r\nHost: {APEX}\r\n\r\n"
    ));
    let head = caller.response_to(&http::Method::HEAD);
    assert_eq!((head.status.as_u16(), head.body.len()), (200, 0));
}
