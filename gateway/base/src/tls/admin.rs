//! TLS of the admin listener, with a certificate of its own.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustls::{ServerConfig, crypto};
use rustls_pki_types::CertificateDer;

use super::certificate::{self, Mistakes, Pair, PairKeys, read_pair};
use super::{CertificateFiles, TlsError, pki};
use crate::clock::Timestamp;

/// The TLS configuration of the admin listener, which a reload replaces.
pub struct AdminTls {
    files: CertificateFiles,
    latest: Mutex<AdminCertificate>,
}

struct AdminCertificate {
    config: Arc<ServerConfig>,
    certificate: CertificateDer<'static>,
    /// Expiry of the certificate or of an authority in its chain, whichever comes first.
    not_after: Option<Timestamp>,
}

impl AdminTls {
    /// Reads the certificate. One that some clients refuse is served with a warning, because the
    /// clock of the gateway may be wrong.
    pub fn load(files: CertificateFiles) -> Result<Self, TlsError> {
        let pair = read(&files)?;
        for warning in pair.warnings(PairKeys::ADMIN, &files.certificate, Timestamp::now()) {
            tracing::warn!("{warning}");
        }
        let latest = Mutex::new(AdminCertificate::new(pair)?);
        Ok(Self { files, latest })
    }

    /// Reads the certificate again for new connections. On failure, or if it is not valid now, the
    /// old one stays in use.
    pub fn reload(&self) -> Result<(), TlsError> {
        let pair = read(&self.files)?;
        if let Some(untimely) = pair.untimely(Timestamp::now()) {
            let file = self.files.certificate.display();
            return Err(Mistakes(vec![format!(
                "{}: {file}: {untimely}",
                PairKeys::ADMIN.certificate
            )])
            .into());
        }
        let latest = AdminCertificate::new(pair)?;
        *self.latest() = latest;
        Ok(())
    }

    /// The configuration for new connections.
    pub fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.latest().config)
    }

    /// Whether the certificate is for this host.
    pub fn is_valid_for(&self, host: &str) -> bool {
        certificate::is_valid_for(&self.latest().certificate, host)
    }

    /// Expiry of the certificate or of an authority in its chain, whichever comes first.
    pub fn not_after(&self) -> Option<Timestamp> {
        self.latest().not_after
    }

    fn latest(&self) -> MutexGuard<'_, AdminCertificate> {
        // Each change under the lock is one assignment.
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Does not check names: clients choose the name by which they reach the listener.
fn read(files: &CertificateFiles) -> Result<Pair, Mistakes> {
    read_pair(PairKeys::ADMIN, &files.certificate, &files.key, None)
}

impl AdminCertificate {
    fn new(Pair { chain, key }: Pair) -> Result<Self, TlsError> {
        let not_after = chain.iter().filter_map(pki::not_after).min();
        let certificate = chain
            .first()
            .cloned()
            .unwrap_or_else(|| CertificateDer::from(Vec::new()));
        let mut config =
            ServerConfig::builder_with_provider(Arc::new(crypto::aws_lc_rs::default_provider()))
                .with_safe_default_protocol_versions()?
                .with_no_client_auth()
                .with_single_cert(chain, key)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self {
            config: Arc::new(config),
            certificate,
            not_after,
        })
    }
}
