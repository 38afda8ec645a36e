//! A region of several nodes: strangers at the listener for other nodes.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};

use crate::support::peers::node_peer;
use crate::support::processes::nodes::Nodes;
use crate::support::{SOON, eventually};

/// The address of all nodes.
const OF_NODES: Ipv4Addr = Ipv4Addr::LOCALHOST;

/// A connection to the listener of node 0 for other nodes, from this address.
fn connect(nodes: &Nodes, from: Ipv4Addr) -> TcpStream {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket
        .bind(&SocketAddr::new(IpAddr::V4(from), 0).into())
        .unwrap();
    socket
        .connect(&nodes.gateway(0).peer_address().unwrap().into())
        .unwrap();
    socket.into()
}

/// Connections with a ClientHello to the control plane of node 0 that go no further.
fn stall(nodes: &Nodes, from: Ipv4Addr, count: usize) -> Vec<TcpStream> {
    let stalled = || {
        let mut stream = connect(nodes, from);
        // Fails if the connection was refused at once.
        drop(stream.write_all(&node_peer::client_hello(node_peer::ALPN_CONTROL)));
        // Until the node has begun the handshake, or ended it. Otherwise it could begin many of them at a time.
        stream.set_read_timeout(Some(SOON)).unwrap();
        drop(stream.peek(&mut [0]));
        stream
    };
    (0..count).map(|_| stalled()).collect()
}

/// Whether node 0 serves its control plane to node 1, on new connections.
fn serves_nodes(nodes: &Nodes) -> bool {
    (0..10).all(|_| {
        node_peer::alive(nodes, 0, Some(node_peer::node_certificate(nodes, 1))) == Some(200)
    })
}

#[test]
fn stalled_handshakes_of_strangers_do_not_keep_a_control_plane_from_nodes() {
    let nodes = Nodes::start(2);
    let strangers = (2..6).map(|last| Ipv4Addr::new(127, 0, 0, last));
    let mut held: Vec<TcpStream> = Vec::new();
    for from in strangers {
        held.extend(stall(&nodes, from, 130));
        assert!(serves_nodes(&nodes), "{} stalled handshakes", held.len());
    }
    // A stranger on the machine of a node.
    held.extend(stall(&nodes, OF_NODES, 300));
    assert!(serves_nodes(&nodes), "{} stalled handshakes", held.len());
}

#[test]
fn connections_of_strangers_count_for_their_address_and_those_of_nodes_do_not() {
    let nodes = Nodes::start_with(2, "connections_per_address = 10\n");
    let held: Vec<TcpStream> = (0..60)
        .map(|_| connect(&nodes, Ipv4Addr::new(127, 0, 0, 2)))
        .collect();
    // Two workers hold ten each.
    let refused = || nodes.turned_away(0, "address_connections");
    eventually("further connections are refused", || {
        (refused() >= 40).then_some(())
    });
    let before = refused();
    let of_node: Vec<TcpStream> = (0..60).map(|_| connect(&nodes, OF_NODES)).collect();
    assert!(serves_nodes(&nodes));
    assert_eq!(refused(), before);
    drop((held, of_node));
}
