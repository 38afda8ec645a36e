//! Enrollment tokens.

use std::collections::BTreeSet;

use gw_base::clock::Timestamp;
use gw_shared::id::{AccountId, AgentId, EnrollmentTokenId, ServiceId};
use gw_shared::identity::secret::SecretHash;
use gw_shared::version::later_members::LaterMembers;
use serde::{Deserialize, Serialize};

use super::RecordKind;

/// Whether an agent that enrolls has to wait for an administrator.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    utoipa::ToSchema,
    clap::ValueEnum,
)]
#[serde(rename_all = "snake_case")]
#[expect(
    missing_docs,
    reason = "clap would print the help of every option of the command on lines of its own"
)]
pub enum Approval {
    // The agent is approved when it enrolls.
    #[default]
    Auto,
    // The agent waits until an administrator approves it.
    Manual,
}

/// Lets agents enroll, each once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnrollmentTokenRecord {
    /// Id in the token, which has the form `gw_et_{id}.{secret}`.
    pub id: EnrollmentTokenId,
    /// Account of the agents that enroll with the token.
    pub account: AccountId,
    /// Hash of the secret part of the token.
    pub secret: SecretHash,
    /// Services that these agents may serve.
    pub services: BTreeSet<ServiceId>,
    /// Whether these agents need the approval of an administrator.
    pub approval: Approval,
    /// Its agents are ephemeral, see [`AgentRecord::ephemeral`](super::AgentRecord::ephemeral).
    #[serde(default)]
    pub ephemeral: bool,
    /// Time of creation.
    pub created_at: Timestamp,
    /// Time from which the token is refused.
    pub expires_at: Timestamp,
    /// Number of agents that may use it.
    #[serde(default = "once")]
    pub uses: u32,
    /// Number of agents that have used it; absent in records of earlier versions.
    #[serde(default)]
    pub used: u32,
    /// The last agent that used it. Earlier versions know only this: they take a token with it for
    /// used up.
    pub used_by: Option<AgentId>,
    /// Members of a later version.
    #[serde(flatten)]
    pub later: LaterMembers,
}

fn once() -> u32 {
    1
}

impl RecordKind for EnrollmentTokenRecord {
    type Id = EnrollmentTokenId;
    type Index = ();

    const DELETED_BY_RESTORE: Option<&'static str> =
        Some("enrollment tokens, which may have been used since. Create others for new agents.");

    fn id(&self) -> EnrollmentTokenId {
        self.id.clone()
    }

    #[cfg(test)]
    fn sample() -> Self {
        Self {
            id: EnrollmentTokenId::random(),
            account: AccountId::new("acme").unwrap(),
            secret: SecretHash::of("y"),
            services: super::tests::services(),
            approval: Approval::Manual,
            ephemeral: true,
            created_at: Timestamp(3),
            expires_at: Timestamp(4),
            uses: 50,
            used: 3,
            used_by: Some(AgentId::random()),
            later: LaterMembers::default(),
        }
    }
}

impl EnrollmentTokenRecord {
    /// Number of agents that have used the token.
    pub fn times_used(&self) -> u32 {
        self.used.max(u32::from(self.used_by.is_some()))
    }

    /// Whether as many agents have used the token as may use it.
    pub fn is_used_up(&self) -> bool {
        self.times_used() >= self.uses
    }
}

#[cfg(test)]
mod tests {
    use super::super::StoredRecord;
    use super::*;

    fn token(document: &str) -> EnrollmentTokenRecord {
        let StoredRecord::EnrollmentToken(token) =
            StoredRecord::read("enrollment_token", document).unwrap()
        else {
            unreachable!()
        };
        token
    }

    #[test]
    fn an_enrollment_token_of_an_earlier_version_has_one_use() {
        let unused = format!(
            r#"{{"id":"0123456789abcdef","account":"acme","secret":"{}","services":["api"],
                "approval":"auto","created_at":1,"expires_at":2,"used_by":null}}"#,
            "0".repeat(64)
        );
        let open = token(&unused);
        assert_eq!(
            (
                open.uses,
                open.times_used(),
                open.is_used_up(),
                open.ephemeral
            ),
            (1, 0, false, false)
        );
        let used = token(&unused.replace("null", r#""ag_0123456789abcdefghij""#));
        assert_eq!(
            (used.uses, used.times_used(), used.is_used_up()),
            (1, 1, true)
        );
    }
}
