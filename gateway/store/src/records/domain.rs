//! Own domains: names of customers that lead to a service.

use std::fmt;
use std::sync::Arc;

use gw_base::clock::Timestamp;
use gw_base::service::hostname::tenant_label;
use gw_base::tls::certificate::Pair;
use gw_shared::id::{AccountId, DomainName, ManagerName, ServiceId};
use gw_shared::identity::secret::Secret;
use gw_shared::version::later_members::LaterMembers;
use rpds::HashTrieMapSync;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{AcmeFailures, Directory, Indexing, RecordId, RecordKind, Records, Step, StoredRecord};

/// A domain of a customer that leads to a service of its account.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DomainRecord {
    /// The name.
    pub id: DomainName,
    /// Account that the domain belongs to.
    pub account: AccountId,
    /// Service of the account that the domain leads to.
    pub service: ServiceId,
    /// Whether DNS proves that the account controls the name.
    pub state: DomainState,
    /// Start of `state`.
    pub since: Timestamp,
    /// What the last look at DNS found, if it proved nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finding: Option<String>,
    /// The certificate; `None` until there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<DomainCertificate>,
    /// The order of a certificate that is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<DomainOrder>,
    /// Failed orders in a row; `None` after a success.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failures: Option<AcmeFailures>,
    /// Time at which a new certificate was asked for; `None` once it is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renewal_requested: Option<Timestamp>,
    /// Time of creation.
    pub created_at: Timestamp,
    /// What manages the record by documents; `None` if nothing does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub managed_by: Option<ManagerName>,
    /// A [`DomainMaterial`] as JSON. The directory shares it.
    #[serde(with = "shared")]
    pub material: Arc<Secret>,
    /// Members of a later version.
    #[serde(flatten)]
    pub later: LaterMembers,
}

/// Whether DNS proves that an account controls a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DomainState {
    /// It never did. The domain is not served.
    Pending,
    /// It does.
    Active,
    /// It does not any more. The domain is served until the time of grace is over.
    Lost,
    /// It did not for the whole time of grace. The domain is not served.
    Disabled,
}

impl DomainRecord {
    /// Why the certificate is not served, if it is not.
    pub fn unusable_certificate(&self) -> Option<String> {
        self.certificate?;
        let error = served_pair(&self.material).err()?;
        Some(format!("the region's certificate is served: {error}"))
    }
}

impl DomainState {
    /// Whether requests for the domain are relayed, and orders made.
    pub fn is_served(self) -> bool {
        matches!(self, Self::Active | Self::Lost)
    }
}

/// The certificate of a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainCertificate {
    /// Start of its validity.
    pub not_before: Timestamp,
    /// End of its validity.
    pub not_after: Timestamp,
    /// Its origin.
    pub source: DomainCertificateSource,
}

/// An order of a certificate for a domain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainOrder {
    /// Its start.
    pub began: Timestamp,
    /// What the authority asks for. `None` until it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub challenge: Option<DomainChallenge>,
}

/// The proof that an authority asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainChallenge {
    /// Where the authority looks.
    pub kind: DomainChallengeKind,
    /// The proof.
    pub value: Arc<str>,
}

/// Where an authority looks for a proof.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DomainChallengeKind {
    /// In the handshake (RFC 8737): the proof is a SHA-256 digest in base64url.
    TlsAlpn,
    /// In plain HTTP (RFC 8555 §8.3): the proof is a key authorization, which begins with its token
    /// and a dot.
    Http,
}

/// Origin of a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DomainCertificateSource {
    /// Issued by the ACME authority, which is asked for the next one in time.
    Acme,
    /// Uploaded by the customer.
    Uploaded,
}

/// The secret part of a [`DomainRecord`].
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct DomainMaterial {
    /// Certificate and key that are served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub served: Option<ServedPair>,
    /// The order that is under way, as JSON of the crate `gw-acme`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<Value>,
    /// Members of a later version.
    #[serde(flatten)]
    pub later: LaterMembers,
}

/// A certificate with its key.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ServedPair {
    /// The chain, PEM, the certificate of the server first.
    pub chain: String,
    /// The private key, PEM.
    #[serde(with = "gw_shared::identity::secret::revealed")]
    pub key: Secret,
}

/// A domain as workers use it, from its [`DomainRecord`].
pub struct Domain {
    /// The name.
    pub name: DomainName,
    /// Account that the domain belongs to.
    pub account: AccountId,
    /// Label of the service that the domain leads to.
    pub label: Arc<str>,
    /// Whether requests for the domain are relayed.
    pub is_served: bool,
    /// Key authorization of a challenge in plain HTTP.
    key_authorization: Option<Arc<str>>,
    has_certificate: bool,
    material: Arc<Secret>,
}

