//! Who an agent is: its private key and the certificate for it.

use std::time::{Duration, SystemTime};

use gw_shared::identity::enrollment::CertificateReply;
use gw_shared::tunnel::handshake::{self, Proof};
use rcgen::{CertificateParams, KeyPair, PublicKeyData};
use rustls::SignatureScheme;
use rustls::crypto::aws_lc_rs::sign;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::clock::GatewayClock;

/// What an agent authenticates with.
pub struct Identity {
    pub certificate: CertificateDer<'static>,
    /// The authorities above it, as the gateway gave them.
    pub chain: Vec<CertificateDer<'static>>,
    pub key: PrivateKeyDer<'static>,
}

/// From when to when a certificate is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Validity {
    pub(crate) not_before: SystemTime,
    pub(crate) not_after: SystemTime,
}

/// Why a certificate cannot be used, or a key.
#[derive(Debug, thiserror::Error)]
pub enum UnfitIdentity {
    #[error("{0}")]
    Pem(#[from] pem::Error),
    #[error("the certificate is not X.509: {0}")]
    Certificate(#[from] x509_parser::nom::Err<x509_parser::error::X509Error>),
    #[error("the private key: {0}")]
    Key(#[from] rcgen::Error),
    #[error("no certificate follows the private key")]
    NoCertificate,
    #[error("the certificate is for another key than the one that was asked for")]
    OtherKey,
    #[error("the key cannot sign: {0}")]
    Sign(#[from] rustls::Error),
}

/// A request for a certificate for `key`, PEM (RFC 2986). The gateway takes nothing but the public key from it.
pub(crate) fn certificate_request(key: &KeyPair) -> Result<String, rcgen::Error> {
    CertificateParams::default().serialize_request(key)?.pem()
}

/// The private key and the certificates that the gateway gave for it, as one PEM text, if they are fit for use.
///
/// When they are valid does not matter: the gateway checks that by its own clock, and ours may be wrong.
pub(crate) fn identity_pem(key: &KeyPair, reply: &CertificateReply) -> Result<String, UnfitIdentity> {
    let pem = format!("{}\n{}\n{}\n", key.serialize_pem().trim(), reply.certificate.trim(), reply.chain.trim());
    let identity = Identity::from_pem(pem.as_bytes())?;
    let (_, certificate) = X509Certificate::from_der(&identity.certificate)?;
    if certificate.public_key().raw != key.subject_public_key_info() {
        return Err(UnfitIdentity::OtherKey);
    }
    Ok(pem)
}

impl Identity {
    /// Reads a private key and the certificates after it.
    pub(crate) fn from_pem(text: &[u8]) -> Result<Self, UnfitIdentity> {
        let key = PrivateKeyDer::from_pem_slice(text)?;
        let mut certificates = CertificateDer::pem_slice_iter(text);
        let certificate = certificates.next().ok_or(UnfitIdentity::NoCertificate)??;
        Ok(Self { certificate, chain: certificates.collect::<Result<_, _>>()?, key })
    }

    pub(crate) fn validity(&self) -> Result<Validity, UnfitIdentity> {
        let (_, certificate) = X509Certificate::from_der(&self.certificate)?;
        let time = |time: x509_parser::time::ASN1Time| {
            SystemTime::UNIX_EPOCH + Duration::from_secs(time.timestamp().try_into().unwrap_or_default())
        };
        let validity = certificate.validity();
        Ok(Validity { not_before: time(validity.not_before), not_after: time(validity.not_after) })
    }

    /// Time until the certificate expires, by the gateway's clock; `None` while that clock is not known.
    pub(crate) fn time_left(&self, clock: &GatewayClock) -> Result<Option<Duration>, UnfitIdentity> {
        let not_after = self.validity()?.not_after;
        Ok(clock.known().map(|now| not_after.duration_since(now).unwrap_or_default()))
    }

    pub(crate) fn key_pair(&self) -> Result<KeyPair, UnfitIdentity> {
        Ok(KeyPair::try_from(&self.key)?)
    }

    /// Answers a gateway's challenge to a connection for the service at `host`.
    pub(crate) fn prove(&self, host: &str, challenge: &str) -> Result<Proof, UnfitIdentity> {
        let schemes = [SignatureScheme::ECDSA_NISTP256_SHA256, SignatureScheme::ED25519];
        let signer = sign::any_supported_type(&self.key)?
            .choose_scheme(&schemes)
            .ok_or_else(|| rustls::Error::General("it is neither on P-256 nor Ed25519".to_owned()))?;
        let signature = signer.sign(&handshake::challenge_message(host, challenge))?;
        Ok(Proof { certificate: self.certificate.to_vec(), signature })
    }
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1, ED25519, UnparsedPublicKey, VerificationAlgorithm};

    use super::*;
    use crate::fake_gateway::{Authority, LONG_AGO};

    #[test]
    fn a_certificate_counts_only_with_its_own_key_whatever_our_clock_says() {
        let (authority, key) = (Authority::new(), KeyPair::generate().unwrap());
        let request = certificate_request(&key).unwrap();
        let reply = authority.certify(&request, LONG_AGO);
        // It expired long ago by our clock, which may be wrong.
        let pem = identity_pem(&key, &reply).unwrap();
        let identity = Identity::from_pem(pem.as_bytes()).unwrap();
        assert_eq!(identity.chain.len(), 1);
        let days = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs() / 86_400;
        let validity = identity.validity().unwrap();
        assert_eq!((days(validity.not_before), days(validity.not_after)), (18_262, 18_628));

        let other = KeyPair::generate().unwrap();
        assert!(matches!(identity_pem(&other, &reply), Err(UnfitIdentity::OtherKey)));
        let empty = CertificateReply { certificate: String::new(), chain: String::new(), ..reply };
        assert!(matches!(identity_pem(&key, &empty), Err(UnfitIdentity::NoCertificate)));
    }

    #[test]
    fn proofs_are_signatures_over_host_and_challenge() {
        let algorithms: [(_, &dyn VerificationAlgorithm); 2] =
            [(&rcgen::PKCS_ECDSA_P256_SHA256, &ECDSA_P256_SHA256_ASN1), (&rcgen::PKCS_ED25519, &ED25519)];
        for (kind, algorithm) in algorithms {
            let key = KeyPair::generate_for(kind).unwrap();
            let public = UnparsedPublicKey::new(algorithm, key.public_key_raw().to_vec());
            let identity =
                Identity { certificate: vec![1, 2, 3].into(), chain: Vec::new(), key: PrivateKeyDer::from(key) };
            let proof = identity.prove("acme--api.eu1.example.com", "drawn").unwrap();
            assert_eq!(proof.certificate, [1, 2, 3]);
            let message = handshake::challenge_message("acme--api.eu1.example.com", "drawn");
            public.verify(&message, &proof.signature).unwrap();
        }
    }
}
