//! Certificates that the gateway issues: to agents from its own authority, and to itself when no
//! certificate is configured.

use std::io;
use std::path::Path;
use std::time::Duration;

use aws_lc_rs::hmac;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_ASN1, ED25519, UnparsedPublicKey, VerificationAlgorithm,
};
use gw_region::{NodeSlot, derive_bytes};
use gw_shared::files;
use gw_shared::id::{AccountId, AgentId, AuthorityId};
use gw_shared::identity::secret::Secret;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PKCS_ED25519, PublicKeyData, SanType,
    SubjectPublicKeyInfo,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, CertificateSigningRequestDer};
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::prelude::{FromDer, GeneralName, ParsedExtension, X509Certificate};

use crate::clock::Timestamp;
use crate::service::hostname::Region;

/// Lifetime of the authorities.
const AUTHORITY_LIFETIME: Duration = Duration::from_hours(3650 * 24);
/// Lifetime of the server certificate that the development authority issues.
const DEVELOPMENT_LIFETIME: Duration = Duration::from_hours(365 * 24);
/// Certificates are valid from a little before their creation, because clocks differ.
const CLOCK_SKEW: Duration = Duration::from_secs(300);

/// Reason why a certificate authority cannot be used, or a certificate cannot be issued.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// A file cannot be read or written.
    #[error("certificate authority: {0}")]
    Io(#[from] io::Error),
    /// A certificate or key cannot be parsed, created or signed.
    #[error("certificate authority: {0}")]
    Certificate(#[from] rcgen::Error),
}

/// A certificate authority, stored in two files of the data folder.
pub struct Authority {
    certificate_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate and its private key, both PEM. The gateway does not store the key.
pub struct Issued {
    /// The certificate, in PEM.
    pub certificate_pem: String,
    /// Its private key, in PEM.
    pub key_pem: String,
}

/// How the private key of an authority is read from its file, and written to it.
pub trait KeyFile {
    /// Reads the file; returns the key in PEM.
    fn read(&self, path: &Path) -> io::Result<String>;
    /// Writes the key, which `text` has in PEM, to a file that only its owner can read.
    fn write(&self, path: &Path, text: &str) -> io::Result<()>;
}

/// A key file with the PEM as it is.
struct PlainKeyFile;

impl KeyFile for PlainKeyFile {
    fn read(&self, path: &Path) -> io::Result<String> {
        files::read_text(path)
    }

    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        files::write_private(path, text.as_bytes())
    }
}

impl Authority {
    /// Loads `{name}.crt` and `{name}.key` from `data_dir`, or creates them on first start.
    pub fn load_or_create(
        data_dir: &Path,
        name: &str,
        common_name: &str,
    ) -> Result<Self, PkiError> {
        Self::load_or_create_with(&PlainKeyFile, data_dir, name, common_name)
    }

    /// As [`Self::load_or_create`], with another form of the key file.
    pub fn load_or_create_with(
        key_file: &impl KeyFile,
        data_dir: &Path,
        name: &str,
        common_name: &str,
    ) -> Result<Self, PkiError> {
        let certificate = data_dir.join(format!("{name}.crt"));
        let key = data_dir.join(format!("{name}.key"));
        if !certificate.exists() {
            // Reuses a key without a certificate: certificates it signed stay valid under a new CA
            // certificate of the same name.
            let pair = if key.exists() {
                KeyPair::from_pem(&key_file.read(&key)?)?
            } else {
                KeyPair::generate()?
            };
            let authority = authority_params(common_name, Timestamp::now()).self_signed(&pair)?;
            // Written last, because the certificate marks the authority as complete.
            key_file.write(&key, &pair.serialize_pem())?;
            files::write_private(&certificate, authority.pem().as_bytes())?;
        }
        let certificate_pem = files::read_text(&certificate)?;
        let pair = KeyPair::from_pem(&key_file.read(&key)?)?;
        let issuer = Issuer::from_ca_cert_pem(&certificate_pem, pair)?;
        Ok(Self {
            certificate_pem,
            issuer,
        })
    }

    /// An authority as a node makes it whose clock says `now`.
    #[cfg(test)]
    pub(crate) fn made_at(now: Timestamp) -> Self {
        let pair = KeyPair::generate().unwrap();
        let certificate_pem = authority_params("test", now)
            .self_signed(&pair)
            .unwrap()
            .pem();
        let issuer = Issuer::from_ca_cert_pem(&certificate_pem, pair).unwrap();
        Self {
            certificate_pem,
            issuer,
        }
    }

    /// Creates an authority that is stored elsewhere. Also returns its private key, in PEM.
    pub fn generate(common_name: &str) -> Result<(Self, Secret), PkiError> {
        let pair = KeyPair::generate()?;
        let certificate_pem = authority_params(common_name, Timestamp::now())
            .self_signed(&pair)?
            .pem();
        let key_pem = Secret::new(pair.serialize_pem());
        let issuer = Issuer::from_ca_cert_pem(&certificate_pem, pair)?;
        Ok((
            Self {
                certificate_pem,
                issuer,
            },
            key_pem,
        ))
    }

    /// The authority of a certificate and its private key, both in PEM.
    pub fn from_pem(certificate_pem: &str, key_pem: &Secret) -> Result<Self, PkiError> {
        let issuer =
            Issuer::from_ca_cert_pem(certificate_pem, KeyPair::from_pem(key_pem.reveal())?)?;
        Ok(Self {
            certificate_pem: certificate_pem.to_owned(),
            issuer,
        })
    }

    /// The private key, in PEM.
    pub fn key_pem(&self) -> Secret {
        Secret::new(self.issuer.key().serialize_pem())
    }

    /// The certificate of the authority, in PEM.
    pub fn certificate_pem(&self) -> &str {
        &self.certificate_pem
    }

    /// Key of HMAC-SHA-256 for one purpose, derived from the private key: the same at all nodes of
    /// a region.
    pub fn derive(&self, purpose: &str) -> hmac::Key {
        hmac::Key::new(
            hmac::HMAC_SHA256,
            &*derive_bytes(self.issuer.key().serialized_der(), purpose),
        )
    }

    /// Issues a certificate (PEM) for the key of `request`, with which `agent` authenticates its
    /// tunnels. It does not contain the services of the agent.
    pub fn issue_agent(
        &self,
        region: &Region,
        account: &AccountId,
        agent: &AgentId,
        request: &CertificateRequest,
        now: Timestamp,
        not_after: Timestamp,
    ) -> Result<String, PkiError> {
        let validity = Validity::from_now(now, not_after);
        let mut params = leaf_params(
            agent.as_str(),
            validity,
            ExtendedKeyUsagePurpose::ClientAuth,
        );
        params.subject_alt_names =
            vec![SanType::URI(agent_uri(region, account, agent).try_into()?)];
        Ok(params.signed_by(&request.0, &self.issuer)?.pem())
    }

    /// Issues a certificate with which a process of a node authenticates itself to other nodes, as
    /// server and as client. It lives as long as the authority: its key exists in the memory of
    /// that process only, and no clock takes part.
    pub fn issue_node(&self, region: &Region, node: NodeIdentity) -> Result<Issued, PkiError> {
        let name = format!("node {}", node.slot.get());
        let mut params = leaf_params(&name, self.validity()?, ExtendedKeyUsagePurpose::ServerAuth);
        params
            .extended_key_usages
            .push(ExtendedKeyUsagePurpose::ClientAuth);
        params.subject_alt_names = vec![SanType::URI(node_uri(region, node).try_into()?)];
        let pair = KeyPair::generate()?;
        let certificate = params.signed_by(&pair, &self.issuer)?;
        Ok(Issued {
            certificate_pem: certificate.pem(),
            key_pem: pair.serialize_pem(),
        })
    }

    fn validity(&self) -> Result<Validity, PkiError> {
        let certificate = CertificateDer::from_pem_slice(self.certificate_pem.as_bytes())
            .map_err(io::Error::other)?;
        Ok(validity(&certificate)
            .ok_or_else(|| io::Error::other("its certificate cannot be parsed"))?)
    }

    /// Issues a server certificate for the apex of the region and all of its tenants.
    fn issue_region(&self, region: &Region) -> Result<Issued, PkiError> {
        let now = Timestamp::now();
        let validity = Validity::from_now(now, now.after(DEVELOPMENT_LIFETIME));
        let mut params = leaf_params(region.apex(), validity, ExtendedKeyUsagePurpose::ServerAuth);
        params.subject_alt_names = vec![
            SanType::DnsName(region.apex().try_into()?),
            SanType::DnsName(format!("*.{}", region.apex()).try_into()?),
        ];
        let pair = KeyPair::generate()?;
        let certificate = params.signed_by(&pair, &self.issuer)?;
        Ok(Issued {
            certificate_pem: certificate.pem(),
            key_pem: pair.serialize_pem(),
        })
    }
}

/// The public key of a certificate signing request (RFC 2986) with verified proof of possession.
#[derive(Debug)]
pub struct CertificateRequest(SubjectPublicKeyInfo, Vec<u8>);

/// The reason for refusing a certificate signing request.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidCsr {
    /// The text is not one PEM block of the expected kind, or is too long.
    #[error("it must be one PEM block `CERTIFICATE REQUEST` of at most {CSR_MAX} bytes")]
    NotPem,
    /// The block is not a request in DER (RFC 2986).
    #[error("it is not a PKCS #10 certificate request")]
    Malformed,
    /// The key is neither on P-256 nor of Ed25519.
    #[error("its key must be on P-256 or Ed25519")]
    UnsupportedKey,
    /// The signature is not one by the key of the request.
    #[error("its signature does not match its key")]
    BadSignature,
}

