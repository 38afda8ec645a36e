//! A region of several nodes: tunnels that are spliced to the node that owns their service.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use aws_lc_rs::hmac;

use super::OK;
use crate::support::eventually;
use crate::support::peers::caller::HOST;
use crate::support::peers::{backend, caller};
use crate::support::processes::nodes::{KEY, Nodes};

/// The announcement of a tunnel from 192.0.2.7:4660, as node `sender` writes it for the owner with
/// this session.
fn announcement(key: &[u8], sender: usize, session: u128) -> Vec<u8> {
    announcement_of(key, 7, sender, session)
}

/// The announcement of a tunnel from 192.0.2.`last`:4660.
fn announcement_of(key: &[u8], last: u8, sender: usize, session: u128) -> Vec<u8> {
    let secret = hmac::sign(
        &hmac::Key::new(hmac::HMAC_SHA256, key),
        b"gw announcement of a spliced tunnel",
    );
    let addresses = [192, 0, 2, last, 0, 0, 0, 0, 0x12, 0x34, 0, 0];
    let mut header = b"\r\n\r\n\0\r\nQUIT\n\x21\x11".to_vec();
    header.extend_from_slice(&(12u16 + 3 + 67).to_be_bytes());
    header.extend_from_slice(&addresses);
    header.extend_from_slice(b"\xe0\x00\x43\x01");
    header.extend_from_slice(&Nodes::slot(sender).get().to_be_bytes());
    header.extend_from_slice(&session.to_be_bytes());
    header.extend_from_slice(&[5; 16]);
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret.as_ref()), &header);
    header.extend_from_slice(tag.as_ref());
    header
}

/// A ClientHello of an agent of the scene's service.
fn client_hello(nodes: &Nodes, alpn: &[u8]) -> Vec<u8> {
    let mut session = caller::session(&nodes.about(0), HOST, &[alpn], None);
    let mut hello = Vec::new();
    session.write_tls(&mut hello).unwrap();
    hello
}

/// Bytes that a node answers before it ends the connection, or the first of them if it does not end
/// it.
fn answer(mut socket: TcpStream, sent: &[u8]) -> Vec<u8> {
    let mut received = vec![0; 16];
    // Fails if the node has closed the connection already.
    let _ = socket.write_all(sent);
    let length = socket.read(&mut received).unwrap_or(0);
    received.truncate(length);
    received
}

#[test]
fn a_tunnel_to_any_node_ends_at_the_owner() {
    let nodes = Nodes::start(3);
    let (owner, _) = nodes.owner_and_other();
    for node in 0..3 {
        let agent = nodes.run_agent(node, &backend::answering(OK));
        nodes.wait_for_tunnel(owner);
        let spliced = (0..3).map(|node| nodes.total(node, "tunnels_spliced"));
        let others = (0..=node).filter(|node| *node != owner).count() as u64;
        assert_eq!(spliced.sum::<u64>(), others);
        assert!((0..3).all(|other| other == owner || nodes.tunnels(other).is_empty()));
        let request = nodes.request("GET /", "\r\n");
        assert_eq!(nodes.connect(owner).ask(request).body, b"ok");
        agent.drain();
        eventually("the tunnel has ended", || {
            nodes.tunnels(owner).is_empty().then_some(())
        });
    }
}

#[test]
fn without_a_placement_each_node_serves_all_services() {
    let mut nodes = Nodes::start(2);
    let (owner, other) = nodes.owner_and_other();
    nodes.place_at(other, &[]);
    let _agent = nodes.run_agent(other, &backend::answering(OK));
    nodes.wait_for_tunnel(other);
    assert!(nodes.tunnels(owner).is_empty());
    assert_eq!(nodes.total(other, "tunnels_spliced"), 0);
}

