//! Verification of agents' certificates, which may be of two authorities while one replaces the
//! other.

use std::slice;
use std::sync::Arc;

use gw_shared::id::AuthorityId;
use rustls::crypto::CryptoProvider;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DistinguishedName, RootCertStore};
use rustls_pki_types::{CertificateDer, UnixTime};

use super::TlsError;

/// The authorities whose certificates agents may have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrustedAuthorities {
    /// Issues all certificates now.
    pub issuing: Option<AuthorityId>,
    /// Certificates that are accepted as issuers, each with its id if it has a subject key
    /// identifier.
    pub trusted: Vec<(Option<AuthorityId>, CertificateDer<'static>)>,
    /// Were replaced last.
    pub ended: Vec<CertificateDer<'static>>,
}

impl TrustedAuthorities {
    /// Whether an authority is being replaced.
    pub fn are_several(&self) -> bool {
        self.trusted.len() > 1
    }

    /// Whether certificates of `issuer`, as [`AgentVerifier::issuer`] tells it, are still accepted.
    pub fn trust(&self, issuer: Option<&AuthorityId>) -> bool {
        self.trusted.iter().any(|(id, _)| id.as_ref() == issuer)
    }

    /// The certificates of the trusted authorities.
    pub fn certificates(&self) -> Vec<CertificateDer<'static>> {
        self.trusted
            .iter()
            .map(|(_, certificate)| certificate.clone())
            .collect()
    }

    /// The verifier of agents' certificates.
    pub(super) fn verifier(
        &self,
        provider: &Arc<CryptoProvider>,
    ) -> Result<AgentVerifier, TlsError> {
        let build = |authorities: &[CertificateDer<'static>]| {
            let mut roots = RootCertStore::empty();
            for authority in authorities {
                roots.add(authority.clone())?;
            }
            let verifier =
                WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider));
            Ok::<_, TlsError>(verifier.allow_unauthenticated().build()?)
        };
        let of_each = self
            .trusted
            .iter()
            .map(|(id, authority)| Ok((id.clone(), build(slice::from_ref(authority))?)));
        Ok(AgentVerifier {
            of_all: build(&self.certificates())?,
            of_each: of_each.collect::<Result<_, TlsError>>()?,
            of_ended: if self.ended.is_empty() {
                None
            } else {
                Some(build(&self.ended)?)
            },
        })
    }
}

/// Treats certificates of an authority that has ended as expired: the agent then asks for another
/// one by itself, with its key as proof.
#[derive(Debug)]
pub struct AgentVerifier {
    /// Verifies certificates of all trusted authorities.
    pub of_all: Arc<dyn ClientCertVerifier>,
    /// A verifier for each trusted authority, with the id of that authority.
    pub of_each: Vec<(Option<AuthorityId>, Arc<dyn ClientCertVerifier>)>,
    /// Verifies certificates of authorities that have ended; `None` if there are none.
    pub of_ended: Option<Arc<dyn ClientCertVerifier>>,
}

impl AgentVerifier {
    /// The trusted authority that has issued a certificate; `None` for one without an id. The
    /// signature tells: a holder of the key of another authority chooses what the certificate says
    /// about its issuer.
    pub fn issuer(
        &self,
        certificate: &CertificateDer<'_>,
        now: UnixTime,
    ) -> Result<Option<&AuthorityId>, rustls::Error> {
        let verified = |verifier: &Arc<dyn ClientCertVerifier>| {
            verifier.verify_client_cert(certificate, &[], now).is_ok()
        };
        match self.of_each.iter().find(|(_, verifier)| verified(verifier)) {
            Some((id, _)) => Ok(id.as_ref()),
            // Tells an expired certificate from others.
            None => {
                self.verify_client_cert(certificate, &[], now)?;
                Err(CertificateError::UnknownIssuer.into())
            }
        }
    }
}

impl ClientCertVerifier for AgentVerifier {
    fn offer_client_auth(&self) -> bool {
        self.of_all.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.of_all.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.of_all.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.of_all
            .verify_client_cert(end_entity, intermediates, now)
            .map_err(|error| {
                let ended = self
                    .of_ended
                    .as_ref()
                    .map(|ended| ended.verify_client_cert(end_entity, intermediates, now));
                match ended {
                    Some(Ok(_)) => CertificateError::Expired.into(),
                    Some(Err(_)) | None => error,
                }
            })
    }

    signatures_as_in!(of_all);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gw_shared::id::{AccountId, AgentId};
    use gw_shared::identity::secret::Secret;
    use rcgen::{CertificateParams, KeyPair};
    use rustls::crypto::aws_lc_rs::default_provider;
    use rustls_pki_types::pem::PemObject;

