//! Verification of servers by clients: which certificates are trusted, and for which names.

use std::fmt;
use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use rustls::client::WantsClientCert;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls12_signature, verify_tls13_signature};
use rustls::server::ParsedCertificate;
use rustls::{
    CertificateError, ClientConfig, ConfigBuilder, DigitallySignedStruct, Error, OtherError,
    RootCertStore, SignatureScheme, SupportedProtocolVersion,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::pem;

/// The cryptography of all clients.
pub(super) static PROVIDER: LazyLock<Arc<CryptoProvider>> =
    LazyLock::new(|| Arc::new(aws_lc_rs::default_provider()));

/// Certificates that a client trusts.
#[derive(Debug)]
pub struct Trusted {
    /// Issuers of the certificates of servers.
    roots: RootCertStore,
    /// Certificates of servers, trusted byte for byte whatever their names and usages are.
    leaves: Vec<CertificateDer<'static>>,
}

impl Trusted {
    /// The authorities of the system.
    pub fn system() -> Self {
        let found = rustls_native_certs::load_native_certs();
        if found.certs.is_empty() {
            tracing::warn!(
                errors = ?found.errors,
                "the system has no trusted root certificates, so that TLS with servers fails; \
                 install ca-certificates, or name a file of certificates for the server"
            );
        }
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(found.certs);
        let leaves = Vec::new();
        Self { roots, leaves }
    }

    /// The certificates of a PEM file. The error does not name the file.
    pub fn read(file: &Path) -> Result<Self, String> {
        Self::only(pem::read_certificates(file)?)
    }

    /// These certificates: those of authorities, or of servers themselves.
    pub fn only(certificates: Vec<CertificateDer<'static>>) -> Result<Self, String> {
        let mut trusted = Self {
            roots: RootCertStore::empty(),
            leaves: Vec::new(),
        };
        trusted.add(certificates)?;
        Ok(trusted)
    }

    /// Trusts these too.
    pub fn add(&mut self, certificates: Vec<CertificateDer<'static>>) -> Result<(), String> {
        for (at, certificate) in (1..).zip(&certificates) {
            self.roots.add(certificate.clone()).map_err(|_| {
                format!("certificate {at} is not X.509; write it again in PEM, or remove it")
            })?;
        }
        self.leaves.extend(certificates);
        Ok(())
    }
}

impl PartialEq for Trusted {
    fn eq(&self, other: &Self) -> bool {
        self.roots.roots == other.roots.roots && self.leaves == other.leaves
    }
}

/// Begins the configuration of a client that trusts `trusted`. The certificate of a server has to
/// be valid for the name of the connection, or for one of `or_names`.
pub fn client_config(
    versions: &[&'static SupportedProtocolVersion],
    trusted: Arc<Trusted>,
    or_names: Vec<ServerName<'static>>,
) -> Result<ConfigBuilder<ClientConfig, WantsClientCert>, Error> {
    let builder = ClientConfig::builder_with_provider(Arc::clone(&PROVIDER));
    let verifier = ServerVerifier { trusted, or_names };
    Ok(builder
        .with_protocol_versions(versions)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier)))
}

