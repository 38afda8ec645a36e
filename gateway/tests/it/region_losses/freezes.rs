//! Nodes whose process stops for a while: requests queue on their sockets, and the records change
//! meanwhile.

use std::fs;
use std::time::{Duration, Instant};

use gw_shared::tunnel::handshake;
use http::Method;
use serde_json::{Value, json};

use super::load::{self, Load};
use super::{OK, connected_through, wait_until_dead};
use crate::support::agents::{in_process, modified_agent};
use crate::support::apex::APEX;
use crate::support::peers::backend;
use crate::support::peers::caller::{Caller, HOST, connect_to};
use crate::support::peers::gate::Passage;
use crate::support::peers::http1_peer::Response;
use crate::support::processes::region::Region;
use crate::support::{eventually, turn};

/// Shorter than the lease of a node, which the others therefore do not declare dead.
const FREEZE: Duration = Duration::from_millis(2500);

/// Time for which a node stays frozen after the others have declared it dead, five seconds after
/// its last sign of life.
const FREEZE_BEYOND_DEATH: Duration = Duration::from_secs(5);

/// Stops the process of a node while it changes the region by `change` at another one, for
/// [`FREEZE`] at least.
fn frozen(region: &Region, node: usize, change: impl FnOnce()) {
    let process = &region.node(node).process;
    process.signal("STOP");
    let stat = format!("/proc/{}/stat", process.id());
    eventually("the process is stopped", || {
        let stat = fs::read_to_string(&stat).unwrap();
        stat.contains(") T ").then_some(())
    });
    let stopped = Instant::now();
    change();
    std::thread::sleep(FREEZE.saturating_sub(stopped.elapsed()));
    process.signal("CONT");
}

/// A key or a credential of the scene's service.
fn created(region: &Region, kind: &str) -> Value {
    let body = json!({ "name": "queued", "allowed_services": ["echo"] });
    region.api(0).post(&format!("/accounts/demo/{kind}"), &body)
}

fn text<'a>(created: &'a Value, member: &str) -> &'a str {
    created[member].as_str().unwrap()
}

fn get(key: &str) -> String {
    format!("GET / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n\r\n")
}

fn token_request(credential: &Value) -> String {
    let body = json!({
        "client_id": credential["client_id"],
        "client_secret": credential["client_secret"],
        "scope": "account:demo service:echo",
    });
    let body = body.to_string();
    let length = body.len();
    format!(
        "POST /oauth/token HTTP/1.1\r\nHost: {APEX}\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n\r\n{body}"
    )
}

fn send(callers: &mut [Caller], request: &str) {
    callers.iter_mut().for_each(|caller| caller.send(request));
}

/// The next response on each connection.
fn responses(callers: &mut [Caller]) -> Vec<Response> {
    callers.iter_mut().map(Caller::response).collect()
}

fn statuses(callers: &mut [Caller]) -> Vec<u16> {
    let responses = responses(callers).into_iter();
    responses.map(|response| response.status.as_u16()).collect()
}

/// Disables a key or a credential at a node, and expects that its answer names `pending`.
fn disable(region: &Region, node: usize, path: &str, pending: &str) {
    let body = json!({ "enabled": false });
    let reply = region.api(node).ask("PATCH", path, &body);
    // On a slow machine it is declared dead meanwhile.
    let named = reply.pending_nodes.trim_end_matches(";dead");
    assert_eq!((reply.status, named), (200, pending));
}

#[test]
fn requests_that_queued_in_a_freeze_are_refused_if_their_key_was_revoked_meanwhile() {
    let Some(region) = Region::start(2) else {
        return;
    };
    let _agent = region.run_agent(&backend::answering(OK));
    let owner = region.owner();
    let key = created(&region, "service-keys");
    let credential = created(&region, "credentials");
    let about = region.about(owner);
    let mut callers: Vec<_> = (0..8).map(|_| region.connect(owner)).collect();
    let mut clients: Vec<_> = (0..4)
        .map(|_| connect_to(&about, APEX, &[b"http/1.1"], None))
        .collect();
    let request = get(text(&key, "service_key"));
    let token_request = token_request(&credential);
    send(&mut callers, &request);
    send(&mut clients, &token_request);
    assert_eq!(statuses(&mut callers), [200; 8]);
    assert_eq!(statuses(&mut clients), [200; 4]);
    let slot = region.status(owner)["node"].to_string();
    frozen(&region, owner, || {
        send(&mut callers, &request);
        send(&mut clients, &token_request);
        for (kind, id) in [
            ("service-keys", text(&key, "key_id")),
            ("credentials", text(&credential, "client_id")),
        ] {
            let path = format!("/accounts/demo/{kind}/{id}");
            disable(&region, 1 - owner, &path, &slot);
        }
    });
    for answer in responses(&mut callers) {
        assert_eq!(answer.status, 502, "{answer:?}");
        assert_eq!(answer.code(), "GW_SERVICE_KEY_INVALID", "{answer:?}");
    }
    assert_eq!(statuses(&mut clients), [401; 4], "no token is minted");
    assert_eq!(region.request(owner), "200");
}

#[test]
fn a_handshake_that_queued_in_a_freeze_is_refused_if_its_agent_was_revoked_meanwhile() {
    let Some(region) = Region::start(2) else {
        return;
    };
    let owner = {
        let _agent = region.run_agent(&backend::answering(OK));
        region.owner()
    };
    let identity = in_process::identity(&region.agent_folder());
    let mut tunnel = modified_agent::connection(&region.about(owner), HOST, identity);
    let agents = region.api(owner).agents("demo");
    let agent = text(&agents[0], "agent_id");
    frozen(&region, owner, || {
        tunnel.send(handshake::request(HOST, None));
        region.api(1 - owner).revoke_agent("demo", agent);
    });
    // The revocation may also close the connection before the answer.
    let answer = tunnel.try_response(&Method::GET);
    let status = answer.map(|answer| answer.status.as_u16());
    assert!(matches!(status, Err(_) | Ok(401)), "{status:?}");
}

#[test]
fn requests_that_queued_in_a_freeze_are_served_from_memory_without_postgresql() {
    let Some(region) = Region::start_gated(2) else {
        return;
    };
    let _agent = region.run_agent(&backend::answering(OK));
    let owner = region.owner();
    let mut callers: Vec<_> = (0..4).map(|_| region.connect(owner)).collect();
    let request = get(region.service_key());
    send(&mut callers, &request);
    assert_eq!(statuses(&mut callers), [200; 4]);
    frozen(&region, owner, || {
        send(&mut callers, &request);
        region.engine_gates[owner].set(Passage::Stalled);
    });
    assert_eq!(statuses(&mut callers), [200; 4]);
    region.engine_gates[owner].set(Passage::Open);
}

/// The agent is connected to the owner itself: it connects again only once the owner goes on.
#[test]
fn no_request_gets_504_when_an_owner_is_declared_dead_and_goes_on_five_seconds_later() {
    let _turn = turn();
    let Some((region, agent, received)) = load::start() else {
        return;
    };
    let owner = region.owner();
    let _agent = connected_through(&region, owner, agent, &received.backend());
    region.balance_to(&[0, 1, 2]);
    let load = Load::start(&region, 3);
    load.wait_for(100);
    frozen(&region, owner, || {
        wait_until_dead(&region, owner, (owner + 1) % 3);
        std::thread::sleep(FREEZE_BEYOND_DEATH);
    });
    region.wait_for_members(3);
    load.wait_for(300);
    let outcome = load.stop();
    outcome.assert_no_failure(|failure| failure.what.starts_with("504 "));
}