/// Longest certificate signing request, in bytes of PEM.
const CSR_MAX: usize = 16 * 1024;

impl CertificateRequest {
    /// Verifies the proof of possession and extracts the public key. Ignores everything else in the
    /// request.
    pub fn parse(pem: &str) -> Result<Self, InvalidCsr> {
        if pem.len() > CSR_MAX {
            return Err(InvalidCsr::NotPem);
        }
        let der = CertificateSigningRequestDer::from_pem_slice(pem.as_bytes())
            .map_err(|_| InvalidCsr::NotPem)?;
        let (rest, request) =
            X509CertificationRequest::from_der(&der).map_err(|_| InvalidCsr::Malformed)?;
        if !rest.is_empty() {
            return Err(InvalidCsr::Malformed);
        }
        let key = request.certification_request_info.subject_pki.raw;
        let parsed = SubjectPublicKeyInfo::from_der(key).map_err(|_| InvalidCsr::UnsupportedKey)?;
        if ![&PKCS_ECDSA_P256_SHA256, &PKCS_ED25519].contains(&parsed.algorithm()) {
            return Err(InvalidCsr::UnsupportedKey);
        }
        request
            .verify_signature()
            .map_err(|_| InvalidCsr::BadSignature)?;
        Ok(Self(parsed, key.to_vec()))
    }

