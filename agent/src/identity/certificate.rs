//! The agent's private key and certificate.

use std::time::{Duration, SystemTime};

use gw_shared::id::AuthorityId;
use gw_shared::identity::enrollment::CertificateReply;
use gw_shared::net::tls::TlsFailure;
use gw_shared::tunnel::handshake::{self, Proof};
use rcgen::{CertificateParams, KeyPair, PublicKeyData};
use rustls::SignatureScheme;
use rustls::crypto::aws_lc_rs::sign;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem};
use x509_parser::prelude::{FromDer, ParsedExtension, X509Certificate};

use crate::clock::GatewayClock;
use crate::tls::ClientAuth;

/// The private key and certificate that the agent authenticates with.
pub struct Identity {
    pub certificate: CertificateDer<'static>,
    /// Intermediate and root certificates, as sent by the gateway.
    pub chain: Vec<CertificateDer<'static>>,
    pub key: PrivateKeyDer<'static>,
}

/// The validity period of a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ValidityPeriod {
    pub(crate) not_before: SystemTime,
    pub(crate) not_after: SystemTime,
}

/// Why a certificate or private key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum UnfitIdentity {
    #[error("invalid PEM: {0}")]
    Pem(#[from] pem::Error),
    #[error("the certificate is not X.509: {0}")]
    Certificate(#[from] x509_parser::nom::Err<x509_parser::error::X509Error>),
    #[error("the private key cannot be used: {0}")]
    Key(#[from] rcgen::Error),
    #[error("no certificate follows the private key")]
    NoCertificate,
    #[error("the certificate is not for the requested key")]
    OtherKey,
    #[error("the key cannot sign: {}", TlsFailure(.0.clone()))]
    Sign(#[from] rustls::Error),
}

/// Builds a certificate signing request for `key` (RFC 2986) in PEM. The gateway uses only its
/// public key.
pub(crate) fn certificate_request(key: &KeyPair) -> Result<String, rcgen::Error> {
    CertificateParams::default().serialize_request(key)?.pem()
}

/// Joins the private key and the certificates that the gateway issued for it into one PEM text,
/// after checking them.
///
/// The validity period is not checked: the gateway does that by its own clock, and the local one
/// may be wrong.
pub(crate) fn identity_pem(
    key: &KeyPair,
    reply: &CertificateReply,
) -> Result<String, UnfitIdentity> {
    let pem = format!(
        "{}\n{}\n{}\n",
        key.serialize_pem().trim(),
        reply.certificate.trim(),
        reply.chain.trim()
    );
    let identity = Identity::from_pem(pem.as_bytes())?;
    if !identity.is_for(key)? {
        return Err(UnfitIdentity::OtherKey);
    }
    Ok(pem)
}

impl Identity {
    /// Parses a private key followed by its certificates.
    pub(crate) fn from_pem(text: &[u8]) -> Result<Self, UnfitIdentity> {
        let key = PrivateKeyDer::from_pem_slice(text)?;
        let mut certificates = CertificateDer::pem_slice_iter(text);
        let certificate = certificates.next().ok_or(UnfitIdentity::NoCertificate)??;
        Ok(Self {
            certificate,
            chain: certificates.collect::<Result<_, _>>()?,
            key,
        })
    }

    pub(crate) fn validity(&self) -> Result<ValidityPeriod, UnfitIdentity> {
        let (_, certificate) = X509Certificate::from_der(&self.certificate)?;
        let time = |time: x509_parser::time::ASN1Time| {
            SystemTime::UNIX_EPOCH
                + Duration::from_secs(time.timestamp().try_into().unwrap_or_default())
        };
        let validity = certificate.validity();
        Ok(ValidityPeriod {
            not_before: time(validity.not_before),
            not_after: time(validity.not_after),
        })
    }

    /// The authority that has issued the certificate, as the certificate names it.
    pub(crate) fn authority(&self) -> Option<AuthorityId> {
        let (_, certificate) = X509Certificate::from_der(&self.certificate).ok()?;
        let named = certificate.iter_extensions().find_map(|extension| {
            match extension.parsed_extension() {
                ParsedExtension::AuthorityKeyIdentifier(named) => named.key_identifier.as_ref(),
                _ => None,
            }
        });
        AuthorityId::of_key_identifier(named?.0)
    }

    /// Time until the certificate expires by the gateway's clock; `None` while that clock is
    /// unknown.
    pub(crate) fn time_left(
        &self,
        clock: &GatewayClock,
    ) -> Result<Option<Duration>, UnfitIdentity> {
        let not_after = self.validity()?.not_after;
        Ok(clock
            .known()
            .map(|now| not_after.duration_since(now).unwrap_or_default()))
    }

    /// Chain and key for client authentication in TLS.
    pub(crate) fn client_auth(&self) -> ClientAuth {
        let chain = [&self.certificate]
            .into_iter()
            .chain(&self.chain)
            .cloned()
            .collect();
        ClientAuth {
            chain,
            key: self.key.clone_key(),
        }
    }

    /// Whether the certificate is for the private key.
    pub(crate) fn is_consistent(&self) -> bool {
        self.key_pair()
            .and_then(|key| self.is_for(&key))
            .unwrap_or(false)
    }

    fn is_for(&self, key: &KeyPair) -> Result<bool, UnfitIdentity> {
        let (_, certificate) = X509Certificate::from_der(&self.certificate)?;
        Ok(certificate.public_key().raw == key.subject_public_key_info())
    }

    pub(crate) fn key_pair(&self) -> Result<KeyPair, UnfitIdentity> {
        Ok(KeyPair::try_from(&self.key)?)
    }

    /// Signs the gateway's challenge to a connection for the service at `host`.
    pub(crate) fn prove(&self, host: &str, challenge: &str) -> Result<Proof, UnfitIdentity> {
        let schemes = [
            SignatureScheme::ECDSA_NISTP256_SHA256,
            SignatureScheme::ED25519,
        ];
        let signer = sign::any_supported_type(&self.key)?
            .choose_scheme(&schemes)
            .ok_or_else(|| {
                rustls::Error::General("it is neither an ECDSA P-256 nor an Ed25519 key".to_owned())
            })?;
        let signature = signer.sign(&handshake::challenge_message(host, challenge))?;
        Ok(Proof {
            certificate: self.certificate.to_vec(),
            signature,
        })
    }
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::signature::{
        ECDSA_P256_SHA256_ASN1, ED25519, UnparsedPublicKey, VerificationAlgorithm,
    };

    use super::*;
    use crate::fake_gateway::{Authority, LONG_AGO};

    #[test]
    fn certificates_are_checked_against_the_key_and_not_the_local_clock() {
        let authority = Authority::new();
        let key = KeyPair::generate().unwrap();
        let request = certificate_request(&key).unwrap();
        let reply = authority.certify(&request, LONG_AGO);
        // Expired by the local clock.
        let pem = identity_pem(&key, &reply).unwrap();
        let identity = Identity::from_pem(pem.as_bytes()).unwrap();
        assert_eq!(identity.chain.len(), 1);
        let validity = identity.validity().unwrap();
        let days = [validity.not_before, validity.not_after].map(|time| {
            let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap();
            since.as_secs() / 86_400
        });
        assert_eq!(days, [18_262, 18_628]);
    }

    #[test]
    fn a_reply_without_the_certificate_of_the_key_is_refused() {
        let key = KeyPair::generate().unwrap();
        let request = certificate_request(&key).unwrap();
        let reply = Authority::new().certify(&request, LONG_AGO);
        let other = KeyPair::generate().unwrap();
        assert!(matches!(
            identity_pem(&other, &reply),
            Err(UnfitIdentity::OtherKey)
        ));
        let empty = CertificateReply {
            certificate: String::new(),
            chain: String::new(),
            ..reply
        };
        assert!(matches!(
            identity_pem(&key, &empty),
            Err(UnfitIdentity::NoCertificate)
        ));
    }

    #[test]
    fn proof_is_a_signature_over_host_and_challenge() {
        let algorithms: [(_, &dyn VerificationAlgorithm); 2] = [
            (&rcgen::PKCS_ECDSA_P256_SHA256, &ECDSA_P256_SHA256_ASN1),
            (&rcgen::PKCS_ED25519, &ED25519),
        ];
        for (kind, algorithm) in algorithms {
            let key = KeyPair::generate_for(kind).unwrap();
            let public = UnparsedPublicKey::new(algorithm, key.public_key_raw().to_vec());
            let identity = Identity {
                certificate: vec![1, 2, 3].into(),
                chain: Vec::new(),
                key: PrivateKeyDer::from(key),
            };
            let host = "acme--api.eu1.example.com";
            let proof = identity.prove(host, "drawn").unwrap();
            assert_eq!(proof.certificate, [1, 2, 3]);
            let message = handshake::challenge_message(host, "drawn");
            public.verify(&message, &proof.signature).unwrap();
        }
    }
}
