//! TLS between the nodes of a region: each end shows a certificate of the region's authority for
//! its node.

use std::io;
use std::net::{Ipv4Addr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{self, WebPkiSupportedAlgorithms};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    CertificateError, ClientConfig, ClientConnection, DigitallySignedStruct, DistinguishedName,
    RootCertStore, ServerConfig, SignatureScheme,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};

use super::TlsError;
use super::pki::{self, Issued};

/// ALPN identifier of links between nodes.
pub const ALPN_NODE: &[u8] = b"gw-peer/2";

/// ALPN identifier of links to nodes of the release line 0.1, which do not know UPLOADED.
const ALPN_EARLIER_NODE: &[u8] = b"gw-peer/1";

/// ALPN identifier of HTTP between the control planes of nodes.
pub const ALPN_CONTROL: &[u8] = b"gw-control/1";

/// TLS configurations of this node for connections to other nodes. They verify that the other end
/// has a certificate of the region's authority; `pki::node_identity` tells whether it is a node's.
pub struct NodeTls {
    /// For connections that other nodes open, for links and to the control plane. TLS 1.3.
    pub server: Arc<ServerConfig>,
    /// For links.
    pub client: Arc<ClientConfig>,
    /// For connections to control planes.
    pub control_client: Arc<ClientConfig>,
    members: Arc<MemberVerifier>,
}

impl NodeTls {
    /// `issued` is the certificate of this node. Nodes with certificates of the `trusted`
    /// authorities are trusted.
    pub fn new(trusted: &[CertificateDer<'static>], issued: &Issued) -> Result<Self, TlsError> {
        let pem = |error| TlsError::Pem {
            path: "certificate of this node".into(),
            error,
        };
        let chain =
            vec![CertificateDer::from_pem_slice(issued.certificate_pem.as_bytes()).map_err(pem)?];
        let key = PrivateKeyDer::from_pem_slice(issued.key_pem.as_bytes()).map_err(pem)?;
        let mut roots = RootCertStore::empty();
        for authority in trusted {
            roots.add(authority.clone())?;
        }
        let roots = Arc::new(roots);
        let provider = Arc::new(crypto::aws_lc_rs::default_provider());

        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
                .build()?;
        let members = Arc::new(MemberVerifier(verifier));
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(Arc::<MemberVerifier>::clone(&members))
            .with_single_cert(chain.clone(), key.clone_key())?;
        server.alpn_protocols = [ALPN_NODE, ALPN_EARLIER_NODE, ALPN_CONTROL]
            .map(<[u8]>::to_vec)
            .into();
        server.send_tls13_tickets = 0;

        let verifier = RegionVerifier {
            roots,
            algorithms: provider.signature_verification_algorithms,
        };
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_auth_cert(chain, key)?;
        client.alpn_protocols = [ALPN_NODE, ALPN_EARLIER_NODE].map(<[u8]>::to_vec).into();
        client.resumption = Resumption::disabled();
        let mut control_client = client.clone();
        control_client.alpn_protocols = vec![ALPN_CONTROL.to_vec()];
        let [client, control_client] = [client, control_client].map(Arc::new);
        Ok(Self {
            server: Arc::new(server),
            client,
            control_client,
            members,
        })
    }

    /// Whether a certificate that another node has shown is still of a trusted authority.
    pub fn trusts(&self, certificate: &CertificateDer<'_>) -> bool {
        // The verifier takes no time from its caller.
        let now = UnixTime::since_unix_epoch(Duration::ZERO);
        self.members
            .verify_client_cert(certificate, &[], now)
            .is_ok()
    }
}

/// Whether the server at the other end of `stream` accepts links between nodes. Needs no
/// certificate: a server names its protocol before it shows its own certificate, which is not
/// trusted here (RFC 7301 §3.2). Ends the handshake without an alert, as probes of TCP do, so that
/// the server does not report a refusal.
pub fn accepts_links(mut stream: TcpStream) -> Result<bool, TlsError> {
    let provider = Arc::new(crypto::aws_lc_rs::default_provider());
    let mut client = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    client.alpn_protocols = vec![ALPN_NODE.to_vec()];
    let any_host = ServerName::from(Ipv4Addr::LOCALHOST);
    let mut connection = ClientConnection::new(Arc::new(client), any_host)?;
    let mut read_protocol = || {
        while connection.alpn_protocol().is_none() {
            // Twice if the server asks for another key share.
            while connection.wants_write() {
                connection.write_tls(&mut stream)?;
            }
            if connection.read_tls(&mut stream)? == 0 {
                break;
            }
            // Fails at the certificate, which comes behind the name of the protocol.
            let processed = connection.process_new_packets();
            processed.map_err(io::Error::other)?;
        }
        Ok::<_, io::Error>(())
    };
    // With an error, the protocol is known before it or not at all.
    let _ = read_protocol();
    Ok(connection.alpn_protocol() == Some(ALPN_NODE))
}

/// Verifies that a server has a certificate of the region's authority, by no clock. Ignores the
/// name that the client asked for: a node is identified by its slot and session, which the link
/// checks after the handshake.
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
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let now = beginning(end_entity)?;
        let certificate = ParsedCertificate::try_from(end_entity)?;
        let algorithms = self.algorithms.all;
        verify_server_cert_signed_by_trust_anchor(
            &certificate,
            &self.roots,
            intermediates,
            now,
            algorithms,
        )?;
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

/// As [`RegionVerifier`], for clients.
#[derive(Debug)]
struct MemberVerifier(Arc<dyn ClientCertVerifier>);

impl ClientCertVerifier for MemberVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.0
            .verify_client_cert(end_entity, intermediates, beginning(end_entity)?)
    }

    signatures_as_in!(0);
}

