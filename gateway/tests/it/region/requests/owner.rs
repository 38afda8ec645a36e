//! What the node that owns a service refuses, and requests whose owner changes or is lost.

use serde_json::json;

use super::{any_path, ask, error, with_agent};
use crate::support::eventually;
use crate::support::limits::NODE_RETRIES;
use crate::support::peers::backend;
use crate::support::peers::caller::Caller;
use crate::support::processes::nodes::Nodes;

/// The rest of requests without a body, and with a body in each framing.
const BODIES: [&str; 3] = [
    "\r\n",
    "Content-Length: 3\r\n\r\nabc",
    "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
];

#[test]
fn errors_of_the_owner_pass() {
    let (refusing, address) = backend::refusing();
    let (nodes, agent, owner, other) = with_agent(&format!("http://{address}"));
    let ask = |rest: &str| ask(&nodes, other, "POST /", rest);
    for rest in BODIES {
        let response = ask(rest);
        assert_eq!(error(&response), "502 GW_BACKEND_UNREACHABLE", "{rest:?}");
        let text = String::from_utf8(response.body).unwrap();
        assert!(text.contains("refused"), "{text}");
    }
    drop(refusing);
    agent.drain();
    eventually("the tunnel is closed", || {
        nodes.tunnels(owner).is_empty().then_some(())
    });
    for rest in [BODIES[0], BODIES[2]] {
        let response = ask(rest);
        assert_eq!(error(&response), "504 AGENT_UNAVAILABLE", "{rest:?}");
    }
    let limit = json!({ "burst": 1, "refill_per_minute": 1 });
    nodes.api(owner).change_service("demo", "echo", &limit);
    let response = eventually("the bucket is empty", || {
        Some(ask("\r\n")).filter(|response| response.status == 429)
    });
    assert_eq!(response.code(), "GW_RATE_LIMIT_EXCEEDED");
    let wait: u64 = response.header("retry-after").parse().unwrap();
    assert!((1..=60).contains(&wait), "{wait}");
}

#[test]
fn requests_that_the_gateway_answers_take_tokens_of_the_owner() {
    let (_refusing, address) = backend::refusing();
    let (nodes, _agent, owner, other) = with_agent(&format!("http://{address}"));
    let limit = json!({ "burst": 5, "refill_per_minute": 1 });
    nodes.api(owner).change_service("demo", "echo", &limit);
    let ask = |rest: &str| ask(&nodes, other, "OPTIONS /", &format!("Max-Forwards: {rest}"));
    let long = format!("0\r\nContent-Length: 70000\r\n\r\n{}", "a".repeat(70_000));
    for rest in [
        "0\r\n\r\n",
        "0\r\nContent-Length: 3\r\n\r\nabc",
        "0\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        &long,
    ] {
        assert_eq!(ask(rest).status, 204, "{rest:?}");
    }
    let refused = eventually("the bucket is empty", || {
        Some(ask("0\r\n\r\n")).filter(|response| response.status == 429)
    });
    assert_eq!(refused.code(), "GW_RATE_LIMIT_EXCEEDED");
}

#[test]
fn a_trace_that_the_gateway_answers_takes_a_token_of_the_owner_and_shows_no_secret() {
    let (_refusing, address) = backend::refusing();
    let (nodes, _agent, owner, other) = with_agent(&format!("http://{address}"));
    let limit = json!({ "burst": 1, "refill_per_minute": 1 });
    nodes.api(owner).change_service("demo", "echo", &limit);
    let fields = "Max-Forwards: 0\r\nX-A: 1\r\nCookie: secret\r\n\r\n";
    let trace = || ask(&nodes, other, "TRACE /path", fields);
    let answer = trace();
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), "message/http");
    let text = String::from_utf8(answer.body).unwrap();
    let is_shown = |part: &&str| text.contains(*part);
    assert!(text.starts_with("TRACE /path HTTP/1.1\r\n"), "{text}");
    assert!(is_shown(&"\r\nx-a: 1\r\n"), "{text}");
    assert!(
        !["secret", "gw_sk_", "x-gw-"].iter().any(is_shown),
        "{text}"
    );
    let refused = eventually("the bucket is empty", || {
        Some(trace()).filter(|response| response.status == 429)
    });
    assert_eq!(refused.code(), "GW_RATE_LIMIT_EXCEEDED");
}

#[test]
fn the_owner_refuses_what_an_administrator_has_revoked_there() {
    let (nodes, _agent, owner, other) = with_agent(&any_path());
    let mut caller = nodes.connect(other);
    let served = caller.ask(nodes.request("GET /whole", "\r\n"));
    assert_eq!(served.status, 200);
    // The other node does not know of it yet.
    let path = format!("/accounts/demo/service-keys/{}", nodes.prepared.key_id());
    nodes.api(owner).delete(&path);
    let refused = eventually("the key is refused", || {
        let response = caller.ask(nodes.request("GET /whole", "\r\n"));
        Some(response).filter(|response| response.status != 200)
    });
    assert_eq!(error(&refused), "502 GW_SERVICE_KEY_INVALID");
}

