//! Certificates that are the same in every process: Ed25519 keys from fixed bytes, whose signatures
//! have no random part, and fixed validity.

use std::sync::Arc;

use aws_lc_rs::digest;
use gw_base::clock::Timestamp;
use gw_base::service::hostname;
use gw_base::tls::agents::TrustedAuthorities;
use gw_base::tls::node::NodeTls;
use gw_base::tls::pki::{self, Authority, CertificateRequest, NodeIdentity};
use gw_shared::id::{AccountId, AgentId, AuthorityId};
use gw_shared::identity::secret::Secret;
use gw_store::PublicKeyHash;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PKCS_ED25519, date_time_ymd,
};
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivatePkcs8KeyDer};

use super::SetupError;

/// First second in which all certificates are valid: 2020-01-01T00:00:00Z.
pub const NOT_BEFORE: Timestamp = Timestamp(1_577_836_800);
/// Their expiry: 4000-01-01T00:00:00Z.
pub const NOT_AFTER: Timestamp = Timestamp(64_060_588_800);
/// Years of [`NOT_BEFORE`] and [`NOT_AFTER`].
const YEARS: (i32, i32) = (2020, 4000);

/// The beginning of an Ed25519 key in PKCS #8 (RFC 8410 §7). The 32 bytes of the key follow.
const PKCS8_ED25519: [u8; 16] = [
    0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20,
];

/// The certificates of a region.
pub struct Certificates {
    region: hostname::Region,
    /// Issues the certificates of agents.
    agents: Authority,
    /// Certificate of that authority.
    agents_certificate: CertificateDer<'static>,
    /// Certificate of the authority that callers and agents trust, in PEM.
    public_authority: String,
    /// Certificate of the apex and all services, in PEM.
    public: String,
    public_key: String,
}

/// The identity of an agent.
pub struct IssuedIdentity {
    /// Private key, certificate, and certificate of the authority, in PEM.
    pub pem: String,
    /// Key of the certificate.
    pub key: PublicKeyHash,
    /// Authority that has issued the certificate.
    pub authority: Option<AuthorityId>,
}

impl Certificates {
    /// Issues the certificates of `region`.
    pub fn new(region: &hostname::Region) -> Result<Self, SetupError> {
        let public_authority = key("public authority")?;
        let params = authority_params("Simulated public authority");
        let public_authority_pem = params.self_signed(&public_authority)?.pem();
        let issuer = Issuer::new(params, public_authority);
        let key_of_region = key("public")?;
        let names = [region.apex().to_owned(), format!("*.{}", region.apex())];
        let mut params = CertificateParams::new(names)?;
        valid(&mut params, region.apex());
        params.use_authority_key_identifier_extension = true;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let public = params.signed_by(&key_of_region, &issuer)?.pem();

        let agents_key = key("authority of agents")?;
        let agents_pem = authority_params("Simulated authority of agents")
            .self_signed(&agents_key)?
            .pem();
        let agents_certificate = der(&agents_pem)?;
        let agents = Authority::from_pem(&agents_pem, &Secret::new(agents_key.serialize_pem()))?;
        Ok(Self {
            region: region.clone(),
            agents,
            agents_certificate,
            public_authority: public_authority_pem,
            public,
            public_key: key_of_region.serialize_pem(),
        })
    }

    /// The certificate of the apex and all services, and its key, in PEM.
    pub fn public(&self) -> (&str, &str) {
        (&self.public, &self.public_key)
    }

    /// Certificate of the authority that callers and agents trust, in PEM.
    pub fn public_authority(&self) -> &str {
        &self.public_authority
    }

    /// Certificate of the authority of agents, in PEM.
    pub fn agents_authority(&self) -> &str {
        self.agents.certificate_pem()
    }

    /// Id of the authority of agents.
    pub fn agents_authority_id(&self) -> Option<AuthorityId> {
        pki::authority_id(&self.agents_certificate)
    }

