//! Certificates that the gateway issues: to agents, from its own authority, and to itself while it has none from files.

use std::path::Path;

use gw_shared::id::{AccountId, AgentId};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use rustls_pki_types::CertificateDer;
use time::{Duration, OffsetDateTime};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use crate::files;
use crate::hostname::Region;

/// Lifetime of an agent's certificate.
const AGENT_LIFETIME: Duration = Duration::hours(24);
/// Lifetime of the authorities, and of the certificate that the development authority issues.
const AUTHORITY_LIFETIME: Duration = Duration::days(3650);
const DEVELOPMENT_LIFETIME: Duration = Duration::days(365);
/// Clocks differ: certificates are valid from a little before they are made.
const CLOCK_SKEW: Duration = Duration::minutes(5);

#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    #[error("certificate authority: {0}")]
    Io(#[from] std::io::Error),
    #[error("certificate authority: {0}")]
    Certificate(#[from] rcgen::Error),
}

/// A certificate authority kept in two files of the data folder.
pub(crate) struct Authority {
    certificate_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate with its private key, both PEM. The key is the holder's: nothing here keeps it.
pub(crate) struct Issued {
    pub(crate) certificate_pem: String,
    pub(crate) key_pem: String,
}

impl Authority {
    /// Loads `{name}.crt` and `{name}.key` from `data_dir`, or makes them on first start.
    pub(crate) fn load_or_create(data_dir: &Path, name: &str, common_name: &str) -> Result<Self, PkiError> {
        let (certificate, key) = (data_dir.join(format!("{name}.crt")), data_dir.join(format!("{name}.key")));
        if !certificate.exists() {
            let pair = KeyPair::generate()?;
            let authority = authority_params(common_name).self_signed(&pair)?;
            // The certificate last: it is what says that there is an authority.
            files::write_private(&key, pair.serialize_pem().as_bytes())?;
            files::write_private(&certificate, authority.pem().as_bytes())?;
        }
        let certificate_pem = files::read_text(&certificate)?;
        let pair = KeyPair::from_pem(&files::read_text(&key)?)?;
        let issuer = Issuer::from_ca_cert_pem(&certificate_pem, pair)?;
        Ok(Self { certificate_pem, issuer })
    }

    pub(crate) fn certificate_pem(&self) -> &str {
        &self.certificate_pem
    }

    /// Issues a certificate with which `agent` authenticates its tunnels. What it may serve is not in it.
    pub(crate) fn issue_agent(
        &self,
        region: &Region,
        account: &AccountId,
        agent: &AgentId,
    ) -> Result<Issued, PkiError> {
        let mut params = leaf_params(agent.as_str(), AGENT_LIFETIME, ExtendedKeyUsagePurpose::ClientAuth);
        params.subject_alt_names = vec![SanType::URI(agent_uri(region, account, agent).try_into()?)];
        self.issue(&params)
    }

    /// Issues a server certificate for the region's apex and every tenant of it.
    fn issue_region(&self, region: &Region) -> Result<Issued, PkiError> {
        let mut params = leaf_params(region.apex(), DEVELOPMENT_LIFETIME, ExtendedKeyUsagePurpose::ServerAuth);
        params.subject_alt_names = vec![
            SanType::DnsName(region.apex().try_into()?),
            SanType::DnsName(format!("*.{}", region.apex()).try_into()?),
        ];
        self.issue(&params)
    }

    fn issue(&self, params: &CertificateParams) -> Result<Issued, PkiError> {
        let pair = KeyPair::generate()?;
        let certificate = params.signed_by(&pair, &self.issuer)?;
        Ok(Issued { certificate_pem: certificate.pem(), key_pem: pair.serialize_pem() })
    }
}

/// A server certificate for where there is none from files: of a development authority that callers can be told to
/// trust (`dev-ca.crt`). A new one each start, of the same authority.
pub(crate) fn development_certificate(data_dir: &Path, region: &Region) -> Result<Issued, PkiError> {
    let authority = Authority::load_or_create(data_dir, "dev-ca", "Gw development CA, do not trust in production")?;
    authority.issue_region(region)
}

/// Who an agent's certificate says it is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct AgentIdentity {
    pub(crate) account: AccountId,
    pub(crate) agent: AgentId,
}

/// Reads the identity out of a verified certificate; `None` if it is not one of this region's agents.
pub(crate) fn agent_identity(certificate: &CertificateDer<'_>, region: &Region) -> Option<AgentIdentity> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let names = certificate.subject_alternative_name().ok()??;
    let mut uris = names.value.general_names.iter().filter_map(|name| match name {
        GeneralName::URI(uri) => Some(*uri),
        _ => None,
    });
    let (Some(uri), None) = (uris.next(), uris.next()) else { return None };
    let rest = uri.strip_prefix("gw://")?.strip_prefix(region.apex())?.strip_prefix('/')?;
    let (account, agent) = rest.split_once("/agent/")?;
    Some(AgentIdentity { account: AccountId::new(account).ok()?, agent: AgentId::new(agent).ok()? })
}

fn agent_uri(region: &Region, account: &AccountId, agent: &AgentId) -> String {
    format!("gw://{}/{account}/agent/{agent}", region.apex())
}

fn authority_params(common_name: &str) -> CertificateParams {
    let mut params = named_params(common_name, AUTHORITY_LIFETIME);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

fn leaf_params(common_name: &str, lifetime: Duration, usage: ExtendedKeyUsagePurpose) -> CertificateParams {
    let mut params = named_params(common_name, lifetime);
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![usage];
    params.use_authority_key_identifier_extension = true;
    params
}

fn named_params(common_name: &str, lifetime: Duration) -> CertificateParams {
    let now = OffsetDateTime::now_utc();
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common_name);
    let mut params = CertificateParams::default();
    params.distinguished_name = name;
    params.not_before = now - CLOCK_SKEW;
    params.not_after = now + lifetime;
    params
}

#[cfg(test)]
mod tests {
    use rustls_pki_types::pem::PemObject;

    use super::*;

    #[test]
    fn an_agents_certificate_says_who_it_is_in_its_region_only() {
        let directory = tempfile::tempdir().unwrap();
        let region = Region::new("eu1", "example.com");
        let authority = Authority::load_or_create(directory.path(), "agent-ca", "test").unwrap();
        let (account, agent) = (AccountId::new("acme").unwrap(), AgentId::random());
        let issued = authority.issue_agent(&region, &account, &agent).unwrap();
        let der = CertificateDer::from_pem_slice(issued.certificate_pem.as_bytes()).unwrap();
        assert_eq!(agent_identity(&der, &region), Some(AgentIdentity { account, agent }));
        assert_eq!(agent_identity(&der, &Region::new("eu2", "example.com")), None);
        let (_, parsed) = X509Certificate::from_der(&der).unwrap();
        assert!(!parsed.is_ca());
        let usage = parsed.extended_key_usage().unwrap().unwrap().value;
        assert!(usage.client_auth && !usage.server_auth);
        let lifetime = parsed.validity().not_after.timestamp() - parsed.validity().not_before.timestamp();
        assert_eq!(lifetime, (AGENT_LIFETIME + CLOCK_SKEW).whole_seconds());
    }

    #[test]
    fn an_authority_stays_the_same_over_restarts() {
        let directory = tempfile::tempdir().unwrap();
        let load = || Authority::load_or_create(directory.path(), "ca", "test").unwrap().certificate_pem;
        assert_eq!(load(), load());
        let region = Region::new("eu1", "example.com");
        let server = development_certificate(directory.path(), &region).unwrap();
        let der = CertificateDer::from_pem_slice(server.certificate_pem.as_bytes()).unwrap();
        assert_eq!(agent_identity(&der, &region), None);
    }
}
