//! Agent identity: enrollment, certificate requests, renewal, recovery, expiry, and tunnels without
//! client certificates.

mod certificates;

use std::path::Path;
use std::thread;

use gw_shared::tunnel::handshake::{self, Proof};
use http::Method;
use rcgen::{CertificateParams, KeyPair};
use rustls_pki_types::CertificateDer;
use serde_json::{Value, json};

use crate::support::agents::in_process;
use crate::support::apex::{ask, post_json};
use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::peers::caller::{Caller, HOST, connect_to};
use crate::support::peers::http1_peer::Response;
use crate::support::scene::Scene;

const VERSION: &str = env!("CARGO_PKG_VERSION");

fn csr(params: &CertificateParams, key: &KeyPair) -> String {
    params.serialize_request(key).unwrap().pem().unwrap()
}

fn plain_csr(key: &KeyPair) -> String {
    csr(&CertificateParams::default(), key)
}

fn enroll(scene: &Scene, token: &str) -> Response {
    post_json(
        scene,
        "/enroll",
        "",
        &json!({ "token": token, "name": "test", "version": VERSION }),
    )
}

fn bearer(secret: &str) -> String {
    format!("Authorization: Bearer {secret}\r\n")
}

fn text<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name]
        .as_str()
        .unwrap_or_else(|| panic!("no {name} in {value}"))
}

/// Status and error code of a response; only the status if it is not an error.
fn outcome(response: &Response) -> String {
    let code = if response.status.is_success() {
        String::new()
    } else {
        response.code()
    };
    format!("{} {code}", response.status.as_u16())
}

/// A scene with further lines of configuration.
fn scene_with(configuration: &str) -> Scene {
    Scene::service()
        .agent()
        .configuration(configuration)
        .start()
}

/// A scene with raised limits for requests to the apex.
fn scene_with_high_limits() -> Scene {
    scene_with("enrollment_requests_per_minute = 10000\n")
}

#[test]
fn agents_that_wait_behind_one_address_are_limited_apart_from_it_and_each_other() {
    let scene = scene_with("enrollment_requests_per_minute = 8\n");
    // The scene's agent has used up to three requests.
    let token = manual_token(&scene, 5);
    let waiting: Vec<Value> = (0..5).map(|_| enroll(&scene, &token).json()).collect();
    let poll = |id: &str, secret: &str| {
        outcome(&ask(
            &scene,
            &format!("GET /enroll/status?enrollment_id={id}"),
            &bearer(secret),
            "",
        ))
    };
    let poll_of = |agent: &Value| {
        poll(
            text(agent, "enrollment_id"),
            text(agent, "enrollment_secret"),
        )
    };
    let guess = || poll(text(&waiting[0], "enrollment_id"), "gw_es_guessed");
    eventually("guesses are limited", || {
        (guess() == "429 GW_RATE_LIMIT_EXCEEDED").then_some(())
    });
    // A worker that answers knows the agents that enrolled before.
    scene.api().await_workers();
    for _ in 0..12 {
        for agent in &waiting {
            assert_eq!(poll_of(agent), "200 ");
        }
    }
    let first = text(&waiting[0], "enrollment_id");
    let secret = text(&waiting[0], "enrollment_secret");
    let limited = (0..1000).find_map(|_| {
        let response = ask(
            &scene,
            &format!("GET /enroll/status?enrollment_id={first}"),
            &bearer(secret),
            "",
        );
        (response.status == 429).then_some(response)
    });
    let limited = limited.expect("an agent that polls without pause is limited");
    assert!(
        limited.json()["error"]["message"]
            .as_str()
            .unwrap()
            .contains("this agent"),
        "{}",
        limited.json()
    );
    assert!((2..=60).contains(&limited.header("retry-after").parse::<u64>().unwrap()));
    assert_eq!(poll_of(&waiting[1]), "200 ");
}

