//! The account, order and certificate of the region at an ACME authority.

use gw_base::clock::Timestamp;
use gw_shared::id::CertificateId;
use gw_shared::identity::secret::Secret;
use gw_shared::version::later_members::LaterMembers;
use serde::{Deserialize, Serialize};

use super::{RecordId, RecordKind, Step, StoredRecord};

/// State of the certificates that an ACME authority issues for the region.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AcmeRecord {
    /// Whose certificates these are.
    pub id: CertificateId,
    /// Keys, order and certificate, as JSON of the crate `gw-acme`.
    #[serde(with = "gw_shared::identity::secret::revealed")]
    pub state: Secret,
    /// Failures in a row; `None` after a success.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failures: Option<AcmeFailures>,
    /// Time at which an administrator asked for a new certificate; `None` once it is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renewal_requested: Option<Timestamp>,
    /// The node that orders; `None` if none does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<AcmeLease>,
    /// Members of a later version.
    #[serde(flatten)]
    pub later: LaterMembers,
}

/// Failures in a row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcmeFailures {
    /// Their number.
    pub count: u32,
    /// Time of the last one.
    pub last: Timestamp,
    /// Kind of the last one: `unreachable`, `rate_limited`, `refused` or `proof`.
    pub kind: String,
    /// Seconds that the authority asked to wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_seconds: Option<u64>,
    /// Object, cause and remedy of the last one.
    pub reason: String,
}

/// Right of one node of the region to order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcmeLease {
    /// Slot and session of the node.
    pub holder: String,
    /// End of the lease.
    pub until: Timestamp,
}

impl Step {
    /// Whether the step changes certificates or challenges of an ACME authority.
    pub fn is_of_acme(&self) -> bool {
        matches!(
            self,
            Self::Put(StoredRecord::Acme(_)) | Self::Delete(RecordId::Acme(_))
        )
    }
}

impl RecordKind for AcmeRecord {
    type Id = CertificateId;
    type Index = ();

    const HAS_SECRET: bool = true;

    fn id(&self) -> CertificateId {
        self.id.clone()
    }

    fn secret_mut(&mut self) -> Option<&mut Secret> {
        Some(&mut self.state)
    }

    #[cfg(test)]
    fn sample() -> Self {
        Self {
            id: CertificateId::new("region").unwrap(),
            state: Secret::new("{}".into()),
            failures: Some(AcmeFailures {
                count: 2,
                last: Timestamp(1),
                kind: "refused".into(),
                retry_after_seconds: Some(3),
                reason: "reason".into(),
            }),
            renewal_requested: Some(Timestamp(2)),
            lease: Some(AcmeLease {
                holder: "node".into(),
                until: Timestamp(3),
            }),
            later: LaterMembers::default(),
        }
    }
}
