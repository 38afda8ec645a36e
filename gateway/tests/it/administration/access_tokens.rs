//! Access tokens: the token endpoint, the key set, service modes, revocation, key rotation and rate
//! limits.

mod limits;
pub(super) mod signing_keys;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use serde_json::{Value, json};

use crate::support::admin_api::Api;
use crate::support::apex::{APEX, ask, demo_token, token};
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
    let id = &scene.about.client_id;
    let secret = &scene.about.client_secret;
    let json = format!(
        r#"{{"grant_type":"client_credentials","client_id":"{id}","client_secret":"{secret}",
            "scope":"{SCOPE}"}}"#
    );
    let form = format!("scope=service%3Aecho+account%3Ademo&client_id={id}&client_secret={secret}");
    let basic = STANDARD.encode(format!("{id}:{secret}"));
    let json_type = "Content-Type: application/json\r\n";
    let form_type = "Content-Type: application/x-www-form-urlencoded\r\n";
    for (fields, body) in [
        (json_type.to_owned(), json),
        (form_type.to_owned(), form),
        (
            format!("{form_type}Authorization: Basic {basic}\r\n"),
            format!("grant_type=client_credentials&scope={SCOPE}"),
        ),
    ] {
        let response = ask(&scene, "POST /oauth/token", &fields, &body);
        assert_eq!(response.status, 200, "{}", response.json());
        assert_eq!(response.header("cache-control"), "no-store");
        assert_eq!(response.header("content-type"), "application/json");
        assert_eq!(response.header("x-gw-request-id").len(), 36);
        let reply = response.json();
        assert_eq!(
            (&reply["token_type"], &reply["expires_in"]),
            (&"Bearer".into(), &3600.into())
        );
        let token = reply["access_token"].as_str().unwrap();
        assert_eq!(call(&mut scene.connect(), &bearer(token)).status, 200);

        let part = |at: usize| -> Value {
            let part = token.split('.').nth(at).unwrap();
            serde_json::from_slice(&URL_SAFE_NO_PAD.decode(part).unwrap()).unwrap()
        };
        let header = part(0);
        let claims = part(1);
        assert_eq!(
            (&header["alg"], &header["typ"]),
            (&"EdDSA".into(), &"at+jwt".into())
        );
        assert_eq!(claims["iss"], format!("https://{APEX}"));
        assert_eq!(claims["aud"], format!("https://{HOST}"));
        assert_eq!(
            (&claims["sub"], &claims["client_id"]),
            (&id.as_str().into(), &id.as_str().into())
        );
        assert_eq!(claims["scope"], SCOPE);
        assert_eq!(
            claims["exp"].as_i64().unwrap() - claims["iat"].as_i64().unwrap(),
            3600
        );
        assert_eq!(claims["nbf"], claims["iat"]);
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

#[test]
fn unknown_pairs_of_a_scope_are_not_granted() {
    let scene = Scene::service().agent().start();
    let id = &scene.about.client_id;
    let secret = &scene.about.client_secret;
    assert_eq!(token(&scene, id, secret, SCOPE).json().get("scope"), None);
    let response = token(
        &scene,
        id,
        secret,
        "tier:gold service:echo admin:yes account:demo admin:yes",
    );
    assert_eq!(response.status, 200, "{}", response.json());
    // RFC 6749 §5.1: the response names the granted scope if it differs from the requested one.
    assert_eq!(response.json()["scope"], SCOPE);
    let token = response.json()["access_token"].as_str().unwrap().to_owned();
    let claims = URL_SAFE_NO_PAD
        .decode(token.split('.').nth(1).unwrap())
        .unwrap();
    assert_eq!(
        serde_json::from_slice::<Value>(&claims).unwrap()["scope"],
        SCOPE
    );
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
    let encoded = parameters.iter().map(|(name, value)| {
        format!(
            "{name}={}",
            value
                .replace('%', "%25")
                .replace('&', "%26")
                .replace('+', "%2B")
                .replace(' ', "+")
        )
    });
    encoded.collect::<Vec<_>>().join("&")
}

fn post_form(scene: &Scene, form: &str) -> Response {
    ask(scene, "POST /oauth/token", FORM, form)
}

/// What is wrong with a request, its form, and the status and error of its response.
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

/// What is wrong with a scope, the scope, and the error of the response.
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
        assert_eq!(
            (response.status.as_u16(), reply["error"].as_str().unwrap()),
            (status, error),
            "{what}: {reply}"
        );
        assert!(
            !reply["error_description"].as_str().unwrap().is_empty(),
            "{what}"
        );
        assert_eq!(response.header("cache-control"), "no-store", "{what}");
        assert_eq!(response.header("x-gw-request-id").len(), 36, "{what}");
        let challenged = response.headers.contains("www-authenticate");
        assert_eq!(challenged, status == 401, "{what}");
    }
    other_requests_than_forms_and_objects_are_invalid(&scene);
    an_empty_grant_type_counts_in_json_alone(&scene, &clients);
    a_member_may_not_be_repeated(&scene, &clients);
    let large = format!("scope={}", "x".repeat(70_000));
    assert_eq!(post_form(&scene, &large).json()["error"], "invalid_request");
}