/// An enrollment token for so many agents, which have to wait for an administrator.
fn manual_token(scene: &Scene, uses: u32) -> String {
    let new = json!({ "services": ["echo"], "approval": "manual", "uses": uses });
    let created = scene.api().post("/accounts/demo/enrollment-tokens", &new);
    text(&created, "token").to_owned()
}

/// The id of the scene's agent with this name.
fn agent_named(scene: &Scene, name: &str) -> String {
    let agents = scene.api().agents("demo");
    let agent = agents.iter().find(|agent| agent["name"] == name);
    text(agent.unwrap(), "agent_id").to_owned()
}

fn enrollment_status(scene: &Scene, id: &str, fields: &str) -> Response {
    let line = format!("GET /enroll/status?enrollment_id={id}");
    ask(scene, &line, fields, "")
}

#[test]
fn enrollment_endpoints_report_every_error() {
    let scene = scene_with_high_limits();
    let api = scene.api();
    let used = api.create_enrollment_token("demo", &["echo"]);
    let enrolled = enroll(&scene, &used);
    assert_eq!(enrolled.status, 201, "{}", enrolled.json());
    assert_eq!(enrolled.header("cache-control"), "no-store");
    let enrolled = enrolled.json();
    assert_eq!(text(&enrolled, "status"), "approved");
    assert!(text(&enrolled, "agent_id").starts_with("ag_"));
    assert!(enrolled["poll_after_seconds"].as_u64().unwrap() >= 1);
    let id = text(&enrolled, "enrollment_id");
    let secret = bearer(text(&enrolled, "enrollment_secret"));

    tokens_versions_and_names_are_checked(&scene, &used);

    let status = |id: &str, fields: &str| enrollment_status(&scene, id, fields);
    let known = status(id, &secret);
    assert_eq!(
        (known.status.as_u16(), text(&known.json(), "status")),
        (200, "approved")
    );
    assert!(text(&known.json(), "agent_id").starts_with("ag_"));
    assert_eq!(
        outcome(&status(id, &bearer("gw_es_wrong"))),
        "401 GW_ENROLLMENT_INVALID"
    );
    assert_eq!(outcome(&status(id, "")), "401 GW_ENROLLMENT_INVALID");
    assert_eq!(
        outcome(&status("en_00000000000000000000", &secret)),
        "401 GW_ENROLLMENT_INVALID"
    );
    assert_eq!(
        outcome(&ask(&scene, "GET /enroll/status", &secret, "")),
        "400 GW_BAD_REQUEST"
    );

    let key = KeyPair::generate().unwrap();
    let good = plain_csr(&key);
    let ask_for =
        |fields: &str, csr: &str| post_json(&scene, "/csr", fields, &json!({ "csr": csr }));
    let agent_id = text(&known.json(), "agent_id").to_owned();
    let both = json!({ "csr": good, "agent_id": agent_id });
    certificate_requests_are_checked(&scene, &secret, &good, &both);

    let issued = ask_for(&secret, &good);
    assert_eq!(issued.status, 200, "{}", issued.json());
    assert_eq!(text(&issued.json(), "agent_id"), agent_id);
    assert_eq!(issued.json()["services"], json!([HOST]));
    // A repeated request gets the same reply, in case the first was lost; a request for another key
    // is refused.
    assert_eq!(ask_for(&secret, &good).status, 200);
    let other_key = plain_csr(&KeyPair::generate().unwrap());
    assert_eq!(
        outcome(&ask_for(&secret, &other_key)),
        "401 GW_ENROLLMENT_INVALID"
    );
    api.revoke_agent("demo", &agent_id);
    assert_eq!(text(&status(id, &secret).json(), "status"), "revoked");
    assert_eq!(outcome(&ask_for(&secret, &good)), "401 GW_AGENT_REVOKED");
    assert_eq!(
        outcome(&post_json(&scene, "/csr", "", &both)),
        "401 GW_AGENT_REVOKED"
    );
}

