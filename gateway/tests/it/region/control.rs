//! A region of several nodes: HTTP between the control planes of the nodes.

use std::io::{self, Read};

use serde_json::json;

use crate::support::peers::caller::Caller;
use crate::support::peers::http1_peer::Peer;
use crate::support::peers::node_peer;
use crate::support::peers::node_peer::{ALPN_CONTROL, alive, certificate};
use crate::support::processes::nodes::Nodes;

const REQUEST: &str = "GET /v1/alive HTTP/1.1\r\nHost: node\r\n\r\n";

/// A connection of node 1 to the control plane of node 0.
fn connect(nodes: &Nodes) -> Caller {
    let identity = Some(node_peer::node_certificate(nodes, 1));
    Peer::new(node_peer::connect(nodes, 0, ALPN_CONTROL, identity))
}

#[test]
fn control_planes_of_nodes_are_served() {
    let nodes = Nodes::start(2);
    let mut peer = connect(&nodes);
    for _ in 0..3 {
        let response = peer.ask(REQUEST);
        assert_eq!(response.status, 200);
        assert_eq!(response.body, b"ok\n");
    }
    // Metrics are served to administrators alone.
    let metrics = peer.ask("GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n");
    assert_eq!(metrics.status, 404);
}

#[test]
fn only_nodes_reach_a_control_plane() {
    let nodes = Nodes::start(2);
    let session = format!("{:032x}", Nodes::session(1));
    let of_uri = |uri: &str| Some(certificate(&nodes, &format!("gw://{uri}")));
    let other_region = format!("eu2.gw.localhost/node/1/{session}");
    let agent = node_peer::agent_certificate(&nodes);
    for (name, identity) in [
        ("none", None),
        ("of an agent", Some(agent)),
        ("with a short session", of_uri("eu1.gw.localhost/node/1/1")),
        ("of another region", of_uri(&other_region)),
    ] {
        assert_eq!(alive(&nodes, 0, identity), None, "certificate {name}");
    }
    let node = node_peer::node_certificate(&nodes, 1);
    assert_eq!(alive(&nodes, 0, Some(node)), Some(200));
}

#[test]
fn a_process_that_has_ended_reads_nothing_with_its_certificate() {
    let nodes = Nodes::start(2);
    let ended = || Some(node_peer::ended_certificate(&nodes, 1));
    assert_eq!(alive(&nodes, 0, ended()), Some(403));
    let mut peer = Peer::new(node_peer::connect(&nodes, 0, ALPN_CONTROL, ended()));
    let refused = peer.ask("GET /v1/series HTTP/1.1\r\nHost: node\r\n\r\n");
    assert_eq!(refused.status, 403);
    let reason = b"the process of this certificate is not known as a node\n";
    assert_eq!(refused.body, reason);
}

/// A node that joins again after it was declared dead goes on with the next session.
#[test]
fn a_process_with_its_next_session_is_served_before_it_has_a_row() {
    let nodes = Nodes::start(2);
    let session = Nodes::session(1) + 1;
    let uri = format!("gw://eu1.gw.localhost/node/1/{session:032x}");
    assert_eq!(alive(&nodes, 0, Some(certificate(&nodes, &uri))), Some(200));
}

#[test]
fn a_node_without_a_placement_serves_no_control_plane() {
    let nodes = Nodes::start_unplaced(1);
    let node = node_peer::node_certificate(&nodes, 1);
    assert_eq!(alive(&nodes, 0, Some(node)), None);
}

#[test]
fn large_requests_are_refused() {
    let nodes = Nodes::start(2);
    let long = "a".repeat(20_000);
    let request = format!("GET /v1/alive HTTP/1.1\r\nHost: node\r\nX-Long: {long}\r\n\r\n");
    assert_eq!(connect(&nodes).ask(request).status, 431);
}

#[test]
fn connections_with_a_certificate_of_an_ended_authority_end() {
    let nodes = Nodes::start(2);
    let (certificate, key) = node_peer::node_certificate(&nodes, 1);
    let identity = || Some((certificate.clone(), key.clone_key()));
    let connect = |alpn| node_peer::connect(&nodes, 0, alpn, identity());
    let mut control_plane = Peer::new(connect(ALPN_CONTROL));
    assert_eq!(control_plane.ask(REQUEST).status, 200);
    let mut link = connect(b"gw-peer/2");
    let mut hello = [0; 12];
    link.read_exact(&mut hello).unwrap();

    let api = nodes.api(0);
    api.post("/agent-ca/replace", &json!({ "immediately": true }));
    for stream in [&mut control_plane.stream, &mut link] {
        let end = stream.read(&mut [0; 64]).map_err(|error| error.kind());
        assert!(is_end(end), "{end:?}");
    }
    assert_eq!(
        alive(&nodes, 0, identity()),
        None,
        "nor are new ones accepted"
    );
}

/// Whether the peer has closed the connection, with or without an alert of TLS before.
fn is_end(read: Result<usize, io::ErrorKind>) -> bool {
    use io::ErrorKind::{ConnectionReset, UnexpectedEof};
    matches!(read, Ok(0) | Err(UnexpectedEof | ConnectionReset))
}
