//! A region of several nodes: HTTP between the control planes of the nodes.

use std::io::{self, Read};

use serde_json::json;

use crate::support::peers::http1_peer::Peer;
use crate::support::peers::node_peer;
use crate::support::peers::node_peer::{ALPN_CONTROL, alive, certificate};
use crate::support::processes::nodes::Nodes;

const REQUEST: &str = "GET /v1/alive HTTP/1.1\r\nHost: node\r\n\r\n";

#[test]
fn control_planes_of_nodes_are_served() {
    let nodes = Nodes::start(2);
    let mut peer = Peer::new(node_peer::connect(
        &nodes,
        0,
        ALPN_CONTROL,
        Some(node_peer::node_certificate(&nodes, 1)),
    ));
    for _ in 0..3 {
        peer.send(REQUEST);
        let response = peer.response();
        assert_eq!(
            (response.status.as_u16(), &response.body[..]),
            (200, &b"ok\n"[..])
        );
    }
    peer.send("GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n");
    assert_eq!(peer.response().status, 404);
}

#[test]
fn only_nodes_reach_a_control_plane() {
    let nodes = Nodes::start(2);
    let session = format!("{:032x}", Nodes::session(1));
    let identities = [
        None,
        Some(node_peer::agent_certificate(&nodes)),
        Some(certificate(&nodes, "gw://eu1.gw.localhost/node/1/1")),
        Some(certificate(
            &nodes,
            &format!("gw://eu2.gw.localhost/node/1/{session}"),
        )),
    ];
    for (case, identity) in identities.into_iter().enumerate() {
        assert_eq!(alive(&nodes, 0, identity), None, "case {case}");
    }
    assert_eq!(
        alive(&nodes, 0, Some(node_peer::node_certificate(&nodes, 1))),
        Some(200)
    );
}

#[test]
fn a_process_that_has_ended_reads_nothing_with_its_certificate() {
    let nodes = Nodes::start(2);
    let ended = || Some(node_peer::ended_certificate(&nodes, 1));
    assert_eq!(alive(&nodes, 0, ended()), Some(403));
    let mut peer = Peer::new(node_peer::connect(&nodes, 0, ALPN_CONTROL, ended()));
    peer.send("GET /v1/series HTTP/1.1\r\nHost: node\r\n\r\n");
    let refused = peer.response();
    assert_eq!(
        (refused.status.as_u16(), &refused.body[..]),
        (
            403,
            &b"the process of this certificate is not known as a node\n"[..]
        )
    );
    // A node that joins again after it was declared dead goes on with the next session, before it
    // has a row.
    let uri = format!(
        "gw://eu1.gw.localhost/node/1/{:032x}",
        Nodes::session(1) + 1
    );
    assert_eq!(alive(&nodes, 0, Some(certificate(&nodes, &uri))), Some(200));
}

#[test]
fn a_node_without_a_placement_serves_no_control_plane() {
    let nodes = Nodes::start_unplaced(1);
    assert_eq!(
        alive(&nodes, 0, Some(node_peer::node_certificate(&nodes, 1))),
        None
    );
}

#[test]
fn large_requests_are_refused() {
    let nodes = Nodes::start(2);
    let connect = || {
        Peer::new(node_peer::connect(
            &nodes,
            0,
            ALPN_CONTROL,
            Some(node_peer::node_certificate(&nodes, 1)),
        ))
    };
    let mut peer = connect();
    peer.send(format!(
        "GET /v1/alive HTTP/1.1\r\nHost: node\r\nX-Long: {}\r\n\r\n",
        "a".repeat(20_000)
    ));
    assert_eq!(peer.response().status, 431);
}

#[test]
fn connections_with_a_certificate_of_an_ended_authority_end() {
    let nodes = Nodes::start(2);
    let uri = format!("gw://eu1.gw.localhost/node/1/{:032x}", Nodes::session(1));
    let (certificate, key) = certificate(&nodes, &uri);
    let connect = |alpn| {
        node_peer::connect(
            &nodes,
            0,
            alpn,
            Some((certificate.clone(), key.clone_key())),
        )
    };
    let mut control_plane = Peer::new(connect(ALPN_CONTROL));
    control_plane.send(REQUEST);
    assert_eq!(control_plane.response().status, 200);
    let mut link = connect(b"gw-peer/2");
    let mut hello = [0; 12];
    link.read_exact(&mut hello).unwrap();

    let api = nodes.api(0);
    api.post("/agent-ca/replace", &json!({ "immediately": true }));
    for end in [
        control_plane.stream.read(&mut [0; 64]),
        link.read(&mut [0; 64]),
    ] {
        assert!(
            end.as_ref().is_ok_and(|read| *read == 0) || end.as_ref().is_err_and(is_end),
            "{end:?}"
        );
    }
    assert_eq!(
        alive(&nodes, 0, Some((certificate.clone(), key.clone_key()))),
        None,
        "nor are new ones accepted"
    );
}

/// The peer has closed the connection, with or without an alert of TLS before.
fn is_end(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset
    )
}
