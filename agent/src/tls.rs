//! TLS client configurations and the certificates in them.

use std::cell::RefCell;
use std::sync::{Arc, Weak};

pub(crate) use gw_shared::net::tls::rustls_error;
use gw_shared::net::tls::{self, Trusted};
use rustls::time_provider::TimeProvider;
use rustls::{CertificateError, ClientConfig, SupportedProtocolVersion};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};

/// A client's certificate chain, leaf first, and its private key.
pub(crate) struct ClientAuth {
    pub(crate) chain: Vec<CertificateDer<'static>>,
    pub(crate) key: PrivateKeyDer<'static>,
}

impl ClientAuth {
    pub(crate) fn copy(&self) -> Self {
        Self {
            chain: self.chain.clone(),
            key: self.key.clone_key(),
        }
    }
}

/// Builds a configuration that trusts `trusted` (a server may be valid for one of `or_names` in
/// place of the name of the connection), presents `auth` to servers that ask for a certificate, and
/// offers `alpn`.
pub(crate) fn client_config(
    versions: &[&'static SupportedProtocolVersion],
    trusted: Arc<Trusted>,
    or_names: Vec<ServerName<'static>>,
    auth: Option<ClientAuth>,
    alpn: &[&[u8]],
) -> Result<ClientConfig, rustls::Error> {
    let builder = tls::client_config(versions, trusted, or_names)?;
    let mut config = match auth {
        Some(ClientAuth { chain, key }) => builder.with_client_auth_cert(chain, key)?,
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
    Ok(config)
}

/// Returns the certificates of the last call if they are the same. Every tunnel keeps those that it
/// was opened with, and the system has a hundred.
pub(crate) fn shared(trusted: Trusted) -> Arc<Trusted> {
    thread_local! {
        static LAST: RefCell<Weak<Trusted>> = const { RefCell::new(Weak::new()) };
    }
    LAST.with_borrow_mut(|last| match last.upgrade() {
        Some(same) if *same == trusted => same,
        _ => {
            let trusted = Arc::new(trusted);
            *last = Arc::downgrade(&trusted);
            trusted
        }
    })
}

/// The authority of a gateway without a certificate of its own, and where to find it: users do not
/// read `data_dir`.
pub(crate) const DEVELOPMENT_CA: &str = "dev-ca.crt in data_dir of a gateway without \
                                         tls_certificate, which is printed with each enrollment \
                                         token";

/// A clock that stands still.
#[derive(Debug)]
pub(crate) struct FixedTime(UnixTime);

impl TimeProvider for FixedTime {
    fn current_time(&self) -> Option<UnixTime> {
        Some(self.0)
    }
}

/// A time at which a certificate is valid that is refused for `reason`, a time before or after its
/// validity.
pub(crate) fn time_of_validity(reason: &CertificateError) -> Option<FixedTime> {
    match reason {
        CertificateError::ExpiredContext { not_after, .. } => Some(FixedTime(*not_after)),
        CertificateError::NotValidYetContext { not_before, .. } => Some(FixedTime(*not_before)),
        _ => None,
    }
}