#[test]
fn nodes_with_contradicting_placements_answer_503_after_one_hop_each() {
    let mut nodes = Nodes::start(2);
    let (first, second) = nodes.owner_and_other();
    nodes.place_at(first, &[second]);
    nodes.place_at(second, &[first]);
    let mut caller = nodes.connect(first);
    for rest in BODIES {
        let response = caller.ask(nodes.request("POST /", rest));
        assert_eq!(error(&response), "503 GW_NODE_UNAVAILABLE", "{rest:?}");
        assert_eq!(response.header("retry-after"), "1", "{rest:?}");
        assert_eq!(
            response.header("x-gw-status"),
            "NodeUnavailable",
            "{rest:?}"
        );
    }
    assert_eq!(nodes.total(first, "node_retries"), 6);
    assert_eq!(nodes.total(second, "node_retries"), 0);
    assert_eq!(nodes.total(second, "requests_crossing_nodes"), 0);
}

#[test]
fn a_request_follows_a_service_that_moves_to_another_node() {
    let (mut nodes, _agent, owner, other) = with_agent(&any_path());
    let mut caller = nodes.connect(other);
    // The owner does not know yet that it owns the service; it learns of it while the request
    // waits.
    nodes.place_at(owner, &[other]);
    caller.send(nodes.request("POST /whole", "Content-Length: 4\r\n\r\nwait"));
    eventually("the request was sent again", || {
        (nodes.total(other, "node_retries") > 0).then_some(())
    });
    nodes.place_at(owner, &[owner, other]);
    assert_eq!(caller.response().body, b"wait");
}

/// A busy node can learn much later than others that it owns a service.
#[test]
fn a_request_waits_for_an_owner_with_an_earlier_placement() {
    let (mut nodes, _agent, owner, other) = with_agent(&any_path());
    let mut caller = nodes.connect(other);
    nodes.place_at(owner, &[other]);
    nodes.place_at(other, &[owner, other]);
    caller.send(nodes.request("POST /whole", "Content-Length: 4\r\n\r\nwait"));
    let more = u64::try_from(NODE_RETRIES).unwrap() + 2;
    eventually("the request was sent again several times", || {
        (nodes.total(other, "node_retries") >= more).then_some(())
    });
    nodes.place_at(owner, &[owner, other]);
    assert_eq!(caller.response().body, b"wait");
}

/// A backend that never answers `/hang`.
fn hanging() -> String {
    backend::start(|mut peer| {
        while let Ok(head) = peer.request_head() {
            if head.target.path() == "/hang" {
                peer.is_closed();
                return;
            }
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        }
    })
}

/// Sends a request that the backend does not answer. Returns its caller once the owner has it.
fn hang(nodes: &Nodes, owner: usize, other: usize) -> Caller {
    let mut running = nodes.connect(other);
    running.send(nodes.request("GET /hang", "\r\n"));
    eventually("the request is on the tunnel", || {
        (nodes.tunnels(owner)[0].in_flight == 1).then_some(())
    });
    running
}

#[test]
fn a_request_without_an_agent_for_another_attempt_gets_the_error_of_the_lost_one() {
    let (mut nodes, agent, owner, other) = with_agent(&hanging());
    let mut running = hang(&nodes, owner, other);
    nodes.stop(owner);
    drop(agent);
    nodes.place(&[other]);
    assert_eq!(error(&running.response()), "502 GW_RELAY_ERROR");
}

#[test]
fn a_lost_owner_gives_errors_until_the_service_has_moved() {
    let (mut nodes, _agent, owner, other) = with_agent(&hanging());
    let mut running = hang(&nodes, owner, other);
    nodes.stop(owner);
    assert_eq!(error(&running.response()), "502 GW_RELAY_ERROR");
    // Once the link is closed, nothing reaches a backend.
    eventually("the node is gone", || {
        let error = error(&running.ask(nodes.request("GET /", "\r\n")));
        let gone = "503 GW_NODE_UNAVAILABLE";
        let known = ["502 GW_RELAY_ERROR", "503 GW_OVERLOADED", gone];
        assert!(known.contains(&&*error), "{error}");
        (error == gone).then_some(())
    });
    // A request that waits for the service to move is served.
    let mut waiting = nodes.connect(other);
    waiting.send(nodes.request("GET /", "\r\n"));
    nodes.place(&[other]);
    // Unless its agent takes longer than a request waits.
    let served = waiting.response();
    assert!(
        served.status == 200 || served.code() == "AGENT_UNAVAILABLE",
        "{}",
        served.status
    );
    nodes.wait_for_tunnel(other);
    let response = running.ask(nodes.request("GET /", "\r\n"));
    assert_eq!(response.body, b"ok");
}
