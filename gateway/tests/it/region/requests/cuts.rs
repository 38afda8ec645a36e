//! Requests whose node and owner do not reach each other, while the nodes stay members.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use gw_shared::tunnel::frame::{self, FrameHeader, Kind, StreamId};
use gw_shared::tunnel::heartbeat::TCP_DEAD_AFTER;
use http::Method;
use serde_json::json;

use super::{any_path, assert_trailers_pass, charged, error, is_echoed, pattern, with_agent};
use crate::support::agents::in_process::Agent;
use crate::support::agents::tunnel_frames;
use crate::support::eventually;
use crate::support::peers::caller::{Caller, HOST};
use crate::support::peers::gate::{Gate, Passage, Target};
use crate::support::peers::held_backend::HeldBackend;
use crate::support::peers::{backend, node_peer};
use crate::support::processes::nodes::Nodes;
use crate::support::request_log::record;

/// Three nodes. The agent is connected to the owner of the service.
struct World {
    nodes: Nodes,
    owner: usize,
    other: usize,
    third: usize,
    /// Connections of the other node, and of the third one, to the owner.
    gates: [Gate; 2],
    /// Connections of the owner to the other node.
    back: Gate,
    agent: Option<Agent>,
}

impl World {
    fn start(backend: &str) -> Self {
        Self::with(Nodes::start(3), backend)
    }

    fn with(mut nodes: Nodes, backend: &str) -> Self {
        let (owner, other) = nodes.owner_and_other();
        let third = 3 - owner - other;
        let address = nodes.peer_address(owner);
        let gates = [(); 2].map(|()| Gate::to(Target::Tcp(address)));
        for (node, gate) in [other, third].into_iter().zip(&gates) {
            nodes.place_with(node, &[0, 1, 2], owner, gate.address);
        }
        let address = nodes.peer_address(other);
        let back = Gate::to(Target::Tcp(address));
        nodes.place_with(owner, &[0, 1, 2], other, back.address);
        let agent = nodes.run_agent(owner, backend);
        nodes.wait_for_tunnel(owner);
        Self {
            nodes,
            owner,
            other,
            third,
            gates,
            back,
            agent: Some(agent),
        }
    }

    /// Ends the agent, and waits until its tunnel has ended.
    fn end_agent(&mut self) {
        drop(self.agent.take());
        eventually("the tunnel has ended", || {
            self.nodes.tunnels(self.owner).is_empty().then_some(())
        });
    }

    /// Sends a request to the other node.
    fn send(&self, line: &str, rest: &str) -> Caller {
        let mut caller = self.nodes.connect(self.other);
        caller.send(self.nodes.request(line, rest));
        caller
    }

    /// Makes the other node look for the owner at this address.
    fn lead_to_owner(&mut self, address: SocketAddr) {
        self.nodes
            .place_with(self.other, &[0, 1, 2], self.owner, address);
    }

    /// Requests of other nodes' callers that the third node has sent to the owner.
    fn passed_on(&self) -> u64 {
        self.nodes.total(self.third, "requests_crossing_nodes")
    }

    /// Cuts the other node from the owner, and waits until its requests go by the third.
    fn cut(&self) {
        self.gates[0].set(Passage::Stalled);
        self.assert_served();
        assert_eq!(self.passed_on(), 1);
    }

    /// Asserts that the backend answers a request to the other node.
    #[track_caller]
    fn assert_served(&self) {
        let response = self.send("GET /none", "\r\n").response();
        assert_eq!(response.status, 204);
    }
}

#[test]
fn requests_of_all_kinds_go_by_a_third_node_while_the_owner_does_not_answer() {
    let world = World::start(&any_path());
    world.assert_served();
    assert_eq!(world.passed_on(), 0);
    world.cut();
    let connect = || world.nodes.connect(world.other);
    for length in [0, 3, 65_536, 65_537, 3_000_000] {
        for path in ["/whole", "/chunked"] {
            let is_echoed = is_echoed(&world.nodes, &mut connect(), path, length);
            assert!(is_echoed, "{path} {length}");
        }
    }
    assert_trailers_pass(&world.nodes, &mut connect());
    let mut switched = world.send(
        "GET /",
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: a\r\n\r\n",
    );
    assert_eq!(switched.response_head(&Method::GET).unwrap().status, 101);
    assert_eq!(switched.bytes(6).unwrap(), b"hello ");
    switched.send("a");
    assert_eq!(switched.bytes(2).unwrap(), b"aa");
    assert_eq!(world.passed_on(), 1 + 10 + 2);
    // Once the owner answers again, requests go there.
    world.gates[0].set(Passage::Open);
    eventually("the owner answers", || {
        let before = world.passed_on();
        world.assert_served();
        (world.passed_on() == before).then_some(())
    });
    switched.send("b");
    assert_eq!(switched.bytes(2).unwrap(), b"bb");
}