fn other_requests_than_forms_and_objects_are_invalid(scene: &Scene) {
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
        let response = ask(scene, line, fields, body);
        assert_eq!(
            (response.status.as_u16(), response.json()["error"].as_str()),
            (status, Some("invalid_request"))
        );
    }
}

fn an_empty_grant_type_counts_in_json_alone(scene: &Scene, clients: &Clients) {
    let Clients { id, secret, .. } = clients;
    // In JSON, an empty grant type counts as present.
    let asked = |grant_type: &str| {
        let body = json!({
            "grant_type": grant_type, "client_id": id, "client_secret": secret, "scope": SCOPE
        });
        ask(scene, "POST /oauth/token", JSON, &body.to_string())
    };
    let response = asked("");
    assert_eq!(
        (response.status.as_u16(), &response.json()["error"]),
        (400, &"unsupported_grant_type".into())
    );
    assert_eq!(asked("client_credentials").status, 200);
    // In a form, an empty parameter counts as omitted (RFC 6749 §3.2).
    assert_eq!(
        post_form(
            scene,
            &clients.form(&[("grant_type", ""), ("scope", ""), ("scope", SCOPE)])
        )
        .status,
        200
    );
}

fn a_member_may_not_be_repeated(scene: &Scene, clients: &Clients) {
    let Clients { id, secret, .. } = clients;
    let twice = format!(
        r#"{{"client_id":"x","client_id":"{id}","client_secret":"{secret}","scope":"{SCOPE}"}}"#
    );
    let response = ask(scene, "POST /oauth/token", JSON, &twice);
    assert_eq!(
        (response.status.as_u16(), &response.json()["error"]),
        (400, &"invalid_request".into())
    );
    assert!(
        response.json()["error_description"]
            .as_str()
            .unwrap()
            .contains("duplicate field `client_id`")
    );
}

