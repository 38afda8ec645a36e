//! TLS configurations: for callers and for tunnels, with the same server certificate; for the admin listener; between the
//! nodes of a region.

pub(crate) mod admin;
pub(crate) mod certificate;
pub(crate) mod node;
pub(crate) mod pki;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use gw_shared::tunnel;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ProducesTickets, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig, crypto};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use self::certificate::{Mistakes, Pair, PairKeys};
use self::pki::{Issued, PkiError};
use crate::clock::{ProcessClock, Timestamp};
use crate::hostname::Region;

/// ALPN identifier of HTTP/2 over TLS (RFC 9113 §3.3).
pub(crate) const ALPN_HTTP2: &[u8] = b"h2";

/// The TLS configurations of the listeners.
pub(crate) struct ServerConfigs {
    /// TLS 1.3 and 1.2, no client certificates.
    pub(crate) public: Arc<ServerConfig>,
    /// TLS 1.3, with client certificates of the agents' authority. A missing certificate is refused after the
    /// handshake, with a readable error. Not requested where agents sign a challenge instead.
    pub(crate) tunnel: Arc<ServerConfig>,
    /// Verifies the certificates of agents.
    pub(crate) agents: Arc<dyn ClientCertVerifier>,
}

/// The source of the server certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CertificateSource {
    Files { certificate: PathBuf, key: PathBuf },
    Development { data_dir: PathBuf },
}

/// The files of a certificate and its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFiles {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{path}: {error}")]
    Pem { path: String, error: rustls_pki_types::pem::Error },
    #[error(transparent)]
    Mistakes(#[from] Mistakes),
    #[error("server certificate: {0}")]
    Rustls(#[from] rustls::Error),
    #[error("agents' authority: {0}")]
    Verifier(#[from] rustls::server::VerifierBuilderError),
    #[error(transparent)]
    Pki(#[from] PkiError),
}

/// Builds [`ServerConfigs`], at start and on every reload. Session tickets survive a reload, because their keys are
/// created once.
pub(crate) struct TlsMaterial {
    source: CertificateSource,
    region: Region,
    agent_authority: CertificateDer<'static>,
    agent_mtls: bool,
    tickets: Arc<dyn ProducesTickets>,
    /// Expiry of the certificate loaded last.
    not_after: Mutex<Option<Timestamp>>,
}

impl TlsMaterial {
    pub(crate) fn new(
        source: CertificateSource,
        region: Region,
        agent_authority_pem: &str,
        agent_mtls: bool,
    ) -> Result<Self, TlsError> {
        let agent_authority = CertificateDer::from_pem_slice(agent_authority_pem.as_bytes())
            .map_err(|error| TlsError::Pem { path: "agent-ca.crt".into(), error })?;
        let tickets = crypto::aws_lc_rs::Ticketer::new()?;
        Ok(Self { source, region, agent_authority, agent_mtls, tickets, not_after: Mutex::default() })
    }

    /// Expiry of the certificate loaded last, or of an authority in its chain, whichever comes first.
    pub(crate) fn not_after(&self) -> Option<Timestamp> {
        *self.not_after.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the certificate and builds both configurations. A certificate that some callers refuse is served with a
    /// warning, because the clock of the gateway may be wrong.
    pub(crate) fn load(&self) -> Result<ServerConfigs, TlsError> {
        let pair = self.read()?;
        if let CertificateSource::Files { certificate, .. } = &self.source {
            for warning in pair.warnings(PairKeys::CALLERS, certificate, Timestamp::now()) {
                tracing::warn!("{warning}");
            }
        }
        self.build(pair)
    }

    /// As [`Self::load`], for a running gateway: refuses a certificate that is not valid now.
    pub(crate) fn reload(&self) -> Result<ServerConfigs, TlsError> {
        let pair = self.read()?;
        if let CertificateSource::Files { certificate, .. } = &self.source
            && let Some(untimely) = pair.untimely(Timestamp::now())
        {
            return Err(Mistakes(vec![format!("tls_certificate: {}: {untimely}", certificate.display())]).into());
        }
        self.build(pair)
    }

    fn build(&self, Pair { chain, key }: Pair) -> Result<ServerConfigs, TlsError> {
        let expiry = chain.iter().filter_map(pki::not_after).min();
        let provider = Arc::new(crypto::aws_lc_rs::default_provider());
        let mut public = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(chain.clone(), key.clone_key())?;
        public.alpn_protocols = vec![ALPN_HTTP2.to_vec(), b"http/1.1".to_vec(), b"http/1.0".to_vec()];
        public.ticketer = Arc::clone(&self.tickets);
        public.send_tls13_tickets = 2;

        let mut roots = RootCertStore::empty();
        roots.add(self.agent_authority.clone())?;
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
            .allow_unauthenticated()
            .build()?;
        let tunnel =
            ServerConfig::builder_with_provider(provider).with_protocol_versions(&[&rustls::version::TLS13])?;
        let mut tunnel = if self.agent_mtls {
            tunnel.with_client_cert_verifier(Arc::clone(&verifier))
        } else {
            tunnel.with_no_client_auth()
        }
        .with_single_cert(chain, key)?;
        tunnel.alpn_protocols = vec![tunnel::ALPN.to_vec()];
        tunnel.time_provider = Arc::new(ProcessClock);
        // A resumed session would accept a certificate that has expired since.
        tunnel.send_tls13_tickets = 0;
        // A chain expires with the first of its certificates.
        *self.not_after.lock().unwrap_or_else(PoisonError::into_inner) = expiry;
        Ok(ServerConfigs { public: Arc::new(public), tunnel: Arc::new(tunnel), agents: verifier })
    }

    /// The file of the development authority; `None` if the server certificate comes from a file.
    pub(crate) fn development_ca(&self) -> Option<PathBuf> {
        match &self.source {
            CertificateSource::Files { .. } => None,
            CertificateSource::Development { data_dir } => Some(data_dir.join("dev-ca.crt")),
        }
    }

    fn read(&self) -> Result<Pair, TlsError> {
        match &self.source {
            CertificateSource::Files { certificate, key } => {
                Ok(certificate::read_pair(PairKeys::CALLERS, certificate, key, Some(&self.region))?)
            }
            CertificateSource::Development { data_dir } => {
                let Issued { certificate_pem, key_pem } = pki::development_certificate(data_dir, &self.region)?;
                let pem = |error| TlsError::Pem { path: "development certificate".into(), error };
                let leaf = CertificateDer::from_pem_slice(certificate_pem.as_bytes()).map_err(pem)?;
                let key = PrivateKeyDer::from_pem_slice(key_pem.as_bytes()).map_err(pem)?;
                Ok(Pair { chain: vec![leaf], key })
            }
        }
    }
}