#[test]
fn requests_go_by_a_third_node_while_connections_to_the_owner_are_refused() {
    let mut world = World::start(&any_path());
    world.assert_served();
    let (refused, _held) = gw_local_region::hold(0).unwrap();
    let refused = ([127, 0, 0, 1], refused).into();
    let open = world.gates[0].address;
    world.lead_to_owner(refused);
    let mut short = world.send("POST /whole", "Content-Length: 3\r\n\r\nabc");
    let mut long = world.send("POST /whole", "Content-Length: 70000\r\n\r\n");
    long.send(pattern(70_000));
    assert_eq!(short.response().body, b"abc");
    assert_eq!(long.response().body, pattern(70_000));
    assert_eq!(world.passed_on(), 2);
    world.lead_to_owner(open);
    world.assert_served();
    assert_eq!(world.passed_on(), 2);
}

#[test]
fn a_safe_request_moves_once_after_a_third_node_has_lost_the_owner() {
    let held = HeldBackend::start();
    let world = World::start(&held.url);
    world.gates[0].set(Passage::Stalled);
    assert_eq!(world.send("GET /", "\r\n").response().status, 200);
    assert_eq!(world.passed_on(), 1);
    let mut safe = world.send("GET /held", "\r\n");
    held.wait_for_held();
    let mut other = world.send("POST /held", "Content-Length: 3\r\n\r\nabc");
    held.wait_for_held();
    // The other node reaches the owner again before the third one has lost it.
    world.gates[1].set(Passage::Stalled);
    world.gates[0].set(Passage::Open);
    assert_eq!(error(&other.response()), "502 GW_RELAY_ERROR");
    held.wait_for_held();
    (0..3).for_each(|_| held.release());
    assert_eq!(safe.response().body, b"00000000");
    assert_eq!(held.requests(), 4);
}

#[test]
fn a_body_that_waits_by_way_of_a_third_node_is_not_lost_with_the_owner() {
    const BODY: usize = 30_000;
    /// Charge of the third node for a request that awaits the acceptance. It is less while the body
    /// is sent with the head, and more if this node keeps the body.
    const WAITING: Range<usize> = 150_000..190_000;
    let received = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&received);
    let backend = backend::start(move |mut peer| {
        while let Ok((_, body, _)) = peer.request() {
            count.fetch_add(body.len(), Ordering::SeqCst);
            peer.send("HTTP/1.1 204 No Content\r\n\r\n");
        }
    });
    let mut world = World::start(&backend);
    world.cut();
    world.end_agent();
    let mut caller = world.send("POST /", &format!("Content-Length: {BODY}\r\n\r\n"));
    caller.send(pattern(BODY));
    let requests = |node| world.nodes.metrics(node).count("gw_node_requests");
    eventually("the request waits at the owner without its body", || {
        let waits = requests(world.owner) == 1 && requests(world.third) == 1;
        let holds_no_body = WAITING.contains(&charged(&world.nodes, world.third));
        (waits && holds_no_body).then_some(())
    });
    world.gates[1].set(Passage::Stalled);
    world.nodes.place_at(world.other, &[world.other]);
    let _agent = world.nodes.run_agent(world.other, &backend);
    assert_eq!(caller.response().status, 204);
    assert_eq!(received.load(Ordering::SeqCst), BODY);
}