fn tokens_versions_and_names_are_checked(scene: &Scene, used: &str) {
    let api = scene.api();
    let fresh = api.create_enrollment_token("demo", &["echo"]);
    let withdrawn = api.create_enrollment_token("demo", &["echo"]);
    let withdrawn_id = withdrawn["gw_et_".len()..].split('.').next().unwrap();
    api.delete(&format!("/accounts/demo/enrollment-tokens/{withdrawn_id}"));
    let body = |token: &str, name: &str, version: &str| {
        json!({
            "token": token,
            "name": name,
            "version": version,
        })
    };
    let last = if fresh.ends_with('x') { "y" } else { "x" };
    let guessed = format!("{}{last}", &fresh[..fresh.len() - 1]);
    for (what, body, expected) in [
        (
            "used",
            body(used, "a", VERSION),
            "401 GW_ENROLLMENT_TOKEN_INVALID",
        ),
        (
            "withdrawn",
            body(&withdrawn, "a", VERSION),
            "401 GW_ENROLLMENT_TOKEN_INVALID",
        ),
        (
            "wrong secret",
            body(&guessed, "a", VERSION),
            "401 GW_ENROLLMENT_TOKEN_INVALID",
        ),
        (
            "not a token",
            body("x", "a", VERSION),
            "401 GW_ENROLLMENT_TOKEN_INVALID",
        ),
        (
            "other version",
            body(&fresh, "a", "0.0.1"),
            "426 GW_VERSION_MISMATCH",
        ),
        ("no name", body(&fresh, " ", VERSION), "400 GW_BAD_REQUEST"),
        (
            "long name",
            body(&fresh, &"x".repeat(101), VERSION),
            "400 GW_BAD_REQUEST",
        ),
        (
            "missing field",
            json!({ "token": fresh }),
            "400 GW_BAD_REQUEST",
        ),
    ] {
        assert_eq!(
            outcome(&post_json(scene, "/enroll", "", &body)),
            expected,
            "{what}"
        );
    }
    assert_eq!(
        outcome(&ask(scene, "POST /enroll", "", &"x".repeat(70_000))),
        "413 GW_BODY_TOO_LARGE"
    );
    // The refused requests did not consume the token. An agent of a later version may send more
    // members.
    let mut later = body(&fresh, "a", VERSION);
    later["from_a_later_version"] = json!(true);
    assert_eq!(outcome(&post_json(scene, "/enroll", "", &later)), "201 ");
}

/// `both` is a request with `good` and the id of its agent.
fn certificate_requests_are_checked(scene: &Scene, secret: &str, good: &str, both: &Value) {
    let ask_for =
        |fields: &str, csr: &str| post_json(scene, "/csr", fields, &json!({ "csr": csr }));
    let p384 = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap();
    let mut garbled = good.to_owned();
    let middle = good.len() / 2;
    garbled.replace_range(
        middle..=middle,
        if good.as_bytes()[middle] == b'A' {
            "B"
        } else {
            "A"
        },
    );
    for (what, fields, csr, expected) in [
        ("no bearer", "", good, "401 GW_ENROLLMENT_INVALID"),
        (
            "other's secret",
            &bearer("gw_es_x"),
            good,
            "401 GW_ENROLLMENT_INVALID",
        ),
        ("not PEM", secret, "hello", "400 GW_CSR_INVALID"),
        ("garbled", secret, &garbled, "400 GW_CSR_INVALID"),
        ("P-384", secret, &plain_csr(&p384), "400 GW_CSR_INVALID"),
        (
            "weak RSA",
            secret,
            include_str!("../data/rsa-1024.csr"),
            "400 GW_CSR_INVALID",
        ),
        (
            "signature of another key",
            secret,
            include_str!("../data/bad-signature.csr"),
            "400 GW_CSR_INVALID",
        ),
    ] {
        assert_eq!(outcome(&ask_for(fields, csr)), expected, "{what}");
    }
    assert_eq!(
        outcome(&post_json(scene, "/csr", secret, both)),
        "400 GW_BAD_REQUEST"
    );
    // An agent without a certificate has no key to recover with.
    assert_eq!(
        outcome(&post_json(scene, "/csr", "", both)),
        "401 GW_AGENT_CERTIFICATE_EXPIRED"
    );
}

