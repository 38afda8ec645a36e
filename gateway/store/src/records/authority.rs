//! Authorities of agents and nodes. They reach the workers as TLS configurations.

use gw_base::clock::Timestamp;
use gw_shared::id::AuthorityId;
use gw_shared::identity::secret::Secret;
use gw_shared::version::later_members::LaterMembers;
use serde::{Deserialize, Serialize};

use super::{RecordId, RecordKind, Step, StoredRecord};

/// An authority of agents and nodes. There are none until the authority of the data folder is
/// replaced for the first time; from then on, only these count.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AuthorityRecord {
    /// Key identifier of the certificate, in hexadecimal.
    pub id: AuthorityId,
    /// Role of the authority.
    pub role: AuthorityRole,
    /// PEM.
    pub certificate: String,
    /// PKCS #8, PEM. Present while the authority issues certificates, or will.
    #[serde(with = "gw_shared::identity::secret::revealed_if_present", default)]
    pub private_key: Option<Secret>,
    /// Time of creation.
    pub created_at: Timestamp,
    /// Members of a later version.
    #[serde(flatten)]
    pub later: LaterMembers,
}

/// What an authority is for. Its role changes from top to bottom.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AuthorityRole {
    /// Trusted, and issues nothing until every node trusts it.
    Next,
    /// Issues all certificates.
    Issuing,
    /// Trusted, and issues nothing any more.
    Earlier,
    /// Not trusted any more. Its certificates count as expired, so that their agents ask for
    /// others.
    Ended,
}

impl RecordKind for AuthorityRecord {
    type Id = AuthorityId;
    type Index = ();

    const HAS_SECRET: bool = true;

    fn id(&self) -> AuthorityId {
        self.id.clone()
    }

    fn secret_mut(&mut self) -> Option<&mut Secret> {
        self.private_key.as_mut()
    }

    #[cfg(test)]
    fn sample() -> Self {
        Self {
            id: AuthorityId::new(&"b".repeat(40)).unwrap(),
            role: AuthorityRole::Issuing,
            certificate: "certificate".into(),
            private_key: Some(Secret::new("private".into())),
            created_at: Timestamp(1),
            later: LaterMembers::default(),
        }
    }
}

impl Step {
    /// Whether the step changes the authorities of agents and nodes.
    pub fn is_of_authority(&self) -> bool {
        matches!(
            self,
            Self::Put(StoredRecord::Authority(_)) | Self::Delete(RecordId::Authority(_))
        )
    }
}
