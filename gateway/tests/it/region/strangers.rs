//! A region of several nodes: strangers at the listener for other nodes.

use std::fs;
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};

use crate::support::peers::caller::HOST;
use crate::support::peers::proxy_protocol::socket_from;
use crate::support::peers::{is_open, node_peer};
use crate::support::processes::nodes::Nodes;
use crate::support::processes::region::Region;
use crate::support::{SOON, eventually};

/// The address of all nodes.
const OF_NODES: Ipv4Addr = Ipv4Addr::LOCALHOST;

/// A connection to the listener of node 0 for other nodes, from this address.
fn connect(nodes: &Nodes, from: Ipv4Addr) -> TcpStream {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket
        .bind(&SocketAddr::new(IpAddr::V4(from), 0).into())
        .unwrap();
    socket.connect(&nodes.peer_address(0).into()).unwrap();
    socket.into()
}

/// Connections with a ClientHello to the control plane of node 0 that go no further.
fn stall(nodes: &Nodes, from: Ipv4Addr, count: usize) -> Vec<TcpStream> {
    let stalled = || {
        let mut stream = connect(nodes, from);
        // Fails if the connection was refused at once.
        drop(stream.write_all(&node_peer::client_hello(node_peer::ALPN_CONTROL)));
        // Until the node has begun the handshake, or ended it. Otherwise it could begin many of
        // them at a time.
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
fn handshakes_of_strangers_with_a_node_are_bounded() {
    /// Handshakes of one worker, and of one address (docs/limits.md).
    const MOST: usize = 1024;
    const PER_ADDRESS: usize = 256;
    /// Bytes of a ClientHello, and most memory of a handshake.
    const HELLO: usize = 15_000;
    const EACH: usize = 48 * 1024;
    let Some(mut region) = Region::start(1) else {
        return;
    };
    region.kill(0);
    let config = fs::read_to_string(region.config(0)).unwrap();
    let config = config.replace("workers = 2", "workers = 1");
    fs::write(region.config(0), config).unwrap();
    region.restart(0);
    // The header of a record with a ClientHello of 16,000 bytes (RFC 8446 §5.1 and §4), and all but
    // its end.
    let mut hello = vec![0x16, 3, 1, 0x3e, 0x84, 1, 0, 0x3e, 0x80, 3, 3];
    hello.resize(HELLO, 0);
    let begin = |last| {
        let mut stream = socket_from(Ipv4Addr::new(127, 0, 0, last), region.peer_listen(0));
        // Fails if it had to give way already.
        let _ = stream.write_all(&hello);
        stream
    };
    drop(begin(2));
    let before = region.node(0).resident();
    // On a busy machine the time of the handshakes may end meanwhile. The process keeps the memory
    // of an attempt.
    let growth = (0..5).find_map(|_| {
        // One more of the first address ends its first one, and the one of a fifth address the
        // oldest of all.
        let firsts = (0..=PER_ADDRESS).map(|_| 2);
        let others = (PER_ADDRESS..=MOST).map(|number| 2 + (number / PER_ADDRESS) as u8);
        let all: Vec<TcpStream> = firsts.chain(others).map(begin).collect();
        eventually("the oldest have given way", || {
            (all.iter().filter(|stream| is_open(stream)).count() <= MOST).then_some(())
        });
        // The worker reads in the order of arrival.
        let mut caller = region.connect(0);
        caller.send(format!("GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n"));
        assert_eq!(caller.response().code(), "GW_AUTH_REQUIRED");
        let growth = region.node(0).resident().saturating_sub(before);
        let are_held = all[2..].iter().all(is_open) && !all[..2].iter().any(is_open);
        are_held.then_some(growth)
    });
    let growth = growth.expect("the oldest of the address and of all give way, and no others");
    eprintln!("{} KiB for {MOST} handshakes", growth / 1024);
    assert!(
        (MOST * HELLO / 2..=MOST * EACH).contains(&growth),
        "{growth}"
    );
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
