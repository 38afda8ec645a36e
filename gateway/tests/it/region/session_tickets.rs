//! A caller that was at one node of a region resumes at each other node.

use rustls::HandshakeKind;
use rustls::version::TLS13;

use crate::support::peers::resuming_caller::{caller, handshake};
use crate::support::processes::nodes::Nodes;

#[test]
fn a_session_of_one_node_resumes_at_another() {
    let nodes = Nodes::start(2);
    let config = caller(&nodes.prepared, &TLS13);
    let at = |node| handshake(&nodes.prepared, &config, nodes.gateway(node).address());
    assert_eq!(at(0), HandshakeKind::Full);
    assert_eq!(at(1), HandshakeKind::Resumed);
    assert_eq!(at(0), HandshakeKind::Resumed);
}
