//! A caller that keeps the tickets of its TLS sessions.

use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;

use http::Method;
use rustls::{ClientConfig, ClientConnection, HandshakeKind, SupportedProtocolVersion};
use rustls_pki_types::ServerName;

use super::caller::{HOST, Tls, client_config_of, socket};
use super::http1_peer::Peer;
use crate::support::processes::prepared::Prepared;

/// Sends a request, which is refused without an agent, and says how the connection of its caller
/// began.
pub(crate) fn handshake(
    prepared: &Prepared,
    config: &Arc<ClientConfig>,
    address: SocketAddr,
) -> HandshakeKind {
    let name = ServerName::try_from(HOST).unwrap();
    let session = ClientConnection::new(Arc::clone(config), name).unwrap();
    let mut stream = Tls::new(session, socket(&prepared.about(address)));
    write!(stream, "GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n").unwrap();
    let mut peer = Peer::new(stream);
    // The tickets arrive before the response.
    assert_eq!(peer.response_head(&Method::GET).unwrap().status, 502);
    peer.stream.conn.handshake_kind().unwrap()
}

/// A caller of the version of TLS.
pub(crate) fn caller(
    prepared: &Prepared,
    version: &'static SupportedProtocolVersion,
) -> Arc<ClientConfig> {
    let ca_file = prepared.path("data/dev-ca.crt");
    Arc::new(client_config_of(&[version], &ca_file, &[b"http/1.1"], None))
}