#[test]
fn one_of_eight_concurrent_enrollments_with_one_token_succeeds() {
    let scene = Scene::service().agent().start();
    let token = scene.api().create_enrollment_token("demo", &["echo"]);
    let mut statuses: Vec<u16> = thread::scope(|scope| {
        let attempts: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| enroll(&scene, &token).status.as_u16()))
            .collect();
        attempts
            .into_iter()
            .map(|attempt| attempt.join().unwrap())
            .collect()
    });
    statuses.sort_unstable();
    assert_eq!(statuses, [201, 401, 401, 401, 401, 401, 401, 401]);
}

#[test]
fn an_enrollment_token_can_require_manual_approval() {
    let scene = scene_with_high_limits();
    let enrolled = enroll(&scene, &manual_token(&scene, 1)).json();
    assert_eq!(text(&enrolled, "status"), "pending");
    let secret = bearer(text(&enrolled, "enrollment_secret"));
    let status = || {
        let line = format!(
            "GET /enroll/status?enrollment_id={}",
            text(&enrolled, "enrollment_id")
        );
        ask(&scene, &line, &secret, "").json()
    };
    assert_eq!(
        (text(&status(), "status"), status().get("agent_id")),
        ("pending", None)
    );
    let key = KeyPair::generate().unwrap();
    let ask_for_certificate =
        || post_json(&scene, "/csr", &secret, &json!({ "csr": plain_csr(&key) }));
    assert_eq!(outcome(&ask_for_certificate()), "409 GW_ENROLLMENT_PENDING");
    let pending = agent_named(&scene, "test");
    let approve = format!("/accounts/demo/agents/{pending}/approve");
    scene.api().post(&approve, &Value::Null);
    assert_eq!(text(&status(), "agent_id"), pending);
    assert_eq!(ask_for_certificate().status, 200);
}

#[test]
fn an_agent_follows_changes_of_its_services_without_a_restart() {
    let scene = Scene::service()
        .agent_to(backend::answering(
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n1",
        ))
        .start();
    let api = scene.api();
    api.create_service("demo", "second");
    let agent = format!("/accounts/demo/agents/{}", agent_named(&scene, "agent"));
    let serve = |services: &[&str]| {
        api.patch(&agent, &json!({ "services": services }));
    };
    let served = || {
        let mut served: Vec<String> = scene
            .tunnels()
            .into_iter()
            .map(|tunnel| tunnel.service)
            .collect();
        served.sort();
        served
    };
    let before = scene.tunnels()[0].generation;
    serve(&["echo", "second"]);
    eventually("the tunnel of the second service", || {
        (served() == ["demo--echo", "demo--second"]).then_some(())
    });
    let echo = scene
        .tunnels()
        .into_iter()
        .find(|tunnel| tunnel.service == "demo--echo")
        .unwrap();
    assert_eq!(echo.generation, before, "the other tunnel stays open");
    serve(&["echo"]);
    eventually("only the first service has a tunnel", || {
        (served() == ["demo--echo"]).then_some(())
    });
    // Replaces all services, so that no tunnel is left to notify the agent.
    serve(&["second"]);
    eventually("the tunnel of the new service", || {
        (served() == ["demo--second"]).then_some(())
    });
}

/// Sends an upgrade request on a new connection without a client certificate.
fn upgrade(scene: &Scene, proof: Option<&Proof>) -> Caller {
    let mut stranger = connect_to(&scene.about, HOST, &[gw_shared::tunnel::ALPN], None);
    stranger.send(handshake::request(HOST, proof));
    stranger
}

/// A proof that signs `challenge` for a tunnel of `host`.
fn proof(certificate: &[u8], key: &KeyPair, host: &str, challenge: &str) -> Proof {
    let message = handshake::challenge_message(host, challenge);
    Proof {
        certificate: certificate.to_vec(),
        signature: rcgen::SigningKey::sign(key, &message).unwrap(),
    }
}

