//! TLS configurations: for callers and for tunnels, with the same server certificate; for the admin
//! listener; between the nodes of a region.

/// The methods of [`rustls::server::danger::ClientCertVerifier`] about signatures, which the
/// verifier in a field has.
macro_rules! signatures_as_in {
    ($field:tt) => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            certificate: &rustls_pki_types::CertificateDer<'_>,
            signature: &rustls::DigitallySignedStruct,
        ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
            self.$field
                .verify_tls12_signature(message, certificate, signature)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &rustls_pki_types::CertificateDer<'_>,
            signature: &rustls::DigitallySignedStruct,
        ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
            self.$field
                .verify_tls13_signature(message, certificate, signature)
        }

        fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
            self.$field.supported_verify_schemes()
        }
    };
}

pub mod admin;
pub mod agents;
pub mod certificate;
pub mod node;
pub mod pki;
pub mod tickets;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gw_shared::net::tls::TlsFailure;
use gw_shared::tunnel;
use rustls::server::NoServerSessionStorage;
use rustls::{ServerConfig, SupportedProtocolVersion, crypto, version};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use self::agents::{AgentVerifier, TrustedAuthorities};
use self::certificate::{Mistakes, Pair, PairKeys};
use self::pki::{Issued, PkiError};
use self::tickets::TicketKeys;
use crate::clock::{ProcessClock, Timestamp};
use crate::service::hostname::Region;

/// ALPN identifier of HTTP/2 over TLS (RFC 9113 §3.3).
pub const ALPN_HTTP2: &[u8] = b"h2";

/// ALPN identifier of a challenge of an ACME authority (RFC 8737 §3).
pub const ALPN_ACME: &[u8] = b"acme-tls/1";

/// The oldest version of TLS that callers may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OldestTls {
    /// TLS 1.2 and TLS 1.3.
    #[default]
    Tls12,
    /// TLS 1.3 only.
    Tls13,
}

impl OldestTls {
    /// Parses the value of `tls_min_version`.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "1.2" => Some(Self::Tls12),
            "1.3" => Some(Self::Tls13),
            _ => None,
        }
    }

    fn versions(self) -> &'static [&'static SupportedProtocolVersion] {
        static ALL: [&SupportedProtocolVersion; 2] = [&version::TLS13, &version::TLS12];
        match self {
            Self::Tls12 => &ALL,
            Self::Tls13 => &ALL[..1],
        }
    }
}

/// The TLS configurations of the listeners.
#[derive(Clone)]
pub struct ServerConfigs {
    /// The versions of TLS of the configuration, no client certificates.
    pub public: Arc<ServerConfig>,
    /// TLS 1.3, with client certificates of the agents' authority. A missing certificate is refused
    /// after the handshake, with a readable error. Not requested where agents sign a challenge
    /// instead.
    pub tunnel: Arc<ServerConfig>,
    /// Verifies the certificates of agents.
    pub agents: Arc<AgentVerifier>,
    /// The authorities of those certificates.
    pub authorities: TrustedAuthorities,
    /// Answers challenges of an ACME authority; `None` if no challenge is open.
    pub challenge: Option<Arc<ServerConfig>>,
}

/// The source of the server certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CertificateSource {
    /// Files of the configuration.
    Files {
        /// PEM file with the chain, the certificate of the server first.
        certificate: PathBuf,
        /// PEM file with the private key.
        key: PathBuf,
    },
    /// A certificate that the development authority issues at each start.
    Development {
        /// Folder with the files of that authority.
        data_dir: PathBuf,
    },
    /// Certificates of an ACME authority; until there is one, a certificate of the development
    /// authority.
    Acme {
        /// Folder with the files of the development authority.
        data_dir: PathBuf,
    },
}

impl From<CertificateFiles> for CertificateSource {
    fn from(CertificateFiles { certificate, key }: CertificateFiles) -> Self {
        Self::Files { certificate, key }
    }
}

/// The files of a certificate and its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFiles {
    /// PEM file with the chain, the certificate of the server first.
    pub certificate: PathBuf,
    /// PEM file with the private key.
    pub key: PathBuf,
}

