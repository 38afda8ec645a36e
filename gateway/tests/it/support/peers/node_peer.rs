//! A peer on the listener of a node for other nodes, with any certificate.

use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;

use gw_bed::threads::listen_tls;
use http::Method;
use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, Issuer, KeyPair, SanType};
use rustls::{ClientConnection, StreamOwned};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::caller::HOST;
use super::http1_peer::Peer;
use crate::support::agents::in_process::{self, Identity};
use crate::support::processes::nodes::Nodes;
use crate::support::processes::process;

/// A certificate of the region's authority with this URI, for clients.
pub(crate) fn certificate(nodes: &Nodes, uri: &str) -> Identity {
    certificate_in(&nodes.prepared.path("data"), uri)
}

/// As [`certificate`], of the authority in this data folder.
pub(crate) fn certificate_in(data_dir: &Path, uri: &str) -> Identity {
    certificate_for(data_dir, uri, ExtendedKeyUsagePurpose::ClientAuth)
}

/// A listener at `address` in place of a node with this URI, which answers every request of a
/// control plane with `answer`.
pub(crate) fn serve_in_place(
    data_dir: &Path,
    uri: &str,
    address: SocketAddr,
    answer: impl Fn() -> &'static str + Send + Sync + 'static,
) {
    let identity = certificate_for(data_dir, uri, ExtendedKeyUsagePurpose::ServerAuth);
    let config = gw_bed::tls::server(identity, &[ALPN_CONTROL]);
    let socket = process::hold(address);
    socket.listen(16).unwrap();
    listen_tls(socket.into(), config, move |mut peer| {
        while peer.request().is_ok() {
            peer.send(answer());
        }
    });
}

fn certificate_for(data_dir: &Path, uri: &str, usage: ExtendedKeyUsagePurpose) -> Identity {
    let read = |name: &str| std::fs::read_to_string(data_dir.join(name)).unwrap();
    let key = KeyPair::from_pem(&read("agent-ca.key")).unwrap();
    let issuer = Issuer::from_ca_cert_pem(&read("agent-ca.crt"), key).unwrap();
    let mut params = CertificateParams::default();
    params.extended_key_usages = vec![usage];
    params.subject_alt_names = vec![SanType::URI(uri.try_into().unwrap())];
    let pair = KeyPair::generate().unwrap();
    let certificate = params.signed_by(&pair, &issuer).unwrap();
    (
        certificate.der().clone(),
        PrivateKeyDer::from_pem_slice(pair.serialize_pem().as_bytes()).unwrap(),
    )
}

#[derive(Debug)]
struct TrustAll(rustls::crypto::WebPkiSupportedAlgorithms);

impl rustls::client::danger::ServerCertVerifier for TrustAll {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &rustls_pki_types::ServerName<'_>,
        _: &[u8],
        _: rustls_pki_types::UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(message, certificate, signature, &self.0)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, certificate, signature, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        self.0.supported_schemes()
    }
}

/// The certificate of the process that runs as this node.
pub(crate) fn node_certificate(nodes: &Nodes, node: usize) -> Identity {
    certificate(
        nodes,
        &format!(
            "gw://eu1.gw.localhost/node/{node}/{:032x}",
            Nodes::session(node)
        ),
    )
}

/// The certificate of a process that was this node before the one that runs, or of one that the
/// table of nodes does not list.
pub(crate) fn ended_certificate(nodes: &Nodes, node: usize) -> Identity {
    certificate(
        nodes,
        &format!(
            "gw://eu1.gw.localhost/node/{node}/{:032x}",
            Nodes::session(node) - 1
        ),
    )
}

/// The certificate of the agent.
pub(crate) fn agent_certificate(nodes: &Nodes) -> Identity {
    in_process::identity(&nodes.prepared.path("agent"))
}

/// ALPN of HTTP between control planes.
pub(crate) const ALPN_CONTROL: &[u8] = b"gw-control/1";

/// The first bytes of a handshake.
pub(crate) fn client_hello(alpn: &[u8]) -> Vec<u8> {
    let mut hello = Vec::new();
    session(alpn, None).write_tls(&mut hello).unwrap();
    hello
}

/// Status of a request to the control plane of `node`; `None` if the node ends the connection.
pub(crate) fn alive(nodes: &Nodes, node: usize, identity: Option<Identity>) -> Option<u16> {
    let mut peer = Peer::new(connect(nodes, node, ALPN_CONTROL, identity));
    std::io::Write::write_all(
        &mut peer.stream,
        b"GET /v1/alive HTTP/1.1\r\nHost: node\r\n\r\n",
    )
    .ok()?;
    peer.try_response(&Method::GET)
        .ok()
        .map(|response| response.status.as_u16())
}

/// A TLS connection to the listener of `node` for other nodes. The handshake begins with the first
/// read or write.
pub(crate) fn connect(
    nodes: &Nodes,
    node: usize,
    alpn: &[u8],
    identity: Option<Identity>,
) -> StreamOwned<ClientConnection, TcpStream> {
    shake_hands(nodes.connect_as_node(node), alpn, identity)
}

/// As [`connect`], on a connection to such a listener.
pub(crate) fn shake_hands(
    connection: TcpStream,
    alpn: &[u8],
    identity: Option<Identity>,
) -> StreamOwned<ClientConnection, TcpStream> {
    StreamOwned::new(session(alpn, identity), connection)
}

fn session(alpn: &[u8], identity: Option<Identity>) -> ClientConnection {
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    let verifier = Arc::new(TrustAll(provider.signature_verification_algorithms));
    let mut config = gw_bed::tls::client([], identity, &[alpn]);
    config.dangerous().set_certificate_verifier(verifier);
    ClientConnection::new(Arc::new(config), HOST.try_into().unwrap()).unwrap()
}
