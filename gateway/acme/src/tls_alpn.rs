//! TLS configuration that proves control over names on the TLS port (TLS-ALPN-01, RFC 8737).

use std::collections::HashMap;
use std::sync::Arc;

use gw_base::tls::ALPN_ACME;
use rcgen::{CertificateParams, CustomExtension, DistinguishedName, KeyPair};
use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

use crate::error::AcmeError;
use crate::proof::Proof;

/// The TLS configuration of handshakes that offer [`ALPN_ACME`]: for each name of `proofs`, the
/// certificate with its digest. Other names are refused.
pub fn server_config(proofs: &[Proof]) -> Result<Arc<ServerConfig>, AcmeError> {
    let mut certificates = HashMap::new();
    for proof in proofs {
        let (certificate, key) = certificate(proof)?;
        // Not `CertifiedKey::from_der`, which refuses the critical extension that it does not know.
        let key = aws_lc_rs::default_provider()
            .key_provider
            .load_private_key(key)
            .map_err(|error| failed(proof, &error.to_string()))?;
        let certified = Arc::new(CertifiedKey::new(vec![certificate], key));
        certificates.insert(proof.name.clone(), certified);
    }
    let mut config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| AcmeError::proof(format!("TLS of the challenge: {error}")))?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(Certificates(certificates)));
    config.alpn_protocols = vec![ALPN_ACME.to_vec()];
    // The authority connects once.
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

#[derive(Debug)]
struct Certificates(HashMap<String, Arc<CertifiedKey>>);

impl ResolvesServerCert for Certificates {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let name = hello.server_name()?.to_ascii_lowercase();
        self.0.get(&name).cloned()
    }
}

/// The certificate that answers the challenge of `proof`, with a key of its own (RFC 8737 §3).
fn certificate(
    proof: &Proof,
) -> Result<(CertificateDer<'static>, PrivateKeyDer<'static>), AcmeError> {
    let Some(digest) = proof.digest() else {
        return Err(failed(proof, "the stored proof is no digest"));
    };
    let failed = |error: rcgen::Error| failed(proof, &error.to_string());
    let key = KeyPair::generate().map_err(failed)?;
    let mut parameters = CertificateParams::new([proof.name.clone()]).map_err(failed)?;
    parameters.distinguished_name = DistinguishedName::new();
    parameters.custom_extensions = vec![CustomExtension::new_acme_identifier(&digest)];
    let certificate = parameters.self_signed(&key).map_err(failed)?;
    let key = PrivatePkcs8KeyDer::from(key.serialize_der());
    Ok((certificate.der().clone(), key.into()))
}

fn failed(proof: &Proof, reason: &str) -> AcmeError {
    AcmeError::proof(format!(
        "certificate of the challenge for {}: {reason}; it is tried again",
        proof.name
    ))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests stop at the first surprise")]

    use x509_parser::prelude::{FromDer, X509Certificate};

    use super::*;

    #[test]
    fn the_certificate_has_the_name_and_the_critical_digest() {
        let proof = Proof {
            name: "eu1.example.com".into(),
            value: "A".repeat(43),
        };
        let (certificate, _) = certificate(&proof).unwrap();
        let (_, parsed) = X509Certificate::from_der(&certificate).unwrap();
        let names = parsed.subject_alternative_name().unwrap().unwrap();
        assert_eq!(names.value.general_names.len(), 1);
        let extension = parsed
            .extensions()
            .iter()
            .find(|it| it.oid.to_id_string() == "1.3.6.1.5.5.7.1.31")
            .unwrap();
        assert!(extension.critical);
        // An octet string of 32 bytes (RFC 8737 §3).
        assert_eq!(extension.value, [&[4, 32][..], &[0; 32]].concat());
        let broken = Proof {
            value: "no digest".into(),
            ..proof
        };
        assert!(server_config(&[broken]).is_err());
    }
}
