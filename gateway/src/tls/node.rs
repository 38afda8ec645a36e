//! TLS between the nodes of a region: each end shows a certificate of the region's authority for its node.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{self, WebPkiSupportedAlgorithms};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};

use super::TlsError;
use super::pki::Issued;

/// ALPN identifier of links between nodes.
pub(crate) const ALPN_NODE: &[u8] = b"gw-peer/2";

/// ALPN identifier of links to nodes of the release line 0.1, which do not know UPLOADED.
const ALPN_EARLIER_NODE: &[u8] = b"gw-peer/1";

/// ALPN identifier of HTTP between the control planes of nodes.
pub(crate) const ALPN_CONTROL: &[u8] = b"gw-control/1";

/// TLS configurations of this node for connections to other nodes. They verify that the other end has a certificate of the
/// region's authority; `pki::node_identity` tells whether it is a node's.
pub(crate) struct NodeTls {
    pub(crate) server: Arc<ServerConfig>,
    /// For links.
    pub(crate) client: Arc<ClientConfig>,
    /// For connections to control planes.
    pub(crate) control_client: Arc<ClientConfig>,
}

impl NodeTls {
    /// `issued` is the certificate of this node.
    pub(crate) fn new(authority_pem: &str, issued: &Issued) -> Result<Self, TlsError> {
        let pem = |error| TlsError::Pem { path: "certificate of this node".into(), error };
        let chain = vec![CertificateDer::from_pem_slice(issued.certificate_pem.as_bytes()).map_err(pem)?];
        let key = PrivateKeyDer::from_pem_slice(issued.key_pem.as_bytes()).map_err(pem)?;
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(authority_pem.as_bytes()).map_err(pem)?)?;
        let roots = Arc::new(roots);
        let provider = Arc::new(crypto::aws_lc_rs::default_provider());

        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider)).build()?;
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), key.clone_key())?;
        server.alpn_protocols = [ALPN_NODE, ALPN_EARLIER_NODE, ALPN_CONTROL].map(<[u8]>::to_vec).into();
        server.send_tls13_tickets = 0;

        let verifier = RegionVerifier { roots, algorithms: provider.signature_verification_algorithms };
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_auth_cert(chain, key)?;
        client.alpn_protocols = [ALPN_NODE, ALPN_EARLIER_NODE].map(<[u8]>::to_vec).into();
        client.resumption = Resumption::disabled();
        let mut control_client = client.clone();
        control_client.alpn_protocols = vec![ALPN_CONTROL.to_vec()];
        Ok(Self { server: Arc::new(server), client: Arc::new(client), control_client: Arc::new(control_client) })
    }
}

/// Verifies that a server has a certificate of the region's authority. Ignores the name that the client asked for: a node
/// is identified by its slot and session, which the link checks after the handshake.
#[derive(Debug)]
struct RegionVerifier {
    roots: Arc<RootCertStore>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for RegionVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let certificate = ParsedCertificate::try_from(end_entity)?;
        let algorithms = self.algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&certificate, &self.roots, intermediates, now, algorithms)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        crypto::verify_tls12_signature(message, certificate, signature, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        crypto::verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