    /// DER.
    pub fn subject_public_key_info(&self) -> &[u8] {
        &self.1
    }
}

/// A server certificate for a gateway without a configured one, issued by a development authority
/// that callers can trust (`dev-ca.crt`). Each start issues a new certificate from the same
/// authority.
pub(crate) fn development_certificate(
    data_dir: &Path,
    region: &Region,
) -> Result<Issued, PkiError> {
    development_authority(data_dir)?.issue_region(region)
}

/// The authority of development certificates: `dev-ca.crt` and `dev-ca.key` in `data_dir`.
pub fn development_authority(data_dir: &Path) -> Result<Authority, PkiError> {
    Authority::load_or_create(
        data_dir,
        "dev-ca",
        "Gw development CA, do not trust in production",
    )
}

/// The identity in an agent's certificate.
#[derive(Debug, PartialEq, Eq)]
pub struct AgentIdentity {
    /// Account of the agent.
    pub account: AccountId,
    /// Id of the agent in the account.
    pub agent: AgentId,
}

/// Reads the identity from a verified certificate; `None` if it does not belong to an agent of this
/// region.
pub fn agent_identity(certificate: &CertificateDer<'_>, region: &Region) -> Option<AgentIdentity> {
    let path = path_in_region(certificate, region)?;
    let (account, agent) = path.split_once("/agent/")?;
    Some(AgentIdentity {
        account: AccountId::new(account).ok()?,
        agent: AgentId::new(agent).ok()?,
    })
}

/// The identity in a node's certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeIdentity {
    /// Slot of the node.
    pub slot: NodeSlot,
    /// Session of the process; 0 for a node that owns no services.
    pub session: u128,
}

/// Reads the identity from a verified certificate; `None` if it does not belong to a node of this
/// region.
pub fn node_identity(certificate: &CertificateDer<'_>, region: &Region) -> Option<NodeIdentity> {
    let path = path_in_region(certificate, region)?;
    let (slot, session) = path.strip_prefix("node/")?.split_once('/')?;
    let slot = NodeSlot::new(slot.parse().ok()?)?;
    let node = NodeIdentity {
        slot,
        session: u128::from_str_radix(session, 16).ok()?,
    };
    // One identity has one form.
    (node_path(node) == path).then_some(node)
}

