//! Configurations of TLS for tests.

use std::sync::Arc;

use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::{
    ClientConfig, DEFAULT_VERSIONS, RootCertStore, ServerConfig, SupportedProtocolVersion,
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

/// A certificate with its key.
pub type Identity = (CertificateDer<'static>, PrivateKeyDer<'static>);

/// A server with this certificate, which asks its clients for none.
pub fn server((certificate, key): Identity, alpn: &[&[u8]]) -> ServerConfig {
    let builder = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    let builder = builder.with_no_client_auth();
    let mut config = builder.with_single_cert(vec![certificate], key).unwrap();
    config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
    config
}

/// A client that trusts these authorities, with its own certificate and key.
pub fn client(
    authorities: impl IntoIterator<Item = CertificateDer<'static>>,
    identity: Option<Identity>,
    alpn: &[&[u8]],
) -> ClientConfig {
    let provider = aws_lc_rs::default_provider();
    client_with(provider, DEFAULT_VERSIONS, authorities, identity, alpn)
}

/// As [`client`], with the cipher suites and key exchanges of `provider`, and these versions of
/// TLS.
pub fn client_with(
    provider: CryptoProvider,
    versions: &[&'static SupportedProtocolVersion],
    authorities: impl IntoIterator<Item = CertificateDer<'static>>,
    identity: Option<Identity>,
    alpn: &[&[u8]],
) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots.add(authority).unwrap();
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(provider));
    let builder = builder.with_protocol_versions(versions).unwrap();
    let builder = builder.with_root_certificates(roots);
    let mut config = match identity {
        Some((certificate, key)) => builder
            .with_client_auth_cert(vec![certificate], key)
            .unwrap(),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
    config
}
