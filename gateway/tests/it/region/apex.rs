//! A region of several nodes: limits of apex requests per client address and per agent.

use std::time::Instant;

use http::Method;
use serde_json::{Value, json};

use crate::support::apex::APEX;
use crate::support::gateway::Gateway;
use crate::support::peers::caller::connect_to;
use crate::support::processes::nodes::Nodes;
use crate::support::processes::prepared::Prepared;

const PER_MINUTE: u64 = 6;
const LIMITS: &str = "token_requests_per_minute = 6\ntrusted_proxies = [\"127.0.0.0/8=off\"]\n";

/// Status of a token request at `node`, which a trusted proxy forwards for `client`.
fn status(nodes: &Nodes, node: usize, client: &str) -> u16 {
    let mut caller = connect_to(&nodes.about(node), APEX, &[b"http/1.1"], None);
    caller.send(format!(
        "POST /oauth/token HTTP/1.1\r\nHost: {APEX}\r\nX-Forwarded-For: {client}\r\n\
         Content-Length: 0\r\n\r\n"
    ));
    caller.try_response(&Method::POST).unwrap().status.as_u16()
}

/// Asserts that as many requests of `sender` have the status `admitted` as a limit admits per
/// minute, or as many more as it has refilled since `began`, and that all others are refused.
#[track_caller]
fn assert_limited(sender: &str, statuses: &[u16], admitted: u16, per_minute: u64, began: Instant) {
    let known = |status: &u16| [admitted, 429].contains(status);
    assert!(statuses.iter().all(known), "{sender}: {statuses:?}");
    let count = statuses.iter().filter(|it| **it == admitted).count() as u64;
    let most = per_minute + began.elapsed().as_secs() * per_minute / 60 + 1;
    let expected = per_minute..=most;
    assert!(
        expected.contains(&count),
        "{count} of {expected:?} from {sender}"
    );
}

#[test]
fn token_requests_of_an_address_are_limited_over_all_nodes() {
    let nodes = Nodes::start_with(3, LIMITS);
    let began = Instant::now();
    // Different nodes own these addresses.
    let clients: Vec<String> = (1..=6)
        .map(|number| format!("192.0.2.{number}"))
        .chain(["2001:db8::1".into()])
        .collect();
    for client in &clients {
        let send = |number| status(&nodes, number % 3, client);
        let statuses: Vec<u16> = (0..9 * PER_MINUTE as usize).map(send).collect();
        assert_limited(client, &statuses, 400, PER_MINUTE, began);
    }
}

#[test]
fn token_requests_of_an_address_whose_node_is_lost_are_limited_by_each_other_node() {
    let mut nodes = Nodes::start_with(3, LIMITS);
    nodes.stop(2);
    // The lost node owns some of these addresses.
    for client in (1..=6).map(|number| format!("198.51.100.{number}")) {
        let statuses = [0, 1].map(|node| status(&nodes, node, &client));
        assert_eq!(statuses, [400, 400], "{client}");
        let is_refused = |_| status(&nodes, 0, &client) == 429;
        assert!((0..=2 * PER_MINUTE).any(is_refused), "{client}");
    }
}

/// Begins the enrollment of an agent at a gateway with this data folder. Returns its description.
fn begin_enrollment(prepared: &Prepared) -> Value {
    let gateway = Gateway::start(&prepared.config());
    let token = gateway.api().create_enrollment_token("demo", &["echo"]);
    let body = json!({ "token": token, "name": "test", "version": env!("CARGO_PKG_VERSION") });
    let body = body.to_string();
    let about = prepared.about(gateway.address());
    let mut caller = connect_to(&about, APEX, &[b"http/1.1"], None);
    caller.send(format!(
        "POST /enroll HTTP/1.1\r\nHost: {APEX}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    ));
    let enrolled = caller.response();
    assert_eq!(enrolled.status, 201, "{}", enrolled.json());
    gateway.drain();
    enrolled.json()
}

#[test]
fn requests_of_an_agent_are_limited_over_all_nodes() {
    const PER_MINUTE: u64 = 60;
    let prepared = Prepared::new();
    let enrollment = begin_enrollment(&prepared);
    let [id, secret] =
        ["enrollment_id", "enrollment_secret"].map(|name| enrollment[name].as_str().unwrap());
    let target = format!("/enroll/status?enrollment_id={id}");
    let nodes = Nodes::start_of(prepared, 3, LIMITS);
    let poll = |node: usize| {
        let mut caller = connect_to(&nodes.about(node), APEX, &[b"http/1.1"], None);
        caller.send(format!(
            "GET {target} HTTP/1.1\r\nHost: {APEX}\r\nAuthorization: Bearer {secret}\r\n\r\n"
        ));
        caller.try_response(&Method::GET).unwrap().status.as_u16()
    };
    let began = Instant::now();
    let statuses: Vec<u16> = (0..3 * PER_MINUTE as usize).map(|n| poll(n % 3)).collect();
    assert_limited(id, &statuses, 200, PER_MINUTE, began);
}