impl Domain {
    /// Reads the certificate and its key. `None` if there is none. Takes the time of parsing them.
    pub fn certificate(&self) -> Option<Result<Pair, String>> {
        self.has_certificate.then(|| served_pair(&self.material))
    }

    /// The key authorization that answers the challenge with this token (RFC 8555 §8.3).
    pub fn key_authorization(&self, token: &str) -> Option<&str> {
        let known = self.key_authorization.as_deref()?;
        let (of, _) = known.split_once('.')?;
        (of == token).then_some(known)
    }

    /// Whether `other` has the same certificate.
    pub fn has_certificate_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.material, &other.material)
    }
}

fn served_pair(material: &Secret) -> Result<Pair, String> {
    let material: DomainMaterial = serde_json::from_str(material.reveal())
        .map_err(|error| format!("not JSON of this version: {error}"))?;
    let pair = material.served.ok_or("it has none")?;
    Pair::from_pem(&pair.chain, pair.key.reveal())
}

/// Does not print the certificate.
impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.name, self.label)
    }
}

impl Step {
    /// The domain that the step changes.
    pub fn domain(&self) -> Option<&DomainName> {
        match self {
            Self::Put(StoredRecord::Domain(record)) => Some(&record.id),
            Self::Delete(RecordId::Domain(id)) => Some(id),
            _ => None,
        }
    }
}

impl RecordKind for DomainRecord {
    type Id = DomainName;
    /// By name.
    type Index = HashTrieMapSync<DomainName, Arc<Domain>>;

    const HAS_SECRET: bool = true;

    fn id(&self) -> DomainName {
        self.id.clone()
    }

    fn secret_mut(&mut self) -> Option<&mut Secret> {
        Some(Arc::make_mut(&mut self.material))
    }

    fn put_into(&self, directory: &mut Directory, _: &Indexing<'_>) {
        let Some(label) = tenant_label(&self.account, &self.service) else {
            return;
        };
        let challenge = self.order.as_ref().and_then(|it| it.challenge.as_ref());
        let key_authorization = challenge
            .filter(|it| it.kind == DomainChallengeKind::Http)
            .map(|it| Arc::clone(&it.value));
        let domain = Domain {
            name: self.id.clone(),
            account: self.account.clone(),
            label: label.into(),
            is_served: self.state.is_served(),
            key_authorization,
            has_certificate: self.certificate.is_some(),
            material: Arc::clone(&self.material),
        };
        let name = domain.name.clone();
        directory.domains.insert_mut(name, Arc::new(domain));
    }

    fn remove_from(id: &DomainName, directory: &mut Directory, _: &Indexing<'_>) {
        directory.domains.remove_mut(id);
    }

    #[cfg(test)]
    fn sample() -> Self {
        Self {
            id: DomainName::new("api.customer.example").unwrap(),
            account: AccountId::new("acme").unwrap(),
            service: ServiceId::new("api").unwrap(),
            state: DomainState::Lost,
            since: Timestamp(3),
            finding: Some("finding".into()),
            certificate: Some(DomainCertificate {
                not_before: Timestamp(1),
                not_after: Timestamp(2),
                source: DomainCertificateSource::Acme,
            }),
            order: Some(DomainOrder {
                began: Timestamp(2),
                challenge: Some(DomainChallenge {
                    kind: DomainChallengeKind::Http,
                    value: "token.thumbprint".into(),
                }),
            }),
            failures: Some(AcmeFailures {
                count: 2,
                last: Timestamp(1),
                kind: "refused".into(),
                retry_after_seconds: Some(3),
                reason: "reason".into(),
            }),
            renewal_requested: Some(Timestamp(4)),
            created_at: Timestamp(1),
            managed_by: ManagerName::new("git").ok(),
            material: Arc::new(Secret::new("{}".into())),
            later: LaterMembers::default(),
        }
    }
}

impl Records {
    /// The domains of an account, by name.
    pub fn domains_of(&self, account: &AccountId) -> impl Iterator<Item = &DomainRecord> {
        let all = self.domains.values();
        all.filter(move |record| record.account == *account)
    }
}

impl Directory {
    /// The domain with this name, in lower case and without port or final dot.
    pub fn domain(&self, name: &str) -> Option<&Arc<Domain>> {
        self.domains.get(name)
    }
}

/// Writes and reads a shared secret in clear text, as [`gw_shared::identity::secret::revealed`].
mod shared {
    use std::sync::Arc;

    use gw_shared::identity::secret::{Secret, revealed};
    use serde::{Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(
        secret: &Secret,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        revealed::serialize(secret, serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Arc<Secret>, D::Error> {
        revealed::deserialize(deserializer).map(Arc::new)
    }
}