#[test]
fn service_modes_select_the_accepted_credentials() {
    let scene = Scene::service().agent().start();
    let key = format!("X-Gw-Service-Key: {}\r\n", scene.about.service_key);
    let token = bearer(&demo_token(&scene));
    let mut caller = scene.connect();
    let api = scene.api();
    let set = |modes: &[&str]| api.change_service("demo", "echo", &json!({ "modes": modes }));
    for (modes, by_token, by_key) in [
        (&["jwt", "service_key"][..], "200 ", "200 "),
        (&["jwt"], "200 ", "502 GW_AUTH_MODE_NOT_ALLOWED"),
        (&["service_key"], "502 GW_AUTH_MODE_NOT_ALLOWED", "200 "),
    ] {
        set(modes);
        assert_eq!(outcome(&call(&mut caller, &token)), by_token, "{modes:?}");
        assert_eq!(outcome(&call(&mut caller, &key)), by_key, "{modes:?}");
    }
    set(&["jwt", "service_key"]);
    // An empty field counts as absent; two fields that are not empty are ambiguous.
    let empty_key = format!("{token}X-Gw-Service-Key:\r\n");
    assert_eq!(outcome(&call(&mut caller, &empty_key)), "200 ");
    assert_eq!(
        outcome(&call(
            &mut caller,
            &format!("{key}X-Gw-Authorization: \r\n")
        )),
        "200 "
    );
    assert_eq!(
        outcome(&call(&mut caller, &format!("{key}{token}"))),
        "502 GW_AUTH_AMBIGUOUS"
    );
    assert_eq!(
        outcome(&call(&mut caller, &token.repeat(2))),
        "502 GW_AUTH_AMBIGUOUS"
    );
    assert_eq!(
        outcome(&call(&mut caller, "Authorization: Bearer x\r\n")),
        "502 GW_AUTH_REQUIRED"
    );
    assert_eq!(
        outcome(&call(&mut caller, &bearer("x"))),
        "502 GW_TOKEN_INVALID"
    );
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
    assert_eq!(
        outcome(&call(&mut caller, &bearer(other_token))),
        "502 GW_TOKEN_AUDIENCE_MISMATCH"
    );
    let rival_key = format!("X-Gw-Service-Key: {rival_key}\r\n");
    assert_eq!(
        outcome(&call(&mut caller, &rival_key)),
        "502 GW_SERVICE_KEY_NOT_ALLOWED"
    );
    let response = call(&mut caller, &bearer(other_token));
    assert_eq!(
        (
            response.header("x-gw-status"),
            response.header("content-type")
        ),
        ("AuthDenied", "application/vnd.gw.error+json")
    );
}

#[test]
fn revocation_reaches_tokens_and_keys_within_a_second() {
    let scene = &Scene::service().agent().start();
    let api = scene.api();
    let (id, secret) = api.create_credential("demo", &["echo"]);
    let (key_id, key) = api.create_service_key("demo", &["echo"]);
    api.await_workers();
    let minted = token(scene, &id, &secret, SCOPE).json();
    let minted = bearer(minted["access_token"].as_str().unwrap());
    let mut caller = scene.connect();
    assert_eq!(outcome(&call(&mut caller, &minted)), "200 ");
    // The first request that follows a change at the worker has its effect.
    let mut takes_effect = |fields: &str, wanted: &str| {
        within_a_second("the change at the workers", || api.await_workers());
        assert_eq!(outcome(&call(&mut caller, fields)), wanted);
    };
    let credential = format!("/accounts/demo/credentials/{id}");
    let change = |changes: Value| api.patch(&credential, &changes);
    change(json!({ "enabled": false }));
    takes_effect(&minted, "502 GW_CREDENTIAL_REVOKED");
    change(json!({ "enabled": true }));
    takes_effect(&minted, "200 ");
    change(json!({ "allowed_services": [] }));
    takes_effect(&minted, "502 GW_CREDENTIAL_REVOKED");
    api.delete(&credential);
    takes_effect(&minted, "502 GW_CREDENTIAL_REVOKED");

    let key = format!("X-Gw-Service-Key: {key}\r\n");
    takes_effect(&key, "200 ");
    let rotate = format!("/accounts/demo/service-keys/{key_id}/rotate-secret");
    api.post(&rotate, &Value::Null);
    takes_effect(&key, "502 GW_SERVICE_KEY_INVALID");
}

#[test]
fn unknown_paths_and_methods_of_the_apex_are_refused() {
    let scene = Scene::service().agent().start();
    let mut caller = crate::support::apex::connect(&scene);
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
        assert_eq!(
            (response.status.as_u16(), response.code().as_str()),
            (status, code),
            "{line}"
        );
        assert_eq!(response.headers.contains("allow"), status == 405, "{line}");
    }
    caller.send(format!(
        "HEAD /.well-known/jwks.json HTTP/1.1\r\nHost: {APEX}\r\n\r\n"
    ));
    let head = caller.response_to(&http::Method::HEAD);
    assert_eq!((head.status.as_u16(), head.body.len()), (200, 0));
}
