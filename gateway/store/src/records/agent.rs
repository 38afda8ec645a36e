//! Agents.

use std::collections::BTreeSet;

use gw_base::clock::Timestamp;
use gw_base::service::hostname::tenant_label;
use gw_shared::id::{AccountId, AgentId, AuthorityId, EnrollmentId, EnrollmentTokenId, ServiceId};
use gw_shared::identity::enrollment::EnrollmentStatus;
use gw_shared::identity::secret::SecretHash;
use gw_shared::version::later_members::LaterMembers;
use rpds::HashTrieMapSync;
use serde::{Deserialize, Serialize};

use super::{Directory, Indexing, RecordKind, Service};

/// An agent of an account, from its enrollment on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentRecord {
    /// Id of the agent, assigned at enrollment.
    pub id: AgentId,
    /// Account that the agent belongs to.
    pub account: AccountId,
    /// Display name.
    pub name: String,
    /// Services of the account that the agent may serve.
    pub services: BTreeSet<ServiceId>,
    /// Whether the agent awaits approval, is approved or is revoked.
    pub status: EnrollmentStatus,
    /// Gets requests only while no other agent of the service can take them. An agent can also say
    /// so itself.
    #[serde(default)]
    pub standby: bool,
    /// The agent is deleted when it has had no tunnel for an hour, as those of pods without a
    /// volume.
    #[serde(default)]
    pub ephemeral: bool,
    /// When an ephemeral agent was first seen without a tunnel; `None` while it has one.
    #[serde(default)]
    pub absent_since: Option<Timestamp>,
    /// The token that it enrolled with, which may no longer exist.
    #[serde(default)]
    pub enrollment_token: Option<EnrollmentTokenId>,
    /// The version that the agent reported at enrollment.
    #[serde(default)]
    pub version: Option<String>,
    /// Present until the first certificate, and for some time after it in case the reply is lost.
    #[serde(default)]
    pub enrollment: Option<Box<EnrollmentRecord>>,
    /// Key of the newest certificate.
    #[serde(default)]
    pub key: Option<PublicKeyHash>,
    /// Key of the previous certificate, until a tunnel has used the newest one: an agent that never
    /// received that still uses it.
    #[serde(default)]
    pub previous_key: Option<PublicKeyHash>,
    /// Expiry of the newest certificate.
    #[serde(default)]
    pub certificate_not_after: Option<Timestamp>,
    /// Authority that has issued the newest certificate; absent in records of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authority: Option<AuthorityId>,
    /// Time of the enrollment; 0 in records of earlier versions.
    #[serde(default)]
    pub created_at: Timestamp,
    /// Members of a later version.
    #[serde(flatten)]
    pub later: LaterMembers,
}

/// Enrollment of an agent that may still ask for its first certificate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnrollmentRecord {
    /// Id of the enrollment, as the agent has it.
    pub id: EnrollmentId,
    /// Hash of the secret that authenticates the agent until it has its first certificate.
    pub secret: SecretHash,
    /// Time from which the enrollment secret is refused.
    pub expires_at: Timestamp,
    /// Members of a later version.
    #[serde(flatten)]
    pub later: LaterMembers,
}

/// SHA-256 of a public key's SubjectPublicKeyInfo, used to recognise the key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PublicKeyHash(String);

impl PublicKeyHash {
    /// Hashes a SubjectPublicKeyInfo in DER (RFC 5280 §4.1.2.7).
    pub fn of(subject_public_key_info: &[u8]) -> Self {
        use base64::Engine;
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, subject_public_key_info);
        Self(base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(digest))
    }
}

/// Data of an agent that admission needs, from its [`AgentRecord`].
#[derive(Debug)]
pub struct Agent {
    /// Account that the agent belongs to.
    pub account: AccountId,
    /// Services of the account that the agent may serve.
    pub services: BTreeSet<ServiceId>,
    /// Whether the agent awaits approval, is approved or is revoked.
    pub status: EnrollmentStatus,
    /// The administrator's setting; the agent can also say so itself.
    pub standby: bool,
    /// Expiry of the newest certificate; `None` while there is none.
    pub certificate_not_after: Option<Timestamp>,
    /// As [`AgentRecord::authority`].
    pub authority: Option<AuthorityId>,
    /// Key of the newest certificate, while the key before it is stored too.
    pub replacing_key: Option<PublicKeyHash>,
    /// Secret of its enrollment, which may have expired.
    enrollment: Option<SecretHash>,
}

/// Agents, by id and by the secret of their enrollment.
#[derive(Clone, Default)]
pub struct AgentIndex {
    pub(super) agents: HashTrieMapSync<AgentId, Agent>,
    pub(super) enrollments: HashTrieMapSync<SecretHash, AgentId>,
}