/// The one verifier of servers.
#[derive(Debug)]
struct ServerVerifier {
    trusted: Arc<Trusted>,
    /// Names for which a certificate may be valid in place of that of the connection.
    or_names: Vec<ServerName<'static>>,
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if self.trusted.leaves.contains(leaf) {
            check_dates(leaf, now)?;
            return Ok(ServerCertVerified::assertion());
        }
        let parsed = ParsedCertificate::try_from(leaf)?;
        verify_server_cert_signed_by_trust_anchor(
            &parsed,
            &self.trusted.roots,
            intermediates,
            now,
            PROVIDER.signature_verification_algorithms.all,
        )
        .map_err(|error| Untrusted::instead_of(error, leaf))?;
        let valid = verify_server_name(&parsed, name);
        let is_valid_for = |name| verify_server_name(&parsed, name).is_ok();
        match self.or_names.iter().any(is_valid_for) {
            true => Ok(ServerCertVerified::assertion()),
            false => valid.map(|()| ServerCertVerified::assertion()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &PROVIDER.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &PROVIDER.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        PROVIDER
            .signature_verification_algorithms
            .supported_schemes()
    }
}

fn check_dates(leaf: &CertificateDer<'_>, time: UnixTime) -> Result<(), CertificateError> {
    let (_, parsed) = X509Certificate::from_der(leaf).map_err(|_| CertificateError::BadEncoding)?;
    let validity = parsed.validity();
    let [not_before, not_after] = [validity.not_before, validity.not_after].map(|time| {
        let seconds = u64::try_from(time.timestamp()).unwrap_or(0);
        UnixTime::since_unix_epoch(Duration::from_secs(seconds))
    });
    match () {
        () if time < not_before => Err(CertificateError::NotValidYetContext { time, not_before }),
        () if time > not_after => Err(CertificateError::ExpiredContext { time, not_after }),
        () => Ok(()),
    }
}

/// A certificate that no trusted authority has issued, or that may not be that of a server, as far
/// as it says itself.
#[derive(Debug)]
pub(super) struct Untrusted {
    /// `no name` if there is none.
    names: Vec<String>,
    /// `None` if it has signed itself.
    issuer: Option<String>,
    is_authority: bool,
}

impl Untrusted {
    /// Describes `leaf` in place of errors that have no words for it.
    fn instead_of(error: Error, leaf: &CertificateDer<'_>) -> Error {
        use CertificateError::{
            BadSignature, Other, UnknownIssuer, UnsupportedSignatureAlgorithmForPublicKeyContext,
        };
        // Names and keys of authorities can be the same by chance, which gives an error of the
        // signature.
        let is_issuer = matches!(
            error,
            Error::InvalidCertificate(
                UnknownIssuer
                    | BadSignature
                    | UnsupportedSignatureAlgorithmForPublicKeyContext { .. }
                    | Other(_)
            )
        );
        let Ok((_, parsed)) = X509Certificate::from_der(leaf) else {
            return error;
        };
        if !is_issuer {
            return error;
        }
        let is_self_signed = parsed.issuer().as_raw() == parsed.subject().as_raw();
        let untrusted = Self {
            names: names(leaf),
            issuer: (!is_self_signed).then(|| parsed.issuer().to_string()),
            is_authority: parsed.is_ca(),
        };
        Error::InvalidCertificate(Other(OtherError(Arc::new(untrusted))))
    }
}

impl std::error::Error for Untrusted {}

impl fmt::Display for Untrusted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "its certificate, for {}, is ", self.names.join(", "))?;
        match &self.issuer {
            Some(issuer) => write!(f, "issued by \"{issuer}\"")?,
            None => f.write_str("self-signed")?,
        }
        if self.is_authority {
            f.write_str(", is that of an authority (CA:TRUE)")?;
        }
        f.write_str(" and is not trusted")
    }
}

/// Names and addresses that a certificate is valid for (RFC 5280 §4.2.1.6); `no name` if there is
/// none.
pub fn names(certificate: &CertificateDer<'_>) -> Vec<String> {
    const MOST: usize = 10;
    let mut names = Vec::new();
    if let Ok((_, certificate)) = X509Certificate::from_der(certificate)
        && let Ok(Some(extension)) = certificate.subject_alternative_name()
    {
        let known = extension
            .value
            .general_names
            .iter()
            .filter_map(|name| match name {
                GeneralName::DNSName(name) => Some((*name).to_owned()),
                GeneralName::IPAddress(bytes) => {
                    ip_address(bytes).map(|address| address.to_string())
                }
                _ => None,
            });
        names.extend(known.take(MOST));
    }
    if names.is_empty() {
        names.push("no name".to_owned());
    }
    names
}

fn ip_address(bytes: &[u8]) -> Option<IpAddr> {
    <[u8; 4]>::try_from(bytes)
        .map(IpAddr::from)
        .or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from))
        .ok()
}

#[cfg(test)]
mod tests;