#[test]
fn a_request_that_was_lost_on_a_link_is_sent_once_more_whatever_happens_then() {
    let sent = Arc::new(AtomicUsize::new(0));
    let received = Arc::clone(&sent);
    let backend = backend::start(move |mut peer| {
        while peer.request_head().is_ok() {
            match received.fetch_add(1, Ordering::SeqCst) {
                0 => drop(peer.is_closed()),
                1 => return,
                _ => peer.send("HTTP/1.1 204 No Content\r\n\r\n"),
            }
        }
    });
    let nodes = Nodes::start_with_agents(3, &["agent", "second"]);
    let world = World::with(nodes, &backend);
    let _second = world.nodes.run_agent_of("second", world.owner, &backend);
    eventually("both tunnels are open", || {
        (world.nodes.tunnels(world.owner).len() == 2).then_some(())
    });
    let mut caller = world.send("GET /", "\r\n");
    eventually("the request is at the backend", || {
        (sent.load(Ordering::SeqCst) == 1).then_some(())
    });
    world.gates[0].set(Passage::Stalled);
    assert_eq!(error(&caller.response()), "502 GW_BACKEND_RESET");
    assert_eq!(sent.load(Ordering::SeqCst), 2);
}

#[test]
fn an_attempt_that_is_lost_after_a_wait_at_another_owner_is_in_the_record() {
    let held = HeldBackend::start();
    let mut world = World::start(&held.url);
    // The other node has no tunnel of the service.
    world.nodes.place_at(world.other, &[world.other]);
    let mut caller = world.send("GET /held", "\r\n");
    eventually("the request waits", || {
        let metrics = world.nodes.metrics(world.other);
        (metrics.count("gw_crossing_requests") == 1).then_some(())
    });
    let owner = world.gates[0].address;
    world.lead_to_owner(owner);
    held.wait_for_held();
    world.gates[0].set(Passage::Stalled);
    held.wait_for_held();
    (0..2).for_each(|_| held.release());
    let response = caller.response();
    assert_eq!(response.status, 200);
    let api = world.nodes.api(world.other);
    let record = record(&api, response.header("x-gw-request-id"));
    assert_eq!(record["attempts"][0]["reason"], "node_lost", "{record}");
}

#[test]
fn requests_wait_and_are_refused_while_no_node_reaches_the_owner() {
    let world = World::start(&backend::answering("HTTP/1.1 204 No Content\r\n\r\n"));
    for gate in &world.gates {
        gate.set(Passage::Stalled);
    }
    // Nothing of it was sent. A node that does not reach the owner either passes nothing on.
    let send = || world.send("POST /", "Content-Length: 3\r\n\r\nabc");
    let response = send().response();
    assert_eq!(error(&response), "503 GW_NODE_UNAVAILABLE");
    assert!(!response.header("retry-after").is_empty());
    assert_eq!(world.passed_on(), 0);
    let mut waiting = send();
    world.gates[1].set(Passage::Open);
    assert_eq!(waiting.response().status, 204);
}

#[test]
fn a_cut_ends_requests_that_the_owner_has_not_accepted_and_no_others() {
    let held = HeldBackend::start();
    let world = World::start(&held.url);
    let mut begun = world.send("POST /held", "Content-Length: 100000\r\n\r\n");
    begun.send(pattern(99_999));
    let mut safe = world.send("GET /held", "\r\n");
    held.wait_for_held();
    let mut other = world.send("POST /held", "Content-Length: 3\r\n\r\nabc");
    held.wait_for_held();
    world.gates[0].set(Passage::Stalled);
    let cut = Instant::now();
    // The one that is safe is sent again, by the third node.
    held.wait_for_held();
    assert_eq!(error(&other.response()), "502 GW_RELAY_ERROR");
    assert!(cut.elapsed() < TCP_DEAD_AFTER, "{:?}", cut.elapsed());
    assert_eq!(world.passed_on(), 0, "it is counted with its answer");
    (0..3).for_each(|_| held.release());
    assert_eq!(safe.response().body, b"00000000");
    // The owner has accepted the upload before the cut.
    world.gates[0].set(Passage::Open);
    begun.send("x");
    held.wait_for_held();
    held.release();
    assert_eq!(begun.response().body, b"00100000");
}

#[test]
fn a_request_that_waits_for_its_answer_is_charged_the_least_window() {
    let held = HeldBackend::start();
    let world = World::start(&held.url);
    let mut waiting = world.send("GET /held", "\r\n");
    held.wait_for_held();
    let charged = charged(&world.nodes, world.other);
    assert!((64 * 1024..80 * 1024).contains(&charged), "{charged}");
    held.release();
    assert_eq!(waiting.response().status, 200);
}

