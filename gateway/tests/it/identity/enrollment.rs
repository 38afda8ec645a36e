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
use crate::support::apex::{self, ask, post_json};
use crate::support::eventually;
use crate::support::peers::caller::{Caller, HOST, connect_to};
use crate::support::peers::http1_peer::Response;
use crate::support::scene::Scene;

const VERSION: &str = env!("CARGO_PKG_VERSION");
const INVALID: &str = "401 GW_ENROLLMENT_INVALID";

fn csr(params: &CertificateParams, key: &KeyPair) -> String {
    params.serialize_request(key).unwrap().pem().unwrap()
}

fn plain_csr(key: &KeyPair) -> String {
    csr(&CertificateParams::default(), key)
}

fn enroll(scene: &Scene, token: &str) -> Response {
    let body = json!({ "token": token, "name": "test", "version": VERSION });
    post_json(scene, "/enroll", "", &body)
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
    let poll = |agent: &Value| {
        let secret = bearer(text(agent, "enrollment_secret"));
        enrollment_status(&scene, text(agent, "enrollment_id"), &secret)
    };
    let mut guess = waiting[0].clone();
    guess["enrollment_secret"] = json!("gw_es_guessed");
    eventually("guesses are limited", || {
        (outcome(&poll(&guess)) == "429 GW_RATE_LIMIT_EXCEEDED").then_some(())
    });
    // A worker that answers knows the agents that enrolled before.
    scene.api().await_workers();
    for _ in 0..12 {
        for agent in &waiting {
            assert_eq!(outcome(&poll(agent)), "200 ");
        }
    }
    let mut polls = (0..1000).map(|_| poll(&waiting[0]));
    let limited = polls.find(|response| response.status == 429);
    let limited = limited.expect("an agent that polls without pause is limited");
    let message = limited.json()["error"]["message"].to_string();
    assert!(message.contains("this agent"), "{message}");
    assert!((2..=60).contains(&limited.header("retry-after").parse::<u64>().unwrap()));
    assert_eq!(outcome(&poll(&waiting[1])), "200 ");
}

/// An enrollment token for this number of agents, which wait for the approval of an administrator.
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
fn an_enrollment_gets_one_certificate_until_its_agent_is_revoked() {
    let scene = scene_with_high_limits();
    let api = scene.api();
    let enrolled = enroll(&scene, &api.create_enrollment_token("demo", &["echo"]));
    assert_eq!(enrolled.status, 201, "{}", enrolled.json());
    assert_eq!(enrolled.header("cache-control"), "no-store");
    let enrolled = enrolled.json();
    assert_eq!(text(&enrolled, "status"), "approved");
    let agent_id = text(&enrolled, "agent_id");
    assert!(agent_id.starts_with("ag_"), "{agent_id}");
    assert!(enrolled["poll_after_seconds"].as_u64().unwrap() >= 1);
    let secret = bearer(text(&enrolled, "enrollment_secret"));
    let status = || enrollment_status(&scene, text(&enrolled, "enrollment_id"), &secret);
    let known = status();
    assert_eq!(known.status, 200);
    assert_eq!(text(&known.json(), "status"), "approved");
    assert_eq!(text(&known.json(), "agent_id"), agent_id);

    let good = plain_csr(&KeyPair::generate().unwrap());
    let ask_for = |csr: &str| post_json(&scene, "/csr", &secret, &json!({ "csr": csr }));
    let issued = ask_for(&good);
    assert_eq!(issued.status, 200, "{}", issued.json());
    assert_eq!(text(&issued.json(), "agent_id"), agent_id);
    assert_eq!(issued.json()["services"], json!([HOST]));
    // A repeated request gets the same reply, in case the first was lost; a request for another key
    // is refused.
    assert_eq!(ask_for(&good).status, 200);
    let other_key = plain_csr(&KeyPair::generate().unwrap());
    let refused = ask_for(&other_key);
    assert_eq!(outcome(&refused), INVALID);
    api.revoke_agent("demo", agent_id);
    assert_eq!(text(&status().json(), "status"), "revoked");
    assert_eq!(outcome(&ask_for(&good)), "401 GW_AGENT_REVOKED");
    let both = json!({ "csr": good, "agent_id": agent_id });
    let recovery = post_json(&scene, "/csr", "", &both);
    assert_eq!(outcome(&recovery), "401 GW_AGENT_REVOKED");
}

