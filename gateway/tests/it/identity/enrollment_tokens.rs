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
use crate::support::scene::{About, Scene};

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

/// Why a token was refused.
fn refusal(response: &Response) -> String {
    assert_eq!(
        (response.status.as_u16(), &*response.code()),
        (401, "GW_ENROLLMENT_TOKEN_INVALID")
    );
    let body = response.json();
    let message = body["error"]["message"].as_str().unwrap();
    let reason = message.strip_prefix("this enrollment token is ").unwrap();
    reason
        .strip_suffix(": ask an administrator for a new one")
        .unwrap()
        .to_owned()
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
        let created = api.post(tokens, &new);
        let text = |member: &str| created[member].as_str().unwrap().to_owned();
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
    let api = Api::of(&scene.about);
    let new = json!({ "services": ["echo"], "uses": 3, "expires_in_seconds": 2_592_000 });
    let created = api.ask("POST", "/accounts/demo/enrollment-tokens", &new);
    assert_eq!(created.status, 201, "{}", created.body);
    let id = created.body["id"].as_str().unwrap();
    let token = created.body["token"].as_str().unwrap();
    let item = format!("/accounts/demo/enrollment-tokens/{id}");
    let shown = || {
        let token = api.get(&item).body;
        (
            token["uses"].clone(),
            token["used"].clone(),
            token["agents"].clone(),
        )
    };
    assert_eq!(shown(), (json!(3), json!(0), json!([])));

    let mut agents: Vec<String> = Vec::new();
    for number in 1..=3 {
        let reply = enroll(&scene.about, token);
        assert_eq!(reply.status, 201, "{}", reply.json());
        agents.push(reply.json()["agent_id"].as_str().unwrap().to_owned());
        agents.sort();
        assert_eq!(shown(), (json!(3), json!(number), json!(agents)));
    }
    assert_eq!(refusal(&enroll(&scene.about, token)), "used up");
    let list = api.list("/accounts/demo/enrollment-tokens");
    assert!(list.contains(&api.get(&item).body), "{list:?}");
    let enrolled_with = |id: &str| {
        api.list(&format!(
            "/accounts/demo/agents?enrollment_token={id}&limit=10"
        ))
    };
    assert_eq!(each(&enrolled_with(id), "agent_id"), agents);
    assert_eq!(api.agent("demo", &agents[0])["enrollment_token"], id);

    // The use of a deleted agent stays counted. The agents of a deleted token still name it.
    assert_eq!(
        api.ask(
            "DELETE",
            &format!("/accounts/demo/agents/{}", agents[0]),
            &Value::Null
        )
        .status,
        204
    );
    assert_eq!(shown(), (json!(3), json!(3), json!(agents[1..])));
    assert_eq!(refusal(&enroll(&scene.about, token)), "used up");
    assert_eq!(api.ask("DELETE", &item, &Value::Null).status, 204);
    assert_eq!(each(&enrolled_with(id), "agent_id"), agents[1..]);
    assert_eq!(
        each(&enrolled_with("0000000000000000"), "agent_id"),
        [Value::Null; 0]
    );

    the_audit_log_has_each_use(&api, id);
}

fn the_audit_log_has_each_use(api: &Api, id: &str) {
    let log = api.list("/audit-log?account=demo&limit=6");
    let actor = format!("enrollment-token {id}");
    assert_eq!(
        each(&log, "actor"),
        ["admin", "admin", &actor, &actor, &actor, "admin"]
    );
    let enrolled = "agent.enroll";
    let created = "enrollment_token.create";
    let actions = [
        "enrollment_token.delete",
        "agent.delete",
        enrolled,
        enrolled,
        enrolled,
        created,
    ];
    assert_eq!(each(&log, "action"), actions);
    let details = each(&log, "detail");
    assert_eq!(details[0], json!({ "used": 3, "uses": 3 }));
    let uses = details[2..5]
        .iter()
        .map(|detail| json!([detail["use"], detail["uses"]]));
    assert_eq!(uses.collect::<Value>(), json!([[3, 3], [2, 3], [1, 3]]));
    assert_eq!(details[5]["uses"], 3);
}

