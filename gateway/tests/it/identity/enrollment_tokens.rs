//! Enrollment tokens that several agents use.

use std::thread;
use std::time::SystemTime;

use rcgen::{CertificateParams, KeyPair};
use serde_json::{Value, json};

use crate::support::admin_api::Api;
use crate::support::apex::{APEX, ask, post_json};
use crate::support::eventually;
use crate::support::peers::caller::connect_to;
use crate::support::peers::http1_peer::Response;
use crate::support::processes::region::Region;
use crate::support::request_log::assert_fields;
use crate::support::scene::{About, Scene};

const BEFORE_REASON: &str = "this enrollment token is ";
const AFTER_REASON: &str = ": ask an administrator for a new one";

/// A scene with raised limits for enrollments.
fn start() -> Scene {
    Scene::service()
        .agent()
        .configuration("enrollment_requests_per_minute = 10000\n")
        .start()
}

fn enroll(about: &About, token: &str) -> Response {
    let body = json!({ "token": token, "name": "machine", "version": env!("CARGO_PKG_VERSION") })
        .to_string();
    let mut agent = connect_to(about, APEX, &[b"http/1.1"], None);
    agent.send(format!(
        "POST /enroll HTTP/1.1\r\nHost: {APEX}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    ));
    agent.response()
}

/// Reason for which a token was refused.
fn refusal(response: &Response) -> String {
    assert_eq!(response.status, 401);
    assert_eq!(response.code(), "GW_ENROLLMENT_TOKEN_INVALID");
    let message = response.json()["error"]["message"].take();
    let reason = message.as_str().unwrap().strip_prefix(BEFORE_REASON);
    reason
        .unwrap()
        .strip_suffix(AFTER_REASON)
        .unwrap()
        .to_owned()
}

/// Sends enrollments at once. Returns how many succeeded and how many were refused.
fn enroll_at_once(abouts: &[About], token: &str, count: usize) -> (usize, usize) {
    let statuses: Vec<u16> = thread::scope(|scope| {
        let enroll = |number: usize| {
            let about = &abouts[number % abouts.len()];
            scope.spawn(move || enroll(about, token).status.as_u16())
        };
        let attempts: Vec<_> = (0..count).map(enroll).collect();
        let ended = attempts.into_iter().map(|attempt| attempt.join().unwrap());
        ended.collect()
    });
    let count = |status| statuses.iter().filter(|it| **it == status).count();
    (count(201), count(401))
}

/// An enrollment token for agents of the scene's service.
struct Token {
    /// Its path in the API.
    path: String,
    text: String,
}

impl Token {
    /// Creates a token with these uses and lifetime.
    fn create(api: &Api, uses: u32, seconds: u64) -> Self {
        let tokens = "/accounts/demo/enrollment-tokens";
        let new = json!({ "services": ["echo"], "uses": uses, "expires_in_seconds": seconds });
        let created = api.ask("POST", tokens, &new);
        assert_eq!(created.status, 201, "{created:?}");
        let text = |member: &str| created.body[member].as_str().unwrap().to_owned();
        Self {
            path: format!("{tokens}/{}", text("id")),
            text: text("token"),
        }
    }
}

/// A member of each item of a list.
fn each(list: &[Value], member: &str) -> Vec<Value> {
    list.iter().map(|item| item[member].clone()).collect()
}

#[test]
fn a_token_enrolls_as_many_agents_as_it_has_uses_and_names_them() {
    let scene = start();
    let api = scene.api();
    let Token { path, text: token } = &Token::create(&api, 3, 2_592_000);
    let id = path.rsplit('/').next().unwrap();
    let assert_shown = |used: usize, agents: &[String]| {
        let expected = json!({ "uses": 3, "used": used, "agents": agents });
        assert_fields(&api.get(path).body, &expected);
    };
    assert_shown(0, &[]);
    let mut agents: Vec<String> = Vec::new();
    for number in 1..=3 {
        let reply = enroll(&scene.about, token);
        assert_eq!(reply.status, 201, "{}", reply.json());
        agents.push(reply.json()["agent_id"].as_str().unwrap().to_owned());
        agents.sort();
        assert_shown(number, &agents);
    }
    assert_eq!(refusal(&enroll(&scene.about, token)), "used up");
    let list = api.list("/accounts/demo/enrollment-tokens");
    assert!(list.contains(&api.get(path).body), "{list:?}");
    let enrolled_with = |id: &str| {
        let path = format!("/accounts/demo/agents?enrollment_token={id}&limit=10");
        each(&api.list(&path), "agent_id")
    };
    assert_eq!(enrolled_with(id), agents);
    assert_eq!(api.agent("demo", &agents[0])["enrollment_token"], id);

    // The use of a deleted agent stays counted. The agents of a deleted token still name it.
    api.delete_agent("demo", &agents[0]);
    assert_shown(3, &agents[1..]);
    assert_eq!(refusal(&enroll(&scene.about, token)), "used up");
    api.delete(path);
    assert_eq!(enrolled_with(id), agents[1..]);
    assert_eq!(enrolled_with("0000000000000000"), [Value::Null; 0]);

    the_audit_log_has_each_use(&api, id);
}

fn the_audit_log_has_each_use(api: &Api, id: &str) {
    let log = api.list("/audit-log?account=demo&limit=6");
    let enroll = (&*format!("enrollment-token {id}"), "agent.enroll");
    let expected = [
        ("admin", "enrollment_token.delete"),
        ("admin", "agent.delete"),
        enroll,
        enroll,
        enroll,
        ("admin", "enrollment_token.create"),
    ];
    for (entry, (actor, action)) in log.iter().zip(expected) {
        assert_fields(entry, &json!({ "actor": actor, "action": action }));
    }
    let details = each(&log, "detail");
    assert_eq!(details.len(), expected.len());
    assert_eq!(details[0], json!({ "used": 3, "uses": 3 }));
    for (detail, number) in details[2..5].iter().zip([3, 2, 1]) {
        assert_fields(detail, &json!({ "use": number, "uses": 3 }));
    }
    assert_eq!(details[5]["uses"], 3);
}

#[test]
fn values_out_of_range_are_refused_by_field() {
    let scene = start();
    let api = scene.api();
    for (field, wrong) in [
        ("uses", 0),
        ("uses", 10_001),
        ("expires_in_seconds", 0),
        ("expires_in_seconds", 2_592_001),
    ] {
        let mut new = json!({ "services": ["echo"] });
        new[field] = wrong.into();
        let reply = api.ask("POST", "/accounts/demo/enrollment-tokens", &new);
        assert_eq!(reply.status, 422, "{field}: {wrong}");
        assert_eq!(reply.body["field"], field, "{wrong}");
    }
}

#[test]
fn concurrent_enrollments_get_exactly_the_uses_of_a_token() {
    let scene = start();
    let token = Token::create(&scene.api(), 5, 600);
    let counts = enroll_at_once(std::slice::from_ref(&scene.about), &token.text, 16);
    assert_eq!(counts, (5, 11));
}

#[test]
fn a_deleted_or_expired_token_enrolls_no_further_agent_and_agents_stay() {
    let scene = start();
    let api = scene.api();
    let deleted = Token::create(&api, 10, 600);
    assert_eq!(enroll(&scene.about, &deleted.text).status, 201);
    api.delete(&deleted.path);
    let refused = refusal(&enroll(&scene.about, &deleted.text));
    assert_eq!(refused, "unknown or deleted");

    // An enrollment may take longer than a token is valid.
    let used = (1..60).find_map(|seconds| {
        let token = Token::create(&api, 10, seconds);
        (enroll(&scene.about, &token.text).status == 201).then_some(token)
    });
    let expired = used.unwrap();
    let shown = api.get(&expired.path).done();
    let end = humantime::parse_rfc3339(shown["expires_at"].as_str().unwrap()).unwrap();
    eventually("the token has expired", || {
        (SystemTime::now() > end).then_some(())
    });
    assert_eq!(refusal(&enroll(&scene.about, &expired.text)), "expired");
    // The reason of a refusal is told only with the secret of the token.
    let (id, _) = expired.text.split_once('.').unwrap();
    let guessed = format!("{id}.guessed");
    let refused = refusal(&enroll(&scene.about, &guessed));
    assert_eq!(refused, "unknown or deleted");

    let mut agents = api.agents("demo");
    agents.retain(|agent| agent["name"] == "machine");
    assert_eq!(each(&agents, "status"), ["approved", "approved"]);
}

#[test]
fn a_resumed_enrollment_is_one_use() {
    let scene = start();
    let api = scene.api();
    let token = Token::create(&api, 2, 600);
    let enrolled = enroll(&scene.about, &token.text).json();
    let text = |member: &str| enrolled[member].as_str().unwrap();
    let bearer = format!("Authorization: Bearer {}\r\n", text("enrollment_secret"));
    let key = KeyPair::generate().unwrap();
    let csr = CertificateParams::default().serialize_request(&key);
    let request = json!({ "csr": csr.unwrap().pem().unwrap() });
    // An interrupted agent repeats all requests after the first one.
    for _ in 0..3 {
        let status = format!("GET /enroll/status?enrollment_id={}", text("enrollment_id"));
        assert_eq!(ask(&scene, &status, &bearer, "").status, 200);
        let issued = post_json(&scene, "/csr", &bearer, &request);
        assert_eq!(issued.status, 200);
    }
    let expected = json!({ "used": 1, "uses": 2, "agents": [enrolled["agent_id"]] });
    assert_fields(&api.get(&token.path).done(), &expected);
}

#[test]
fn enrollments_through_different_nodes_never_exceed_the_uses_of_a_token() {
    let Some(region) = Region::start(3) else {
        return;
    };
    let token = Token::create(&region.api(0), 7, 600);
    let abouts = [0, 1, 2].map(|node| region.about(node));
    assert_eq!(enroll_at_once(&abouts, &token.text, 18), (7, 11));
    for (node, about) in abouts.iter().enumerate() {
        let shown = region.get(node, &token.path).done();
        assert_eq!(shown["used"], 7, "node {node}");
        let agents = shown["agents"].as_array().unwrap();
        assert_eq!(agents.len(), 7, "node {node}");
        assert_eq!(refusal(&enroll(about, &token.text)), "used up");
    }
}
