//! Ids of accounts that were deleted. They are kept, because DNS records of customers may still
//! lead to the hostnames of such an account.

use gw_shared::id::AccountId;
use gw_shared::version::later_members::LaterMembers;
use serde::{Deserialize, Serialize};

use super::RecordKind;

/// The id of an account that was deleted. It stays when an account with this id is created again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeletedAccountRecord {
    /// The id.
    pub id: AccountId,
    /// Number of accounts with this id that were deleted.
    pub deletions: u64,
    /// Members of a later version.
    #[serde(flatten)]
    pub later: LaterMembers,
}

impl RecordKind for DeletedAccountRecord {
    type Id = AccountId;
    type Index = ();

    fn id(&self) -> AccountId {
        self.id.clone()
    }

    #[cfg(test)]
    fn sample() -> Self {
        Self {
            id: AccountId::new("acme").unwrap(),
            deletions: 1,
            later: LaterMembers::default(),
        }
    }
}