#[test]
fn values_out_of_range_are_refused_by_field() {
    let scene = start();
    let api = Api::of(&scene.about);
    for (field, wrong) in [
        ("uses", 0),
        ("uses", 10_001),
        ("expires_in_seconds", 0),
        ("expires_in_seconds", 2_592_001),
    ] {
        let mut new = json!({ "services": ["echo"] });
        new[field] = wrong.into();
        let reply = api.ask("POST", "/accounts/demo/enrollment-tokens", &new);
        assert_eq!(
            (reply.status, &reply.body["field"]),
            (422, &json!(field)),
            "{wrong}"
        );
    }
}

#[test]
fn concurrent_enrollments_get_exactly_the_uses_of_a_token() {
    let scene = start();
    let token = Token::create(&scene.api(), 5, 600);
    let statuses: Vec<u16> = thread::scope(|scope| {
        let enroll = || enroll(&scene.about, &token.text).status.as_u16();
        let attempts: Vec<_> = (0..16).map(|_| scope.spawn(enroll)).collect();
        attempts
            .into_iter()
            .map(|attempt| attempt.join().unwrap())
            .collect()
    });
    let count = |status| statuses.iter().filter(|it| **it == status).count();
    assert_eq!((count(201), count(401)), (5, 11), "{statuses:?}");
}

#[test]
fn a_deleted_or_expired_token_enrolls_no_further_agent_and_agents_stay() {
    let scene = start();
    let api = scene.api();
    let deleted = Token::create(&api, 10, 600);
    assert_eq!(enroll(&scene.about, &deleted.text).status, 201);
    api.delete(&deleted.path);
    assert_eq!(
        refusal(&enroll(&scene.about, &deleted.text)),
        "unknown or deleted"
    );

    // An agent may take longer than a token is valid.
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
    // Only with its secret, a token says why it is refused.
    let (id, _) = expired.text.split_once('.').unwrap();
    assert_eq!(
        refusal(&enroll(&scene.about, &format!("{id}.guessed"))),
        "unknown or deleted"
    );

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
    let csr = CertificateParams::default()
        .serialize_request(&KeyPair::generate().unwrap())
        .unwrap()
        .pem()
        .unwrap();
    // An interrupted agent repeats all requests after the first one.
    for _ in 0..3 {
        let status = format!("GET /enroll/status?enrollment_id={}", text("enrollment_id"));
        assert_eq!(ask(&scene, &status, &bearer, "").status, 200);
        assert_eq!(
            post_json(&scene, "/csr", &bearer, &json!({ "csr": csr })).status,
            200
        );
    }
    let token = api.get(&token.path).done();
    assert_eq!(
        json!([token["used"], token["uses"], token["agents"]]),
        json!([1, 2, [enrolled["agent_id"]]])
    );
}

#[test]
fn enrollments_through_different_nodes_never_exceed_the_uses_of_a_token() {
    let Some(region) = Region::start(3) else {
        return;
    };
    let path = "/accounts/demo/enrollment-tokens";
    let created = region
        .api(0)
        .post(path, &json!({ "services": ["echo"], "uses": 7 }));
    let id = created["id"].as_str().unwrap();
    let token = created["token"].as_str().unwrap();
    let item = format!("{path}/{id}");
    let abouts = [0, 1, 2].map(|node| region.about(node));
    let statuses: Vec<u16> = thread::scope(|scope| {
        let enroll = |number: usize| enroll(&abouts[number % 3], token).status.as_u16();
        let attempts: Vec<_> = (0..18)
            .map(|number| scope.spawn(move || enroll(number)))
            .collect();
        attempts
            .into_iter()
            .map(|attempt| attempt.join().unwrap())
            .collect()
    });
    let count = |status| statuses.iter().filter(|it| **it == status).count();
    assert_eq!((count(201), count(401)), (7, 11), "{statuses:?}");
    for (node, about) in abouts.iter().enumerate() {
        let token = region.get(node, &item).done();
        assert_eq!(
            (&token["used"], token["agents"].as_array().unwrap().len()),
            (&json!(7), 7),
            "node {node}"
        );
        assert_eq!(
            refusal(&enroll(about, created["token"].as_str().unwrap())),
            "used up"
        );
    }
}