#[test]
fn the_status_of_an_enrollment_needs_its_id_and_secret() {
    let scene = scene_with_high_limits();
    let token = scene.api().create_enrollment_token("demo", &["echo"]);
    let enrolled = enroll(&scene, &token).json();
    let id = text(&enrolled, "enrollment_id");
    let secret = bearer(text(&enrolled, "enrollment_secret"));
    for (what, id, fields) in [
        ("wrong secret", id, &*bearer("gw_es_wrong")),
        ("no secret", id, ""),
        ("unknown id", "en_00000000000000000000", &secret),
    ] {
        let response = enrollment_status(&scene, id, fields);
        assert_eq!(outcome(&response), INVALID, "{what}");
    }
    let response = ask(&scene, "GET /enroll/status", &secret, "");
    assert_eq!(outcome(&response), "400 GW_BAD_REQUEST");
}

#[test]
fn tokens_versions_and_names_of_enrollments_are_checked() {
    const INVALID_TOKEN: &str = "401 GW_ENROLLMENT_TOKEN_INVALID";
    const BAD_REQUEST: &str = "400 GW_BAD_REQUEST";
    let scene = scene_with_high_limits();
    let api = scene.api();
    let [used, fresh, withdrawn] = [(); 3].map(|()| api.create_enrollment_token("demo", &["echo"]));
    assert_eq!(enroll(&scene, &used).status, 201);
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
    let long = "x".repeat(101);
    let old = body(&fresh, "a", "0.0.1");
    for (what, body, expected) in [
        ("used", body(&used, "a", VERSION), INVALID_TOKEN),
        ("withdrawn", body(&withdrawn, "a", VERSION), INVALID_TOKEN),
        ("wrong secret", body(&guessed, "a", VERSION), INVALID_TOKEN),
        ("not a token", body("x", "a", VERSION), INVALID_TOKEN),
        ("other version", old, "426 GW_VERSION_MISMATCH"),
        ("no name", body(&fresh, " ", VERSION), BAD_REQUEST),
        ("long name", body(&fresh, &long, VERSION), BAD_REQUEST),
        ("missing field", json!({ "token": fresh }), BAD_REQUEST),
    ] {
        let response = post_json(&scene, "/enroll", "", &body);
        assert_eq!(outcome(&response), expected, "{what}");
    }
    let large = ask(&scene, "POST /enroll", "", &"x".repeat(70_000));
    assert_eq!(outcome(&large), "413 GW_BODY_TOO_LARGE");
    // The refused requests did not consume the token. An agent of a later version may send more
    // members.
    let mut later = body(&fresh, "a", VERSION);
    later["from_a_later_version"] = json!(true);
    assert_eq!(post_json(&scene, "/enroll", "", &later).status, 201);
}

#[test]
fn certificate_requests_are_checked() {
    const INVALID_CSR: &str = "400 GW_CSR_INVALID";
    let scene = scene_with_high_limits();
    let token = scene.api().create_enrollment_token("demo", &["echo"]);
    let enrolled = enroll(&scene, &token).json();
    let secret = &*bearer(text(&enrolled, "enrollment_secret"));
    let good = &*plain_csr(&KeyPair::generate().unwrap());
    let p384 = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap();
    let weak = include_str!("../data/rsa-1024.csr");
    let forged = include_str!("../data/bad-signature.csr");
    let (start, end) = good.split_at(good.len() / 2);
    let other = if end.starts_with('A') { "B" } else { "A" };
    let garbled = format!("{start}{other}{}", &end[1..]);
    for (what, fields, csr, expected) in [
        ("no bearer", "", good, INVALID),
        ("other's secret", &*bearer("gw_es_x"), good, INVALID),
        ("not PEM", secret, "hello", INVALID_CSR),
        ("garbled", secret, &garbled, INVALID_CSR),
        ("P-384", secret, &plain_csr(&p384), INVALID_CSR),
        ("weak RSA", secret, weak, INVALID_CSR),
        ("signature of another key", secret, forged, INVALID_CSR),
    ] {
        let response = post_json(&scene, "/csr", fields, &json!({ "csr": csr }));
        assert_eq!(outcome(&response), expected, "{what}");
    }
    let both = json!({ "csr": good, "agent_id": text(&enrolled, "agent_id") });
    let response = post_json(&scene, "/csr", secret, &both);
    assert_eq!(outcome(&response), "400 GW_BAD_REQUEST");
    // An agent without a certificate has no key to recover with.
    let response = post_json(&scene, "/csr", "", &both);
    assert_eq!(outcome(&response), "401 GW_AGENT_CERTIFICATE_EXPIRED");
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
    let status = || enrollment_status(&scene, text(&enrolled, "enrollment_id"), &secret).json();
    assert_eq!(text(&status(), "status"), "pending");
    assert_eq!(status().get("agent_id"), None);
    let request = json!({ "csr": plain_csr(&KeyPair::generate().unwrap()) });
    let ask_for_certificate = || post_json(&scene, "/csr", &secret, &request);
    assert_eq!(outcome(&ask_for_certificate()), "409 GW_ENROLLMENT_PENDING");
    let pending = agent_named(&scene, "test");
    let approve = format!("/accounts/demo/agents/{pending}/approve");
    scene.api().post(&approve, &Value::Null);
    assert_eq!(text(&status(), "agent_id"), pending);
    assert_eq!(ask_for_certificate().status, 200);
}