/// The time at which the certificate of a node is verified: its beginning. It lives as long as the
/// authority, so that the clocks of nodes, of which one may be wrong, and of the node that made the
/// authority do not matter.
fn beginning(certificate: &CertificateDer<'_>) -> Result<UnixTime, rustls::Error> {
    let validity = pki::validity(certificate).ok_or(CertificateError::BadEncoding)?;
    let seconds = u64::try_from(validity.not_before.0).unwrap_or(0);
    Ok(UnixTime::since_unix_epoch(Duration::from_secs(seconds)))
}

#[cfg(test)]
mod tests {
    use gw_region::NodeSlot;
    use rcgen::{CertificateParams, KeyPair};
    use rustls::{ConnectionCommon, ServerConnection};

    use super::super::pki::{Authority, CertificateRequest, NodeIdentity};
    use super::*;
    use crate::clock::Timestamp;
    use crate::service::hostname::Region;
    use gw_shared::id::{AccountId, AgentId};

    const DAY: i64 = 86_400;

    fn send<A, B>(from: &mut ConnectionCommon<A>, to: &mut ConnectionCommon<B>) {
        let mut bytes = Vec::new();
        while from.wants_write() {
            from.write_tls(&mut bytes).unwrap();
        }
        let mut bytes = &bytes[..];
        while !bytes.is_empty() {
            to.read_tls(&mut bytes).unwrap();
            to.process_new_packets().unwrap();
        }
    }

    #[test]
    fn the_clock_of_the_node_that_made_the_authority_does_not_matter() {
        let region = Region::new("eu1", "example.com");
        let now = Timestamp::now();
        // The last is 20 years old: it has ended.
        for ahead in [0, DAY, -DAY, 365 * DAY, -7300 * DAY] {
            let authority = Authority::made_at(Timestamp(now.0 + ahead));
            let of_node = |slot| {
                let node = NodeIdentity {
                    slot: NodeSlot::new(slot).unwrap(),
                    session: 1,
                };
                let trusted =
                    CertificateDer::from_pem_slice(authority.certificate_pem().as_bytes()).unwrap();
                NodeTls::new(&[trusted], &authority.issue_node(&region, node).unwrap()).unwrap()
            };
            let one = of_node(0);
            let two = of_node(1);
            let name = ServerName::try_from("127.0.0.1").unwrap();
            let mut client = ClientConnection::new(Arc::clone(&one.client), name).unwrap();
            let mut server = ServerConnection::new(Arc::clone(&two.server)).unwrap();
            while client.is_handshaking() || server.is_handshaking() {
                send(&mut client, &mut server);
                send(&mut server, &mut client);
            }
            assert!(server.peer_certificates().is_some(), "{ahead}");
        }
    }

    #[test]
    fn an_agent_is_trusted_while_its_own_certificate_is_valid() {
        let region = Region::new("eu1", "example.com");
        let now = Timestamp::now();
        let authority = Authority::made_at(now.after(Duration::from_hours(24)));
        let csr = CertificateParams::default()
            .serialize_request(&KeyPair::generate().unwrap())
            .unwrap();
        let csr = CertificateRequest::parse(&csr.pem().unwrap()).unwrap();
        let account = AccountId::new("acme").unwrap();
        let agent = AgentId::random();
        let not_after = now.after(Duration::from_hours(1));
        let leaf = authority
            .issue_agent(&region, &account, &agent, &csr, now, not_after)
            .unwrap();
        let [leaf, root] = [leaf.as_str(), authority.certificate_pem()]
            .map(|pem| CertificateDer::from_pem_slice(pem.as_bytes()).unwrap());
        let mut roots = RootCertStore::empty();
        roots.add(root.clone()).unwrap();
        let provider = Arc::new(crypto::aws_lc_rs::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .unwrap();
        // Agents send the authority, too.
        let verify = |at: i64| {
            let at = UnixTime::since_unix_epoch(Duration::from_secs(at.try_into().unwrap()));
            verifier
                .verify_client_cert(&leaf, std::slice::from_ref(&root), at)
                .is_ok()
        };
        assert_eq!(
            [now.0, now.0 + DAY, now.0 - DAY].map(verify),
            [true, false, false]
        );
    }
}