/// The challenge in the answer to an upgrade without a proof.
fn challenge_of(agent: &mut Caller) -> String {
    let response = agent.response_to(&Method::GET);
    assert_eq!(outcome(&response), "401 GW_AGENT_CHALLENGE");
    handshake::parse_challenge(response.header("www-authenticate"))
        .unwrap()
        .to_owned()
}

#[test]
fn without_client_certificates_agents_sign_a_challenge() {
    let scene = scene_with("agent_mtls = false\n");
    let mut caller = scene.connect();
    caller.send(scene.get("/"));
    assert_eq!(
        caller.response().status,
        200,
        "the demo's agent has answered its challenge"
    );

    let state = tempfile::tempdir().unwrap();
    scene.enroll("demo", &["echo"], state.path());
    let (certificate, key) = identity(state.path());
    let sign =
        |key: &KeyPair, host: &str, challenge: &str| proof(&certificate, key, host, challenge);
    // A signature by the agent's key of the challenge of this connection is accepted.
    let mut agent = upgrade(&scene, None);
    let challenge = challenge_of(&mut agent);
    agent.send(handshake::request(
        HOST,
        Some(&sign(&key, HOST, &challenge)),
    ));
    assert_eq!(agent.response_head(&Method::GET).unwrap().status, 101);

    let stranger_key = KeyPair::generate().unwrap();
    let self_signed = CertificateParams::default()
        .self_signed(&stranger_key)
        .unwrap();
    for what in [
        "nothing",
        "another connection's challenge",
        "another service",
        "another key",
        "nobody's certificate",
    ] {
        let mut stranger = upgrade(&scene, None);
        let fresh = challenge_of(&mut stranger);
        let proof = match what {
            "nothing" => None,
            "another connection's challenge" => Some(sign(&key, HOST, &challenge)),
            "another service" => Some(sign(&key, "demo--other.eu1.gw.localhost", &fresh)),
            "another key" => Some(sign(&stranger_key, HOST, &fresh)),
            _ => Some(proof(self_signed.der(), &stranger_key, HOST, &fresh)),
        };
        stranger.send(handshake::request(HOST, proof.as_ref()));
        let response = stranger.response_to(&Method::GET);
        assert_eq!(
            outcome(&response),
            "401 GW_AGENT_CERTIFICATE_REQUIRED",
            "{what}"
        );
        assert!(stranger.is_closed(), "{what}");
    }
    // A proof without a challenge is ignored.
    let mut eager = upgrade(&scene, Some(&sign(&key, HOST, &challenge)));
    challenge_of(&mut eager);
}

/// Certificate and key of a state folder.
fn identity(state_dir: &Path) -> (CertificateDer<'static>, KeyPair) {
    let (certificate, key) = in_process::identity(state_dir);
    (certificate, KeyPair::try_from(&key).unwrap())
}

#[test]
fn enrollment_is_limited_by_address_separately() {
    let scene = scene_with("enrollment_requests_per_minute = 5\n");
    // The scene's own agent has used one request to enroll. Those with its secret were charged to
    // itself, unless a worker did not know it yet.
    let answers: Vec<Response> = (0..7).map(|_| enroll(&scene, "gw_et_x")).collect();
    let statuses: Vec<u16> = answers
        .iter()
        .map(|answer| answer.status.as_u16())
        .collect();
    let admitted = statuses.iter().take_while(|status| **status == 401).count();
    assert!(
        (2..=4).contains(&admitted) && statuses[admitted..].iter().all(|status| *status == 429),
        "{statuses:?}"
    );
    assert_eq!(answers[6].code(), "GW_RATE_LIMIT_EXCEEDED");
    assert!((40..=60).contains(&answers[6].header("retry-after").parse::<u32>().unwrap()));
    assert_eq!(
        crate::support::apex::token(&scene, "x", "x", "x").status,
        401
    );
}
