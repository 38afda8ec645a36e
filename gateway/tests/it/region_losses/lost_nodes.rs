//! A region that loses a node without any sign: its process is stopped, and sends nothing from then
//! on. The kernel still acknowledges what it receives, so only silence tells that the node is lost.

use std::time::{Duration, Instant};

use gw_shared::tunnel::heartbeat::TCP_DEAD_AFTER;
use serde_json::{Value, json};

use super::{connected_through, wait_until_dead};
use crate::support::eventually;
use crate::support::peers::caller::{Caller, HOST};
use crate::support::peers::gate::Passage;
use crate::support::peers::held_backend::HeldBackend;
use crate::support::processes::process::Running;
use crate::support::processes::region::Region;
use crate::support::request_log::record;

/// Longest time until a lost node costs nothing any more, on a slow machine: a region that has just
/// started declares no node dead in its first 10 seconds. Without probes, connections to it end
/// when TCP or a heartbeat notices the silence.
const NOTICED_WITHIN: Duration = Duration::from_secs(15);

const _: () = assert!(NOTICED_WITHIN.as_secs() < TCP_DEAD_AFTER.as_secs());

/// A region with an agent that is connected through `other`, while `owner` has the service.
struct World {
    region: Region,
    agent: Option<Running>,
    backend: HeldBackend,
    owner: usize,
    other: usize,
    third: usize,
}

impl World {
    fn start(is_gated: bool) -> Option<Self> {
        let region = if is_gated {
            Region::start_gated(3)
        } else {
            Region::start(3)
        }?;
        let backend = HeldBackend::start();
        let agent = region.run_agent(&backend.url);
        let owner = region.owner();
        let other = (owner + 1) % 3;
        let third = (owner + 2) % 3;
        let agent = connected_through(&region, other, agent, &backend.url);
        Some(Self {
            region,
            agent: Some(agent),
            backend,
            owner,
            other,
            third,
        })
    }

    /// A request at `other`.
    fn send(&self, line: &str, rest: &str) -> Caller {
        let mut caller = self.region.connect(self.other);
        let key = self.region.service_key();
        caller.send(format!(
            "{line} HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n{rest}"
        ));
        caller
    }

    /// Sends a request that the backend holds.
    fn hold(&self, line: &str, rest: &str) -> Caller {
        let caller = self.send(line, rest);
        self.backend.wait_for_held();
        caller
    }

    /// The failed attempts in the record of a request at `other`.
    fn attempts(&self, id: &str) -> Value {
        record(&self.region.api(self.other), id)["attempts"].clone()
    }
}

#[test]
fn requests_and_tunnels_leave_a_lost_owner_when_it_is_declared_dead() {
    let Some(world) = World::start(false) else {
        return;
    };
    let mut waiting = world.hold("GET /held", "\r\n");
    let mut sent = world.hold("POST /held", "Content-Length: 4\r\n\r\nbody");
    world.region.node(world.owner).process.signal("STOP");
    let lost = Instant::now();
    // The owner cannot accept it, so none of its body is sent.
    let mut long = world.send(
        "POST /",
        &format!("Content-Length: 100000\r\n\r\n{}", "x".repeat(100_000)),
    );
    let mut unsafe_but_short = world.send("POST /", "Content-Length: 4\r\n\r\nbody");

    for caller in [&mut sent, &mut unsafe_but_short] {
        let response = caller.response();
        assert_eq!(response.status, 502);
        assert_eq!(response.code(), "GW_RELAY_ERROR");
    }
    // The request without a body is sent again, on the tunnel that the agent has opened to the next
    // owner.
    world.backend.wait_for_held();
    eprintln!("served again {:?} after the loss", lost.elapsed());
    assert!(lost.elapsed() < NOTICED_WITHIN, "{:?}", lost.elapsed());
    (0..3).for_each(|_| world.backend.release());
    for (caller, body) in [(&mut waiting, b"00000000"), (&mut long, b"00100000")] {
        let response = caller.response();
        assert_eq!(response.status, 200);
        assert_eq!(&response.body[..], body);
        let attempts = world.attempts(response.header("x-gw-request-id"));
        assert_eq!(attempts[0]["reason"], "node_lost", "{attempts}");
        assert_eq!(attempts[0]["agent_id"], "", "{attempts}");
        assert_eq!(attempts.as_array().unwrap().len(), 1);
    }
    assert!(lost.elapsed() < NOTICED_WITHIN, "{:?}", lost.elapsed());
    // The request with a body has reached the backend once.
    let attempts = world.attempts(&sent_id(&world, "POST", "/held"));
    assert_eq!(attempts[0]["reason"], "node_lost", "{attempts}");
    world.region.node(world.owner).process.signal("CONT");
}

/// The id of the request at `other` with this method and path.
fn sent_id(world: &World, method: &str, path: &str) -> String {
    let find = || {
        let list = "/requests?account=demo&service=echo";
        let found = world.region.get(world.other, list).body;
        let records = found["items"].as_array()?;
        let record = records
            .iter()
            .find(|record| record["method"] == method && record["path"] == path)?;
        Some(record["id"].as_str()?.to_owned())
    };
    eventually("the request is in the log", find)
}

#[test]
fn a_node_that_only_lost_postgresql_finishes_its_requests() {
    let Some(world) = World::start(true) else {
        return;
    };
    let mut finished = world.hold("GET /held", "\r\n");
    world.region.engine_gates[world.owner].set(Passage::Stalled);
    wait_until_dead(&world.region, world.owner, world.other);
    // The service has moved, and the other nodes have told the node.
    eventually("the next owner serves", || {
        (world.region.request(world.third) == "200").then_some(())
    });
    world.backend.release();
    assert_eq!(finished.response().status.as_u16(), 200);
    let id = sent_id(&world, "GET", "/held");
    assert_eq!(world.attempts(&id), json!([]));
    world.region.engine_gates[world.owner].set(Passage::Open);
    world.region.wait_for_members(3);
}

#[test]
fn tunnels_through_a_lost_node_and_requests_of_its_callers_end_at_the_owner() {
    let Some(mut world) = World::start(false) else {
        return;
    };
    let _caller = world.hold("GET /held", "\r\n");
    assert_eq!(world.region.metric(world.owner, "gw_node_requests"), 1.0);
    world.region.node(world.other).process.signal("STOP");
    let lost = Instant::now();
    eventually("the tunnel and the request have ended", || {
        let metric = |name| world.region.metric(world.owner, name);
        (metric("gw_tunnels") == 0.0 && metric("gw_node_requests") == 0.0).then_some(())
    });
    assert!(lost.elapsed() < NOTICED_WITHIN, "{:?}", lost.elapsed());
    // The agent cannot know. Another one, or the same after its balancer has noticed, takes its
    // place.
    drop(world.agent.take());
    world.region.balance_to(&[world.third]);
    world.agent = Some(world.region.run_agent(&world.backend.url));
    eventually("the owner serves", || {
        (world.region.request(world.third) == "200").then_some(())
    });
    world.region.node(world.other).process.signal("CONT");
}