#[test]
fn only_nodes_of_the_region_can_announce_a_tunnel() {
    let nodes = Nodes::start(2);
    let (owner, other) = nodes.owner_and_other();
    let hello = client_hello(&nodes, b"gw-tunnel/2");
    let valid = announcement(&KEY, other, Nodes::session(owner));
    // Content type 22: the handshake begins.
    let answered = answer(nodes.connect_as_node(owner), &[&valid[..], &hello].concat());
    assert_eq!(answered.first(), Some(&22), "{}", nodes.refusals(owner));
    let forged = announcement(&[8; 32], other, Nodes::session(owner));
    let mut changed = valid.clone();
    changed[16] ^= 1;
    let refused = [
        &forged[..],
        &changed,
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        &valid[..40],
    ];
    for (count, header) in refused.iter().enumerate() {
        let socket = nodes.connect_as_node(owner);
        if header.len() < hello.len() / 2 {
            socket.shutdown(std::net::Shutdown::Write).ok();
        }
        let sent = if header.len() == 40 {
            header.to_vec()
        } else {
            [header, &hello[..]].concat()
        };
        assert_eq!(answer(socket, &sent), b"", "{header:?}");
        let counted = || nodes.turned_away(owner, "node_unverified") == count as u64 + 1;
        eventually("the refusal is counted", || counted().then_some(()));
    }
}

#[test]
fn a_tunnel_for_another_process_or_another_protocol_is_refused() {
    let nodes = Nodes::start(2);
    let (owner, other) = nodes.owner_and_other();
    let hello = client_hello(&nodes, b"gw-tunnel/2");
    let cases = [
        // Recorded when another process had this slot.
        (owner, other, Nodes::session(owner) + 7, &hello),
        // The node does not own the service, although the header is meant for it.
        (other, owner, Nodes::session(other), &hello),
        // A caller, not an agent.
        (
            owner,
            other,
            Nodes::session(owner),
            &client_hello(&nodes, b"http/1.1"),
        ),
    ];
    for (refused, (node, sender, session, hello)) in (1..).zip(cases) {
        let sent = [&announcement(&KEY, sender, session)[..], hello].concat();
        assert_eq!(answer(nodes.connect_as_node(node), &sent), b"");
        let counted =
            || nodes.turned_away(owner, "not_owner") + nodes.turned_away(other, "not_owner");
        eventually("the refusal is counted", || {
            (counted() == refused).then_some(())
        });
    }
    for node in [owner, other] {
        assert_eq!(nodes.total(node, "tunnels_spliced"), 0, "at node {node}");
    }
}

#[test]
fn nodes_with_contradicting_placements_send_no_tunnel_around() {
    let mut nodes = Nodes::start(2);
    let (first, second) = nodes.owner_and_other();
    // Each takes the other one for the only member.
    nodes.place_at(first, &[second]);
    nodes.place_at(second, &[first]);
    let _agent = nodes.run_agent(first, &backend::answering(OK));
    eventually("the tunnel is refused", || {
        (nodes.turned_away(second, "not_owner") > 0).then_some(())
    });
    let again = nodes.total(second, "tunnels_spliced");
    assert_eq!(again, 0, "spliced once only");
    // The agent tries again, and succeeds once the nodes agree.
    nodes.place(&[first, second]);
    nodes.wait_for_tunnel(first);
}

#[test]
fn a_tunnel_whose_owner_is_lost_moves_to_the_next_one() {
    let mut nodes = Nodes::start(3);
    let (owner, other) = nodes.owner_and_other();
    let _agent = nodes.run_agent(other, &backend::answering(OK));
    nodes.wait_for_tunnel(owner);
    nodes.stop(owner);
    eventually("the lost owner is noticed", || {
        (nodes.turned_away(other, "owner_unreachable") > 0).then_some(())
    });
    let left: Vec<usize> = (0..3).filter(|node| *node != owner).collect();
    nodes.place(&left);
    let (next, _) = nodes.owner_and_other();
    nodes.wait_for_tunnel(next);
}