/// The path of the only URI in a certificate, if the URI names something in this region.
fn path_in_region(certificate: &CertificateDer<'_>, region: &Region) -> Option<String> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let names = certificate.subject_alternative_name().ok()??;
    let mut uris = names
        .value
        .general_names
        .iter()
        .filter_map(|name| match name {
            GeneralName::URI(uri) => Some(*uri),
            _ => None,
        });
    let (Some(uri), None) = (uris.next(), uris.next()) else {
        return None;
    };
    uri.strip_prefix("gw://")?
        .strip_prefix(region.apex())?
        .strip_prefix('/')
        .map(str::to_owned)
}

/// Id of the authority with this certificate; `None` if it has no subject key identifier.
pub fn authority_id(certificate: &CertificateDer<'_>) -> Option<AuthorityId> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let named =
        certificate
            .iter_extensions()
            .find_map(|extension| match extension.parsed_extension() {
                ParsedExtension::SubjectKeyIdentifier(named) => Some(named),
                _ => None,
            });
    AuthorityId::of_key_identifier(named?.0)
}

/// The SubjectPublicKeyInfo of a certificate; `None` if it cannot be parsed.
pub fn subject_public_key_info(certificate: &CertificateDer<'_>) -> Option<Vec<u8>> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    Some(certificate.public_key().raw.to_vec())
}

/// The time in which a certificate is valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    /// First second in which the certificate is valid.
    pub not_before: Timestamp,
    /// Expiry.
    pub not_after: Timestamp,
}

impl Validity {
    fn from_now(now: Timestamp, not_after: Timestamp) -> Self {
        Self {
            not_before: Timestamp(now.0.saturating_sub_unsigned(CLOCK_SKEW.as_secs())),
            not_after,
        }
    }
}

/// Validity of a certificate; `None` if it cannot be parsed.
pub fn validity(certificate: &CertificateDer<'_>) -> Option<Validity> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let validity = certificate.validity();
    let [not_before, not_after] =
        [validity.not_before, validity.not_after].map(|time| Timestamp(time.timestamp()));
    Some(Validity {
        not_before,
        not_after,
    })
}

/// Expiry of a certificate; `None` if it cannot be parsed.
pub fn not_after(certificate: &CertificateDer<'_>) -> Option<Timestamp> {
    validity(certificate).map(|validity| validity.not_after)
}

/// Verifies a signature by the key of `certificate`, on P-256 (SHA-256, DER) or Ed25519.
pub fn verify_signature(
    certificate: &CertificateDer<'_>,
    message: &[u8],
    signature: &[u8],
) -> bool {
    let Ok((_, certificate)) = X509Certificate::from_der(certificate) else {
        return false;
    };
    let Ok(key) = SubjectPublicKeyInfo::from_der(certificate.public_key().raw) else {
        return false;
    };
    let algorithm: &'static dyn VerificationAlgorithm = if *key.algorithm() == PKCS_ED25519 {
        &ED25519
    } else {
        &ECDSA_P256_SHA256_ASN1
    };
    UnparsedPublicKey::new(algorithm, key.der_bytes())
        .verify(message, signature)
        .is_ok()
}

fn agent_uri(region: &Region, account: &AccountId, agent: &AgentId) -> String {
    format!("gw://{}/{account}/agent/{agent}", region.apex())
}

fn node_uri(region: &Region, node: NodeIdentity) -> String {
    format!("gw://{}/{}", region.apex(), node_path(node))
}

fn node_path(node: NodeIdentity) -> String {
    format!("node/{}/{:032x}", node.slot.get(), node.session)
}

fn authority_params(common_name: &str, now: Timestamp) -> CertificateParams {
    let mut params = named_params(
        common_name,
        Validity::from_now(now, now.after(AUTHORITY_LIFETIME)),
    );
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

fn leaf_params(
    common_name: &str,
    validity: Validity,
    usage: ExtendedKeyUsagePurpose,
) -> CertificateParams {
    let mut params = named_params(common_name, validity);
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![usage];
    params.use_authority_key_identifier_extension = true;
    params
}

fn named_params(common_name: &str, validity: Validity) -> CertificateParams {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common_name);
    let mut params = CertificateParams::default();
    params.distinguished_name = name;
    params.not_before = validity.not_before.to_datetime();
    params.not_after = validity.not_after.to_datetime();
    params
}

#[cfg(test)]
mod tests;
