//! TLS client configurations and the certificates in them.

use std::cell::RefCell;
use std::io;
use std::sync::{Arc, LazyLock, Weak};

use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::time_provider::TimeProvider;
use rustls::{CertificateError, ClientConfig, RootCertStore, SupportedProtocolVersion};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, UnixTime};

/// A client's certificate chain, leaf first, and its private key.
pub(crate) struct ClientAuth {
    pub(crate) chain: Vec<CertificateDer<'static>>,
    pub(crate) key: PrivateKeyDer<'static>,
}

/// Builds a configuration that trusts `roots`, presents `auth` to servers that ask for a certificate, and offers `alpn`.
pub(crate) fn client_config(
    versions: &[&'static SupportedProtocolVersion],
    roots: Arc<RootCertStore>,
    auth: Option<ClientAuth>,
    alpn: &[&[u8]],
) -> Result<ClientConfig, rustls::Error> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> =
        LazyLock::new(|| Arc::new(aws_lc_rs::default_provider()));
    let builder = ClientConfig::builder_with_provider(Arc::clone(&PROVIDER))
        .with_protocol_versions(versions)?
        .with_root_certificates(roots);
    let mut config = match auth {
        Some(ClientAuth { chain, key }) => builder.with_client_auth_cert(chain, key)?,
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
    Ok(config)
}

/// Loads the system's trusted roots.
pub(crate) fn system_roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    roots
}

/// Returns the store of the last call if it has the same roots. Every tunnel keeps the store that it was opened with, and
/// that of the system has a hundred roots.
pub(crate) fn shared(roots: RootCertStore) -> Arc<RootCertStore> {
    thread_local! {
        static LAST: RefCell<Weak<RootCertStore>> = const { RefCell::new(Weak::new()) };
    }
    LAST.with_borrow_mut(|last| match last.upgrade() {
        Some(same) if same.roots == roots.roots => same,
        _ => {
            let roots = Arc::new(roots);
            *last = Arc::downgrade(&roots);
            roots
        }
    })
}

/// A store that holds `authorities` only.
pub(crate) fn private_roots(
    authorities: Vec<CertificateDer<'static>>,
) -> Result<RootCertStore, rustls::Error> {
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots.add(authority)?;
    }
    Ok(roots)
}

/// Parses a PEM text that contains at least one certificate.
pub(crate) fn parse_certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    match CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>() {
        Ok(certificates) if certificates.is_empty() => {
            Err("contains no certificate in PEM format".to_owned())
        }
        Ok(certificates) => Ok(certificates),
        Err(error) => Err(error.to_string()),
    }
}

/// Whether a server shows the certificate of an authority, which `openssl req -x509` makes unless it is told otherwise.
pub(crate) fn is_of_authority(reason: &CertificateError) -> bool {
    // rustls passes the error of webpki on by its name only.
    reason.to_string().contains("CaUsedAsEndEntity")
}

/// The authority of a gateway without a certificate of its own, and where to find it: users do not read `data_dir`.
pub(crate) const DEVELOPMENT_CA: &str = "dev-ca.crt in data_dir of a gateway without tls_certificate, which is printed with each enrollment token";

/// What such a certificate is, and what to do.
pub(crate) const OF_AUTHORITY: &str = "is that of an authority (CA:TRUE), not of a server: make it again, with \
                                       `-addext basicConstraints=critical,CA:FALSE` for `openssl req -x509`";

/// Whether no trusted authority has issued a certificate. Names and keys of authorities can be the same by chance.
pub(crate) fn is_of_unknown_issuer(reason: &CertificateError) -> bool {
    use CertificateError::{
        BadSignature, UnknownIssuer, UnsupportedSignatureAlgorithmForPublicKeyContext,
    };
    matches!(
        reason,
        UnknownIssuer | BadSignature | UnsupportedSignatureAlgorithmForPublicKeyContext { .. }
    )
}

/// A clock that stands still.
#[derive(Debug)]
pub(crate) struct FixedTime(UnixTime);

impl TimeProvider for FixedTime {
    fn current_time(&self) -> Option<UnixTime> {
        Some(self.0)
    }
}

/// A time at which a certificate is valid that is refused for `reason`, a time before or after its validity.
pub(crate) fn time_of_validity(reason: &CertificateError) -> Option<FixedTime> {
    match reason {
        CertificateError::ExpiredContext { not_after, .. } => Some(FixedTime(*not_after)),
        CertificateError::NotValidYetContext { not_before, .. } => Some(FixedTime(*not_before)),
        _ => None,
    }
}

/// The TLS error inside an I/O error, if that is its cause.
pub(crate) fn rustls_error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}