    use super::*;
    use crate::clock::Timestamp;
    use crate::service::hostname::Region;
    use crate::tls::pki::{self, Authority, CertificateRequest};

    fn der(pem: &str) -> CertificateDer<'static> {
        CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
    }

    /// A certificate for an agent.
    fn leaf(authority: &Authority) -> CertificateDer<'static> {
        let csr = CertificateParams::default()
            .serialize_request(&KeyPair::generate().unwrap())
            .unwrap()
            .pem()
            .unwrap();
        let account = AccountId::new("acme").unwrap();
        let agent = AgentId::random();
        let region = Region::new("eu1", "example.com");
        let now = Timestamp::now();
        let request = CertificateRequest::parse(&csr).unwrap();
        let until = now.after(Duration::from_hours(1));
        der(&authority
            .issue_agent(&region, &account, &agent, &request, now, until)
            .unwrap())
    }

    #[test]
    fn certificates_of_two_authorities_are_accepted_and_those_of_an_ended_one_count_as_expired() {
        let [issuing, earlier, ended, foreign] =
            [(); 4].map(|()| Authority::generate("Gw agents").unwrap().0);
        let certificate = |authority: &Authority| der(authority.certificate_pem());
        let id = |authority: &Authority| pki::authority_id(&certificate(authority));
        let authorities = TrustedAuthorities {
            issuing: id(&issuing),
            trusted: [&issuing, &earlier]
                .map(|authority| (id(authority), certificate(authority)))
                .into(),
            ended: vec![certificate(&ended)],
        };
        let verifier = authorities.verifier(&Arc::new(default_provider())).unwrap();
        let verify = |authority: &Authority| {
            let leaf = leaf(authority);
            let issuer = verifier.issuer(&leaf, UnixTime::now());
            assert!(
                issuer
                    .as_ref()
                    .map_or(true, |issuer| issuer.cloned() == id(authority))
            );
            assert_eq!(
                issuer.map(drop),
                verifier
                    .verify_client_cert(&leaf, &[certificate(authority)], UnixTime::now())
                    .map(drop)
            );
            // Agents also send the certificate of the authority.
            verifier
                .verify_client_cert(&leaf, &[certificate(authority)], UnixTime::now())
                .map(drop)
        };
        assert_eq!((verify(&issuing), verify(&earlier)), (Ok(()), Ok(())));
        assert_eq!(verify(&ended), Err(CertificateError::Expired.into()));
        assert!(verify(&foreign).is_err_and(|error| error != CertificateError::Expired.into()));
        let trust = |authority: &Authority| authorities.trust(id(authority).as_ref());
        assert_eq!(
            [&issuing, &earlier, &ended, &foreign].map(trust),
            [true, true, false, false]
        );
        assert!(!authorities.trust(None) && authorities.are_several());
    }

    #[test]
    fn the_issuer_is_the_authority_whose_key_has_signed() {
        let (issuing, _) = Authority::generate("Gw agents").unwrap();
        let (stolen, key) = Authority::generate("Gw agents").unwrap();
        let certificate = |authority: &Authority| der(authority.certificate_pem());
        let id = |authority: &Authority| pki::authority_id(&certificate(authority));
        let authorities = TrustedAuthorities {
            issuing: id(&issuing),
            trusted: [&issuing, &stolen]
                .map(|authority| (id(authority), certificate(authority)))
                .into(),
            ended: Vec::new(),
        };
        let verifier = authorities.verifier(&Arc::new(default_provider())).unwrap();
        // Its certificates name the issuing authority.
        let forger = Authority::from_pem(issuing.certificate_pem(), &key).unwrap();
        let issuer = |authority| {
            verifier
                .issuer(&leaf(authority), UnixTime::now())
                .unwrap()
                .cloned()
        };
        assert_eq!(
            (issuer(&forger), issuer(&issuing)),
            (id(&stolen), id(&issuing))
        );
    }

    #[test]
    fn an_authority_without_a_key_identifier_is_trusted() {
        let pair = KeyPair::generate().unwrap();
        let own = CertificateParams::default()
            .self_signed(&pair)
            .unwrap()
            .pem();
        let authority = Authority::from_pem(&own, &Secret::new(pair.serialize_pem())).unwrap();
        let certificate = der(&own);
        assert_eq!(pki::authority_id(&certificate), None);
        let trusted = vec![(None, certificate)];
        let authorities = TrustedAuthorities {
            issuing: None,
            trusted,
            ended: Vec::new(),
        };
        let verifier = authorities.verifier(&Arc::new(default_provider())).unwrap();
        let leaf = leaf(&authority);
        let issuer = verifier.issuer(&leaf, UnixTime::now()).unwrap();
        assert!(issuer.is_none() && authorities.trust(issuer));
    }
}