#[test]
fn an_agent_follows_changes_of_its_services_without_a_restart() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    api.create_service("demo", "second");
    let agent = format!("/accounts/demo/agents/{}", agent_named(&scene, "agent"));
    let before = scene.tunnels()[0].generation;
    let serve = |services: &[&str]| {
        api.patch(&agent, &json!({ "services": services }));
        eventually("the agent has a tunnel of each of its services", || {
            let mut tunnels = scene.tunnels();
            tunnels.sort_by(|one, other| one.service.cmp(&other.service));
            let served = tunnels.iter().map(|tunnel| &tunnel.service);
            let expected = services.iter().map(|service| format!("demo--{service}"));
            served.cloned().eq(expected).then_some(tunnels)
        })
    };
    let tunnels = serve(&["echo", "second"]);
    assert_eq!(tunnels[0].generation, before, "the other tunnel stays open");
    serve(&["echo"]);
    // This replaces all services, so that no tunnel is left to notify the agent.
    serve(&["second"]);
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
    let response = caller.response();
    assert_eq!(response.status, 200, "the scene's agent signed a challenge");

    let state = tempfile::tempdir().unwrap();
    scene.enroll("demo", &["echo"], state.path());
    let (certificate, key) = identity(state.path());
    let sign =
        |key: &KeyPair, host: &str, challenge: &str| proof(&certificate, key, host, challenge);
    // A signature by the agent's key of the challenge of this connection is accepted.
    let mut agent = upgrade(&scene, None);
    let challenge = challenge_of(&mut agent);
    let signed = sign(&key, HOST, &challenge);
    agent.send(handshake::request(HOST, Some(&signed)));
    assert_eq!(agent.response_head(&Method::GET).unwrap().status, 101);

    let stranger_key = KeyPair::generate().unwrap();
    let self_signed = CertificateParams::default().self_signed(&stranger_key);
    let self_signed = self_signed.unwrap();
    for what in [
        "nothing",
        "another connection's challenge",
        "another service",
        "another key",
        "a self-signed certificate",
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
        let expected = "401 GW_AGENT_CERTIFICATE_REQUIRED";
        assert_eq!(outcome(&response), expected, "{what}");
        assert!(stranger.is_closed(), "{what}");
    }
    // A proof without a challenge is ignored.
    let mut eager = upgrade(&scene, Some(&signed));
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
    let answers = [(); 7].map(|()| enroll(&scene, "gw_et_x"));
    let statuses = answers.each_ref().map(|answer| answer.status.as_u16());
    let admitted = statuses.iter().take_while(|status| **status == 401).count();
    assert!((2..=4).contains(&admitted), "{statuses:?}");
    let mut limited = statuses[admitted..].iter();
    assert!(limited.all(|status| *status == 429), "{statuses:?}");
    assert_eq!(answers[6].code(), "GW_RATE_LIMIT_EXCEEDED");
    assert!((40..=60).contains(&answers[6].header("retry-after").parse::<u32>().unwrap()));
    assert_eq!(apex::token(&scene, "x", "x", "x").status, 401);
}