impl RecordKind for AgentRecord {
    type Id = AgentId;
    type Index = AgentIndex;

    fn id(&self) -> AgentId {
        self.id.clone()
    }

    fn put_into(&self, directory: &mut Directory, all: &Indexing<'_>) {
        Self::remove_from(&self.id, directory, all);
        let agent = Agent::from(self);
        let AgentIndex {
            agents,
            enrollments,
        } = &mut directory.agents;
        if let Some(secret) = &agent.enrollment {
            enrollments.insert_mut(secret.clone(), self.id.clone());
        }
        agents.insert_mut(self.id.clone(), agent);
    }

    fn remove_from(id: &AgentId, directory: &mut Directory, _: &Indexing<'_>) {
        let AgentIndex {
            agents,
            enrollments,
        } = &mut directory.agents;
        if let Some(secret) = agents.get(id).and_then(|agent| agent.enrollment.as_ref()) {
            enrollments.remove_mut(secret);
        }
        agents.remove_mut(id);
    }

    #[cfg(test)]
    fn sample() -> Self {
        Self {
            id: AgentId::random(),
            account: AccountId::new("acme").unwrap(),
            name: "a".into(),
            services: super::tests::services(),
            status: EnrollmentStatus::Pending,
            standby: true,
            ephemeral: true,
            absent_since: Some(Timestamp(7)),
            enrollment_token: Some(EnrollmentTokenId::random()),
            version: Some("0.1.0".into()),
            enrollment: Some(Box::new(EnrollmentRecord {
                id: EnrollmentId::random(),
                secret: SecretHash::of("z"),
                expires_at: Timestamp(9),
                later: LaterMembers::default(),
            })),
            key: Some(PublicKeyHash::of(b"key")),
            previous_key: None,
            certificate_not_after: Some(Timestamp(10)),
            authority: Some(AuthorityId::new(&"a".repeat(40)).unwrap()),
            created_at: Timestamp(6),
            later: LaterMembers::default(),
        }
    }
}

impl Directory {
    /// Returns the agent with this id.
    pub fn agent(&self, id: &str) -> Option<&Agent> {
        self.agents.agents.get(id)
    }

    /// Number of agents.
    pub fn agents(&self) -> usize {
        self.agents.agents.size()
    }

    /// Finds the agent by the secret of its enrollment, which may have expired.
    pub fn enrolled(&self, secret: &SecretHash) -> Option<&AgentId> {
        self.agents.enrollments.get(secret)
    }

    /// Hostnames of the services of an agent.
    pub fn hostnames(&self, agent: &Agent) -> Vec<String> {
        let label = |service| tenant_label(&agent.account, service);
        let services = agent
            .services
            .iter()
            .filter_map(|service| self.service(&label(service)?));
        services
            .map(|service| service.hostname.to_string())
            .collect()
    }
}

impl From<&AgentRecord> for Agent {
    fn from(record: &AgentRecord) -> Self {
        Self {
            account: record.account.clone(),
            services: record.services.clone(),
            status: record.status,
            standby: record.standby,
            certificate_not_after: record.certificate_not_after,
            authority: record.authority.clone(),
            replacing_key: record.previous_key.as_ref().and(record.key.clone()),
            enrollment: record
                .enrollment
                .as_ref()
                .map(|enrollment| enrollment.secret.clone()),
        }
    }
}

impl Agent {
    /// Whether this agent may serve `service`.
    pub fn may_serve(&self, service: &Service) -> bool {
        self.status == EnrollmentStatus::Approved
            && self.account == service.account
            && self.services.contains(&service.id)
    }

    /// Whether the newest certificate has expired.
    pub fn is_expired(&self, now: Timestamp) -> bool {
        self.certificate_not_after
            .is_some_and(|not_after| not_after <= now)
    }
}

#[cfg(test)]
mod tests {
    use super::super::StoredRecord;
    use super::*;

    #[test]
    fn an_agent_of_an_earlier_version_has_the_default_of_later_members() {
        let document = r#"{"id":"ag_0123456789abcdefghij","account":"acme","name":"a",
            "services":["api"],"status":"approved"}"#;
        let StoredRecord::Agent(AgentRecord {
            enrollment_token,
            standby,
            ephemeral,
            absent_since,
            ..
        }) = StoredRecord::read("agent", document).unwrap()
        else {
            unreachable!()
        };
        assert_eq!(
            (enrollment_token, standby, ephemeral, absent_since),
            (None, false, false, None)
        );
    }
}