/// The nodes reach each other, and only their heartbeats with the agent tell that it is gone.
#[test]
fn a_spliced_tunnel_stays_while_its_agent_does_not_answer() {
    const AWAY: Duration = Duration::from_secs(14);
    const _: () = assert!(AWAY.as_secs() < TCP_DEAD_AFTER.as_secs());
    let held = HeldBackend::start();
    let mut world = World::start(&held.url);
    world.end_agent();
    let World {
        nodes,
        owner,
        other,
        ..
    } = world;
    let uplink = Gate::to(Target::Tcp(nodes.gateway(other).address()));
    let _agent = nodes.run_agent_at("agent", uplink.address.port(), &held.url);
    nodes.wait_for_tunnel(owner);
    let mut waiting = nodes.connect(owner);
    waiting.send(nodes.request("POST /held", "Content-Length: 3\r\n\r\nabc"));
    held.wait_for_held();
    uplink.set(Passage::Stalled);
    std::thread::sleep(AWAY);
    uplink.set(Passage::Open);
    held.release();
    assert_eq!(waiting.response().body, b"00000003");
}

#[test]
fn a_tunnel_that_is_spliced_past_a_cut_ends_at_both_nodes() {
    let backend = backend::answering("HTTP/1.1 204 No Content\r\n\r\n");
    let mut world = World::start(&backend);
    world.end_agent();
    let World {
        nodes,
        owner,
        other,
        gates,
        back,
        ..
    } = world;
    let _agent = nodes.run_agent(other, &backend);
    nodes.wait_for_tunnel(owner);
    let ask = || {
        let request = nodes.request("GET /", "\r\n");
        nodes.connect(owner).ask(request)
    };
    assert_eq!(ask().status, 204);
    for gate in [&gates[0], &back] {
        gate.set(Passage::Stalled);
    }
    let cut = Instant::now();
    assert_eq!(error(&ask()), "502 GW_RELAY_ERROR");
    eventually("the agent has connected again", || {
        let again = nodes.total(other, "tunnels_spliced") > 1
            || nodes.turned_away(other, "owner_unreachable") > 0;
        again.then_some(())
    });
    assert!(cut.elapsed() < TCP_DEAD_AFTER, "{:?}", cut.elapsed());
    for gate in [&gates[0], &back] {
        gate.set(Passage::Open);
    }
    eventually("the service is served", || {
        (ask().status == 204).then_some(())
    });
}

/// Requests that a node gave up during a cut reach the owner together with their resets.
#[test]
fn a_request_that_arrives_with_its_reset_takes_no_token() {
    let (nodes, _agent, owner, other) = with_agent(&any_path());
    let limit = json!({ "burst": 1, "refill_per_minute": 1 });
    nodes.api(owner).change_service("demo", "echo", &limit);

    let identity = node_peer::node_certificate(&nodes, other);
    let mut link = node_peer::connect(&nodes, owner, b"gw-peer/2", Some(identity));
    let head = format!(
        "GET /none HTTP/1.1\r\nhost: {HOST}\r\nx-gw-node-principal: key {}\r\n\r\n",
        nodes.prepared.key_id()
    );
    let payload = [&65_536_u32.to_be_bytes(), head.as_bytes()].concat();
    let request =
        |slot| tunnel_frames::frame(Kind::Request, true, StreamId::new(slot, 1), &payload);
    let reset = |slot| tunnel_frames::reset(StreamId::new(slot, 1), b"");
    let given_up = (0..20).flat_map(|slot| [request(slot), reset(slot)].concat());
    let given_up: Vec<u8> = given_up.collect();
    link.write_all(&[given_up, request(20)].concat()).unwrap();
    let (kind, payload) = loop {
        let mut header = [0; frame::HEADER];
        link.read_exact(&mut header).unwrap();
        let header = FrameHeader::decode(header).unwrap();
        let mut payload = vec![0; header.length];
        link.read_exact(&mut payload).unwrap();
        if header.stream.slot() == 20 && header.kind != Kind::Interim {
            break (header.kind, payload);
        }
    };
    assert_eq!(kind, Kind::Response);
    let head = String::from_utf8_lossy(&payload[8..]);
    assert!(head.starts_with("HTTP/1.1 204"), "{head}");
}