/// An address that answers no connection, as a lost machine: the queue of its listener is full.
fn silent() -> (Vec<socket2::Socket>, SocketAddr) {
    let listener =
        socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    listener
        .bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into())
        .unwrap();
    listener.listen(0).unwrap();
    let address = listener.local_addr().unwrap();
    let mut sockets = vec![listener];
    loop {
        let socket =
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        if socket
            .connect_timeout(&address, Duration::from_millis(200))
            .is_err()
        {
            return (sockets, address.as_socket().unwrap());
        }
        sockets.push(socket);
    }
}

/// Whether a connection of this process to `address` waits for an answer to its SYN.
fn is_connecting(address: SocketAddr) -> bool {
    const SYN_SENT: &str = "02";
    let remote = format!("0100007F:{:04X}", address.port());
    let sockets = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    sockets.lines().any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        fields.get(2) == Some(&remote.as_str()) && fields.get(3) == Some(&SYN_SENT)
    })
}

#[test]
fn a_tunnel_does_not_wait_for_a_silent_owner_after_its_service_has_moved() {
    let (full, address) = silent();
    let is_fast = || {
        let mut nodes = Nodes::start(3);
        let (owner, other) = nodes.owner_and_other();
        nodes.place_with(other, &[0, 1, 2], owner, address);
        let agent = nodes.run_agent(other, &backend::answering(OK));
        eventually("the node connects to the owner", || {
            is_connecting(address).then_some(())
        });
        let moved = Instant::now();
        let left: Vec<usize> = (0..3).filter(|node| *node != owner).collect();
        nodes.place(&left);
        eventually("the tunnel is open", || {
            left.iter()
                .any(|node| !nodes.tunnels(*node).is_empty())
                .then_some(())
        });
        drop(agent);
        moved.elapsed() < Duration::from_secs(1)
    };
    // A connection without an answer is given up after two seconds, more than one of which is left
    // at least once.
    assert!((0..5).any(|_| is_fast()));
    drop(full);
}

#[test]
fn tunnels_move_when_their_service_or_the_node_between_moves() {
    let mut nodes = Nodes::start(3);
    let (owner, other) = nodes.owner_and_other();
    let _agent = nodes.run_agent(other, &backend::answering(OK));
    nodes.wait_for_tunnel(owner);
    let generation = nodes.tunnels(owner)[0].generation;
    // The node that splices the connection leaves: the agent connects again before the old tunnel
    // ends.
    let left: Vec<usize> = (0..3).filter(|node| *node != other).collect();
    nodes.place(&left);
    eventually("the agent has connected again", || {
        let tunnels = nodes.tunnels(owner);
        tunnels
            .iter()
            .any(|tunnel| tunnel.generation > generation && !tunnel.draining)
            .then_some(())
    });
    // The service moves to another node.
    let next: Vec<usize> = left.into_iter().filter(|node| *node != owner).collect();
    nodes.place(&next);
    nodes.wait_for_tunnel(next[0]);
    eventually("the old tunnel has ended", || {
        nodes.tunnels(owner).is_empty().then_some(())
    });
}

#[test]
fn limits_apply_to_the_address_of_the_agent() {
    let nodes = Nodes::start_with(2, "connections_per_address = 1\n");
    let (owner, other) = nodes.owner_and_other();
    let hello = client_hello(&nodes, b"gw-tunnel/2");
    let connect = |last: u8| {
        let mut socket = nodes.connect_as_node(owner);
        let header = announcement_of(&KEY, last, other, Nodes::session(owner));
        socket.write_all(&[&header[..], &hello].concat()).unwrap();
        socket
    };
    let different: Vec<TcpStream> = (0..5).map(connect).collect();
    for mut socket in &different {
        // The node answers the ClientHello.
        socket.read_exact(&mut [0]).unwrap();
    }
    assert_eq!(nodes.turned_away(owner, "address_connections"), 0);
    // All tunnels of a service are on one worker.
    let _same: Vec<TcpStream> = (0..5).map(|_| connect(100)).collect();
    eventually("only one is taken", || {
        (nodes.turned_away(owner, "address_connections") == 4).then_some(())
    });
}
