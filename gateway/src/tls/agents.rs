//! Verification of agents' certificates, which may be of two authorities while one replaces the other.

use std::sync::Arc;

use gw_shared::id::AuthorityId;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::CryptoProvider;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, RootCertStore, SignatureScheme};
use rustls_pki_types::{CertificateDer, UnixTime};

use super::TlsError;

/// The authorities whose certificates agents may have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TrustedAuthorities {
    /// Issues all certificates now.
    pub(crate) issuing: Option<AuthorityId>,
    pub(crate) trusted: Vec<(Option<AuthorityId>, CertificateDer<'static>)>,
    /// Were replaced last.
    pub(crate) ended: Vec<CertificateDer<'static>>,
}

impl TrustedAuthorities {
    /// Whether an authority is being replaced.
    pub(crate) fn are_several(&self) -> bool {
        self.trusted.len() > 1
    }

    /// Whether certificates of `issuer` are still accepted. A certificate that does not name its issuer was verified.
    pub(crate) fn trust(&self, issuer: Option<&AuthorityId>) -> bool {
        issuer.is_none() || self.trusted.iter().any(|(id, _)| id.as_ref() == issuer)
    }

    pub(crate) fn certificates(&self) -> Vec<CertificateDer<'static>> {
        self.trusted.iter().map(|(_, certificate)| certificate.clone()).collect()
    }

    /// The verifier of agents' certificates.
    pub(super) fn verifier(&self, provider: &Arc<CryptoProvider>) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
        let build = |authorities: &[CertificateDer<'static>]| {
            let mut roots = RootCertStore::empty();
            for authority in authorities {
                roots.add(authority.clone())?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider));
            Ok::<_, TlsError>(verifier.allow_unauthenticated().build()?)
        };
        let trusted = build(&self.certificates())?;
        if self.ended.is_empty() {
            return Ok(trusted);
        }
        Ok(Arc::new(AgentVerifier { trusted, ended: build(&self.ended)? }))
    }
}

/// Treats certificates of an authority that has ended as expired: the agent then asks for another one by itself, with its key
/// as proof.
#[derive(Debug)]
struct AgentVerifier {
    trusted: Arc<dyn ClientCertVerifier>,
    ended: Arc<dyn ClientCertVerifier>,
}

impl ClientCertVerifier for AgentVerifier {
    fn offer_client_auth(&self) -> bool {
        self.trusted.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.trusted.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.trusted.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.trusted.verify_client_cert(end_entity, intermediates, now).map_err(|error| {
            match self.ended.verify_client_cert(end_entity, intermediates, now) {
                Ok(_) => CertificateError::Expired.into(),
                Err(_) => error,
            }
        })
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.trusted.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.trusted.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.trusted.supported_verify_schemes()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gw_shared::id::{AccountId, AgentId};
    use rcgen::{CertificateParams, KeyPair};
    use rustls::crypto::aws_lc_rs::default_provider;
    use rustls_pki_types::pem::PemObject;

    use super::*;
    use crate::clock::Timestamp;
    use crate::hostname::Region;
    use crate::tls::pki::{self, Authority, CertificateRequest};

    fn der(pem: &str) -> CertificateDer<'static> {
        CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
    }

    /// A certificate for an agent.
    fn leaf(authority: &Authority) -> CertificateDer<'static> {
        let csr = CertificateParams::default().serialize_request(&KeyPair::generate().unwrap()).unwrap().pem().unwrap();
        let (account, agent) = (AccountId::new("acme").unwrap(), AgentId::random());
        let (region, now) = (Region::new("eu1", "example.com"), Timestamp::now());
        let request = CertificateRequest::parse(&csr).unwrap();
        let until = now.after(Duration::from_hours(1));
        der(&authority.issue_agent(&region, &account, &agent, &request, now, until).unwrap())
    }

    #[test]
    fn certificates_of_two_authorities_are_accepted_and_those_of_an_ended_one_count_as_expired() {
        let [issuing, earlier, ended, foreign] = [(); 4].map(|()| Authority::generate("Gw agents").unwrap().0);
        let certificate = |authority: &Authority| der(authority.certificate_pem());
        let id = |authority: &Authority| pki::authority_id(&certificate(authority));
        let authorities = TrustedAuthorities {
            issuing: id(&issuing),
            trusted: [&issuing, &earlier].map(|authority| (id(authority), certificate(authority))).into(),
            ended: vec![certificate(&ended)],
        };
        let verifier = authorities.verifier(&Arc::new(default_provider())).unwrap();
        let verify = |authority: &Authority| {
            let leaf = leaf(authority);
            assert_eq!(pki::issuer(&leaf), id(authority));
            // Agents also send the certificate of the authority.
            verifier.verify_client_cert(&leaf, &[certificate(authority)], UnixTime::now()).map(drop)
        };
        assert_eq!((verify(&issuing), verify(&earlier)), (Ok(()), Ok(())));
        assert_eq!(verify(&ended), Err(CertificateError::Expired.into()));
        assert!(verify(&foreign).is_err_and(|error| error != CertificateError::Expired.into()));
        let trust = |authority: &Authority| authorities.trust(id(authority).as_ref());
        assert_eq!([&issuing, &earlier, &ended, &foreign].map(trust), [true, true, false, false]);
        assert!(authorities.trust(None) && authorities.are_several());
    }
}
