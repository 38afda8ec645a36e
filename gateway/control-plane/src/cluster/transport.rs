//! TLS connections between control planes.

use std::io;

use crate::limits;
use gw_base::tls::pki::{self, NodeIdentity};
use gw_interface::node_connections::NodeConnection;
use gw_region::Member;
use gw_shared::net::tls::{TlsFailure, in_words};
use rustls::server::Acceptor;
use rustls_pki_types::{CertificateDer, ServerName};
use tokio::net::TcpStream;
use tokio_rustls::{StartHandshake, TlsConnector, client, server};

use super::{LocalNode, NodeCallError};

/// Why a connection is not served.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotServed {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("{}", TlsFailure(.0.clone()))]
    Tls(#[from] rustls::Error),
    #[error("its certificate is not that of a node of this region")]
    OtherCertificate,
    #[error("this node has no certificate yet")]
    NoCertificate,
    #[error("no whole ClientHello")]
    NoClientHello,
    #[error("no handshake in time")]
    TimedOut,
    #[error("it gave way to a later handshake")]
    GaveWay,
    #[error("there are too many connections of other nodes' control planes")]
    TooMany,
}

/// Does the handshake as the server. The other end must be a node of the region.
pub(super) async fn accept(
    connection: NodeConnection,
    node: &LocalNode,
) -> Result<
    (
        server::TlsStream<TcpStream>,
        NodeIdentity,
        CertificateDer<'static>,
    ),
    NotServed,
> {
    let tls = node.tls().ok_or(NotServed::NoCertificate)?;
    let socket = std::net::TcpStream::from(connection.socket);
    socket.set_nonblocking(true)?;
    let socket = TcpStream::from_std(socket)?;
    set_options(&socket)?;
    let mut acceptor = Acceptor::default();
    let mut received = &connection.received[..];
    while !received.is_empty() {
        acceptor.read_tls(&mut received)?;
    }
    let accepted = acceptor
        .accept()
        .map_err(|(error, _)| error)?
        .ok_or(NotServed::NoClientHello)?;
    let stream = StartHandshake::from_parts(accepted, socket)
        .into_stream(tls.server.clone())
        .await
        .map_err(in_words)?;
    let session = stream.get_ref().1;
    let identity = identity(session, node).ok_or(NotServed::OtherCertificate)?;
    let shown = session
        .peer_certificates()
        .and_then(|chain| chain.first())
        .ok_or(NotServed::OtherCertificate)?;
    let certificate = shown.clone().into_owned();
    Ok((stream, identity, certificate))
}

/// Connects to the control plane of a member. Fails if another process answers there.
pub(super) async fn connect(
    to: &Member,
    node: &LocalNode,
) -> Result<client::TlsStream<TcpStream>, NodeCallError> {
    let tls = node.tls().ok_or(NodeCallError::NoCertificate)?;
    let socket = TcpStream::connect(to.peer_address)
        .await
        .map_err(|error| match error.kind() {
            io::ErrorKind::ConnectionRefused => NodeCallError::Refused,
            _ => NodeCallError::Io(error),
        })?;
    set_options(&socket)?;
    // An address is not sent in the ClientHello.
    let name = ServerName::IpAddress(to.peer_address.ip().into());
    let stream = TlsConnector::from(tls.control_client.clone())
        .connect(name, socket)
        .await
        .map_err(in_words)?;
    let member = NodeIdentity {
        slot: to.slot,
        session: to.session,
    };
    let other = identity(stream.get_ref().1, node);
    if other != Some(member) {
        return Err(NodeCallError::OtherProcess(other));
    }
    Ok(stream)
}

fn set_options(socket: &TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let socket = socket2::SockRef::from(socket);
    socket.set_tcp_user_timeout(Some(limits::CLUSTER_DEAD_AFTER))
}

/// The node at the other end.
fn identity(session: &rustls::CommonState, node: &LocalNode) -> Option<NodeIdentity> {
    let certificate = session.peer_certificates()?.first()?;
    pki::node_identity(certificate, &node.region)
}
