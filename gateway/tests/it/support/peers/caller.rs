//! HTTP/1.1 callers: TLS connections to a scene, with a chosen server name.

use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;

use http::Method;
use rustls::client::UnbufferedClientConnection;
use rustls::crypto::CryptoProvider;
use rustls::{ClientConfig, ClientConnection, StreamOwned, SupportedProtocolVersion};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};

use super::SOON;
use super::http1_peer::Peer;
use crate::support::scene::About;

pub(crate) type Tls = StreamOwned<ClientConnection, TcpStream>;
pub(crate) type Caller = Peer<Tls>;

/// Name of the scene's service.
pub(crate) const HOST: &str = "demo--echo.eu1.gw.localhost";

pub(crate) fn connect_to(
    about: &About,
    server_name: &str,
    alpn: &[&[u8]],
    identity: Option<(CertificateDer<'static>, PrivateKeyDer<'static>)>,
) -> Caller {
    Peer::new(StreamOwned::new(
        session(about, server_name, alpn, identity),
        socket(about),
    ))
}

/// Sends a request that the gateway answers itself. A connection without a request is closed after
/// `limits::HEAD`, and a used one only after `limits::IDLE`.
pub(crate) fn use_once(caller: &mut Caller, host: &str, key: &str) {
    caller.send(format!(
        "OPTIONS * HTTP/1.1\r\nHost: {host}\r\nX-Gw-Service-Key: {key}\r\nMax-Forwards: 0\r\n\r\n"
    ));
    assert_eq!(caller.response_to(&Method::OPTIONS).status, 204);
}

/// A TLS session before its handshake.
pub(crate) fn session(
    about: &About,
    server_name: &str,
    alpn: &[&[u8]],
    identity: Option<(CertificateDer<'static>, PrivateKeyDer<'static>)>,
) -> ClientConnection {
    let config = client_config(&about.ca_file, alpn, identity);
    let name = ServerName::try_from(server_name.to_owned()).unwrap();
    ClientConnection::new(Arc::new(config), name).unwrap()
}

/// A TLS session for a `TlsStream`.
pub(crate) fn unbuffered_session(
    about: &About,
    server_name: &str,
    alpn: &[&[u8]],
) -> UnbufferedClientConnection {
    let config = client_config(&about.ca_file, alpn, None);
    let name = ServerName::try_from(server_name.to_owned()).unwrap();
    UnbufferedClientConnection::new(Arc::new(config), name).unwrap()
}

/// A TCP connection to the gateway.
pub(crate) fn socket(about: &About) -> TcpStream {
    let port: u16 = about.base_url.rsplit(':').next().unwrap().parse().unwrap();
    let socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
    socket.set_nodelay(true).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    socket.set_write_timeout(Some(SOON)).unwrap();
    socket
}

fn client_config(
    ca_file: &Path,
    alpn: &[&[u8]],
    identity: Option<(CertificateDer<'static>, PrivateKeyDer<'static>)>,
) -> ClientConfig {
    client_config_of(rustls::DEFAULT_VERSIONS, ca_file, alpn, identity)
}

/// A configuration that trusts the authority in `ca_file` and speaks these versions of TLS. It
/// keeps the tickets of its sessions.
pub(crate) fn client_config_of(
    versions: &[&'static SupportedProtocolVersion],
    ca_file: &Path,
    alpn: &[&[u8]],
    identity: Option<(CertificateDer<'static>, PrivateKeyDer<'static>)>,
) -> ClientConfig {
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    client_config_with(provider, versions, ca_file, alpn, identity)
}

/// As [`client_config_of`], with the cipher suites and key exchanges of `provider`.
pub(crate) fn client_config_with(
    provider: CryptoProvider,
    versions: &[&'static SupportedProtocolVersion],
    ca_file: &Path,
    alpn: &[&[u8]],
    identity: Option<(CertificateDer<'static>, PrivateKeyDer<'static>)>,
) -> ClientConfig {
    let authority = CertificateDer::from_pem_file(ca_file).unwrap();
    gw_bed::tls::client_with(provider, versions, [authority], identity, alpn)
}