/// Reason why a TLS configuration cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A certificate or key is not valid PEM.
    #[error("{path}: {error}")]
    Pem {
        /// File, or name of the certificate if it has none.
        path: String,
        /// Error of the parser.
        error: rustls_pki_types::pem::Error,
    },
    /// The configured certificate cannot be served.
    #[error(transparent)]
    Mistakes(#[from] Mistakes),
    /// rustls refuses the certificate or the key.
    #[error("server certificate: {}", TlsFailure(.0.clone()))]
    Rustls(#[from] rustls::Error),
    /// No verifier of client certificates can be built from the authorities of agents.
    #[error("agents' authority: {0}")]
    Verifier(#[from] rustls::server::VerifierBuilderError),
    /// The development authority cannot issue a certificate.
    #[error(transparent)]
    Pki(#[from] PkiError),
}

/// Builds [`ServerConfigs`], at start, on every reload, and when other authorities are trusted or
/// tickets have other keys.
pub struct TlsMaterial {
    source: CertificateSource,
    region: Region,
    oldest: OldestTls,
    agent_mtls: bool,
    parts: Mutex<Parts>,
}

struct Parts {
    beside: Beside,
    /// The configurations built last.
    built: Option<Arc<ServerConfigs>>,
    /// The certificate loaded last.
    loaded: Option<Pair>,
    /// Its expiry.
    not_after: Option<Timestamp>,
    /// The certificate that the ACME authority issued last.
    issued: Option<Pair>,
}

/// What [`ServerConfigs`] are built from, beside the certificate.
#[derive(Clone)]
struct Beside {
    authorities: TrustedAuthorities,
    tickets: TicketKeys,
    /// Answers challenges of the ACME authority.
    challenge: Option<Arc<ServerConfig>>,
}

impl TlsMaterial {
    /// Reads no certificate yet: see [`Self::load`]. Callers use TLS of version `oldest` or later.
    /// With `agent_mtls`, agents authenticate tunnels with a client certificate.
    pub fn new(
        source: CertificateSource,
        region: Region,
        oldest: OldestTls,
        authorities: TrustedAuthorities,
        tickets: TicketKeys,
        agent_mtls: bool,
    ) -> Self {
        let parts = Mutex::new(Parts {
            beside: Beside {
                authorities,
                tickets,
                challenge: None,
            },
            built: None,
            loaded: None,
            not_after: None,
            issued: None,
        });
        Self {
            source,
            region,
            oldest,
            agent_mtls,
            parts,
        }
    }

    fn parts(&self) -> MutexGuard<'_, Parts> {
        // Every write is a single assignment.
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Expiry of the certificate loaded last, or of an authority in its chain, whichever comes
    /// first.
    pub fn not_after(&self) -> Option<Timestamp> {
        self.parts().not_after
    }

    /// Reads the certificate and builds both configurations. A certificate that some callers refuse
    /// is served with a warning, because the clock of the gateway may be wrong.
    pub fn load(&self) -> Result<Arc<ServerConfigs>, TlsError> {
        let pair = self.read()?;
        if let CertificateSource::Files { certificate, .. } = &self.source {
            for warning in pair.warnings(PairKeys::CALLERS, certificate, Timestamp::now()) {
                tracing::warn!("{warning}");
            }
        }
        self.use_pair(pair, |_| ())
    }

    /// As [`Self::load`], for a running gateway: refuses a certificate that is not valid now.
    /// Configurations are published in the order in which they are built.
    pub fn reload(&self, publish: impl FnOnce(&Arc<ServerConfigs>)) -> Result<(), TlsError> {
        let pair = self.read()?;
        if let CertificateSource::Files { certificate, .. } = &self.source
            && let Some(untimely) = pair.untimely(Timestamp::now())
        {
            return Err(Mistakes(vec![format!(
                "tls_certificate: {}: {untimely}",
                certificate.display()
            )])
            .into());
        }
        self.use_pair(pair, publish).map(drop)
    }

    /// Trusts these authorities of agents from now on. Publishes nothing before the first
    /// [`Self::load`].
    pub fn trust(
        &self,
        authorities: TrustedAuthorities,
        publish: impl FnOnce(&Arc<ServerConfigs>),
    ) -> Result<(), TlsError> {
        self.change(|beside| beside.authorities = authorities, publish)
    }

    /// Seals session tickets with these keys from now on. Publishes nothing before the first
    /// [`Self::load`], or if they are in use.
    pub fn seal_tickets(
        &self,
        tickets: TicketKeys,
        publish: impl FnOnce(&Arc<ServerConfigs>),
    ) -> Result<(), TlsError> {
        if self.parts().beside.tickets == tickets {
            return Ok(());
        }
        self.change(|beside| beside.tickets = tickets, publish)
    }

    /// Answers challenges of the ACME authority with this configuration from now on. The other
    /// configurations stay the same. Publishes nothing before the first [`Self::load`].
    pub fn answer_challenges(
        &self,
        challenge: Option<Arc<ServerConfig>>,
        publish: impl FnOnce(&Arc<ServerConfigs>),
    ) {
        let mut parts = self.parts();
        parts.beside.challenge.clone_from(&challenge);
        if let Some(built) = &parts.built {
            let built = Arc::new(ServerConfigs {
                challenge,
                ..ServerConfigs::clone(built)
            });
            publish(&built);
            parts.built = Some(built);
        }
    }

    /// Serves this certificate of the ACME authority from now on. Publishes nothing before the
    /// first [`Self::load`].
    pub fn use_issued(
        &self,
        pair: Pair,
        publish: impl FnOnce(&Arc<ServerConfigs>),
    ) -> Result<(), TlsError> {
        let mut parts = self.parts();
        parts.issued = Some(pair.copy());
        let is_loaded = parts.loaded.is_some();
        drop(parts);
        match is_loaded {
            true => self.use_pair(pair, publish).map(drop),
            false => Ok(()),
        }
    }

    fn change(
        &self,
        change: impl FnOnce(&mut Beside),
        publish: impl FnOnce(&Arc<ServerConfigs>),
    ) -> Result<(), TlsError> {
        let mut parts = self.parts();
        let mut beside = parts.beside.clone();
        change(&mut beside);
        if let Some(pair) = &parts.loaded {
            let built = Arc::new(self.build(pair, &beside)?);
            publish(&built);
            parts.built = Some(built);
        }
        parts.beside = beside;
        Ok(())
    }

    fn use_pair(
        &self,
        pair: Pair,
        publish: impl FnOnce(&Arc<ServerConfigs>),
    ) -> Result<Arc<ServerConfigs>, TlsError> {
        let mut parts = self.parts();
        let built = Arc::new(self.build(&pair, &parts.beside)?);
        publish(&built);
        // A chain expires with the first of its certificates.
        parts.not_after = pair.chain.iter().filter_map(pki::not_after).min();
        parts.loaded = Some(pair);
        parts.built = Some(Arc::clone(&built));
        Ok(built)
    }

    fn build(&self, pair: &Pair, beside: &Beside) -> Result<ServerConfigs, TlsError> {
        let Beside {
            authorities,
            tickets,
            challenge,
        } = beside.clone();
        let chain = pair.chain.clone();
        let key = pair.key.clone_key();
        let provider = Arc::new(crypto::aws_lc_rs::default_provider());
        let mut public = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(self.oldest.versions())?
            .with_no_client_auth()
            .with_single_cert(chain.clone(), key.clone_key())?;
        public.alpn_protocols = vec![
            ALPN_HTTP2.to_vec(),
            b"http/1.1".to_vec(),
            b"http/1.0".to_vec(),
        ];
        public.ticketer = Arc::new(tickets);
        public.send_tls13_tickets = 2;
        // Tickets are the only way to resume: what a server remembers of sessions is behind a lock,
        // and at one node.
        public.session_storage = Arc::new(NoServerSessionStorage {});

        let verifier = Arc::new(authorities.verifier(&provider)?);
        let tunnel = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(OldestTls::Tls13.versions())?;
        let mut tunnel = if self.agent_mtls {
            tunnel.with_client_cert_verifier(Arc::<AgentVerifier>::clone(&verifier))
        } else {
            tunnel.with_no_client_auth()
        }
        .with_single_cert(chain, key)?;
        tunnel.alpn_protocols = vec![tunnel::ALPN.to_vec()];
        tunnel.time_provider = Arc::new(ProcessClock);
        // A resumed session would accept a certificate that has expired since.
        tunnel.send_tls13_tickets = 0;
        Ok(ServerConfigs {
            public: Arc::new(public),
            tunnel: Arc::new(tunnel),
            agents: verifier,
            authorities,
            challenge,
        })
    }

    /// The file of the development authority; `None` if the server certificate comes from a file or
    /// from an ACME authority.
    pub fn development_ca(&self) -> Option<PathBuf> {
        match &self.source {
            CertificateSource::Acme { .. } if self.parts().issued.is_some() => None,
            CertificateSource::Files { .. } => None,
            CertificateSource::Development { data_dir } | CertificateSource::Acme { data_dir } => {
                Some(data_dir.join("dev-ca.crt"))
            }
        }
    }

    fn read(&self) -> Result<Pair, TlsError> {
        match &self.source {
            CertificateSource::Files { certificate, key } => Ok(certificate::read_pair(
                PairKeys::CALLERS,
                certificate,
                key,
                Some(&self.region),
            )?),
            CertificateSource::Development { data_dir } => self.development(data_dir),
            CertificateSource::Acme { data_dir } => {
                let issued = self.parts().issued.as_ref().map(Pair::copy);
                issued.map_or_else(|| self.development(data_dir), Ok)
            }
        }
    }

    fn development(&self, data_dir: &Path) -> Result<Pair, TlsError> {
        let Issued {
            certificate_pem,
            key_pem,
        } = pki::development_certificate(data_dir, &self.region)?;
        let pem = |error| TlsError::Pem {
            path: "development certificate".into(),
            error,
        };
        let leaf = CertificateDer::from_pem_slice(certificate_pem.as_bytes()).map_err(pem)?;
        let key = PrivateKeyDer::from_pem_slice(key_pem.as_bytes()).map_err(pem)?;
        Ok(Pair {
            chain: vec![leaf],
            key,
        })
    }
}