    /// The authorities whose certificates the gateway accepts.
    pub fn trusted(&self) -> TrustedAuthorities {
        let id = self.agents_authority_id();
        TrustedAuthorities {
            issuing: id.clone(),
            trusted: vec![(id, self.agents_certificate.clone())],
            ended: Vec::new(),
        }
    }

    /// The identity that an agent enrolls with. Its key depends on the id of the agent only.
    pub fn identity(
        &self,
        account: &AccountId,
        agent: &AgentId,
    ) -> Result<IssuedIdentity, SetupError> {
        let key = key(&format!("agent {agent}"))?;
        let csr = CertificateParams::default()
            .serialize_request(&key)?
            .pem()?;
        let request = CertificateRequest::parse(&csr)
            .map_err(|error| SetupError::Plan(format!("agent {agent}: {error}")))?;
        let certificate = self.issue(account, agent, &request)?;
        let authority = self.agents.certificate_pem();
        Ok(IssuedIdentity {
            pem: format!("{}{certificate}{authority}", key.serialize_pem()),
            key: PublicKeyHash::of(request.subject_public_key_info()),
            authority: self.agents_authority_id(),
        })
    }

    /// A certificate for the key of `request`, in PEM.
    pub fn issue(
        &self,
        account: &AccountId,
        agent: &AgentId,
        request: &CertificateRequest,
    ) -> Result<String, SetupError> {
        Ok(self
            .agents
            .issue_agent(&self.region, account, agent, request, NOT_BEFORE, NOT_AFTER)?)
    }

    /// TLS configurations of a process of a node, for connections to other nodes.
    pub fn node(&self, node: NodeIdentity) -> Result<NodeTls, SetupError> {
        let issued = self.agents.issue_node(&self.region, node)?;
        Ok(NodeTls::new(
            std::slice::from_ref(&self.agents_certificate),
            &issued,
        )?)
    }

    /// TLS configuration of callers that speak `protocol`, such as `h2` or `http/1.1`. Sessions are
    /// resumed.
    pub fn caller(&self, protocol: &[u8]) -> Result<Arc<ClientConfig>, SetupError> {
        let mut roots = RootCertStore::empty();
        roots.add(der(&self.public_authority)?)?;
        let mut config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![protocol.to_vec()];
        config.resumption = rustls::client::Resumption::in_memory_sessions(4);
        Ok(Arc::new(config))
    }
}

/// The key for `purpose`.
fn key(purpose: &str) -> Result<KeyPair, rcgen::Error> {
    let bytes = digest::digest(&digest::SHA256, purpose.as_bytes());
    let pkcs8 = [&PKCS8_ED25519[..], bytes.as_ref()].concat();
    KeyPair::from_pkcs8_der_and_sign_algo(&PrivatePkcs8KeyDer::from(pkcs8), &PKCS_ED25519)
}

fn valid(params: &mut CertificateParams, common_name: &str) {
    params.distinguished_name = DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::CommonName, common_name);
    params.not_before = date_time_ymd(YEARS.0, 1, 1);
    params.not_after = date_time_ymd(YEARS.1, 1, 1);
}

fn authority_params(common_name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    valid(&mut params, common_name);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

fn der(pem: &str) -> Result<CertificateDer<'static>, SetupError> {
    CertificateDer::from_pem_slice(pem.as_bytes())
        .map_err(|error| SetupError::Plan(format!("a certificate of the simulation: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_have_the_same_bytes_each_time() {
        let region = hostname::Region::new("sim", "example.com");
        let [one, two] = [(); 2].map(|()| Certificates::new(&region).unwrap());
        assert_eq!(one.public(), two.public());
        assert_eq!(one.public_authority(), two.public_authority());
        assert_eq!(one.agents_authority(), two.agents_authority());
        let account = AccountId::new("acme").unwrap();
        let agent = AgentId::new("ag_00000000000000000001").unwrap();
        let identity = |of: &Certificates| of.identity(&account, &agent).unwrap().pem;
        assert_eq!(identity(&one), identity(&two));
    }
}
