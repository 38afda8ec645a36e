//! The way of connections between control planes: a worker accepts them, and the control plane
//! serves them.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use crate::limits;
use bytes::Bytes;
use tokio::sync::mpsc;

use crate::rate_limit::Claimant;

/// A connection of another node's control plane, whose ClientHello a worker has read.
pub struct NodeConnection {
    /// The accepted socket.
    pub socket: OwnedFd,
    /// Bytes received so far: the ClientHello.
    pub received: Bytes,
    /// Address of the peer.
    pub from: SocketAddr,
    /// Whether `from` is an address of a node.
    pub claimant: Claimant,
}

/// The way of connections from the workers to the control plane. Bounded: more are closed. Those
/// from addresses of nodes have a queue of their own, so that others do not use it up.
#[derive(Clone)]
pub struct NodeConnections {
    of_nodes: mpsc::Sender<NodeConnection>,
    of_others: mpsc::Sender<NodeConnection>,
}

/// Connections that wait for the control plane.
pub struct WaitingConnections {
    of_nodes: mpsc::Receiver<NodeConnection>,
    of_others: mpsc::Receiver<NodeConnection>,
}

/// The sending and the receiving end of the queues, with room for [`limits::CLUSTER_WAITING`]
/// connections in each.
pub fn channel() -> (NodeConnections, WaitingConnections) {
    let (to_nodes, of_nodes) = mpsc::channel(limits::CLUSTER_WAITING);
    let (to_others, of_others) = mpsc::channel(limits::CLUSTER_WAITING);
    (
        NodeConnections {
            of_nodes: to_nodes,
            of_others: to_others,
        },
        WaitingConnections {
            of_nodes,
            of_others,
        },
    )
}

impl NodeConnections {
    /// Never blocks. Returns whether there was room; without room the connection is closed.
    pub fn give(&self, connection: NodeConnection) -> bool {
        let queue = if connection.claimant == Claimant::Known {
            &self.of_nodes
        } else {
            &self.of_others
        };
        queue.try_send(connection).is_ok()
    }
}

impl WaitingConnections {
    /// The next connection, those from addresses of nodes first.
    pub async fn next(&mut self) -> Option<NodeConnection> {
        tokio::select! {
            biased;
            Some(connection) = self.of_nodes.recv() => Some(connection),
            Some(connection) = self.of_others.recv() => Some(connection),
            else => None,
        }
    }
}
