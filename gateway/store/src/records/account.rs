//! Accounts.

use std::collections::BTreeMap;

use gw_base::clock::Timestamp;
use gw_shared::id::{AccountId, ManagerName};
use gw_shared::version::later_members::LaterMembers;
use serde::{Deserialize, Serialize};

use super::{Directory, Indexing, RecordKind};

/// An account: the owner of services, credentials, service keys and agents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccountRecord {
    /// Id of the account, the first part of the hostnames of its services.
    pub id: AccountId,
    /// The plan of the account includes the capture of bodies.
    #[serde(default)]
    pub capture_allowed: bool,
    /// Time of creation.
    pub created_at: Timestamp,
    /// What manages the record by documents; `None` if nothing does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub managed_by: Option<ManagerName>,
    /// Members of a later version.
    #[serde(flatten)]
    pub later: LaterMembers,
}

impl RecordKind for AccountRecord {
    type Id = AccountId;
    type Index = ();

    fn id(&self) -> AccountId {
        self.id.clone()
    }

    fn put_into(&self, directory: &mut Directory, all: &Indexing<'_>) {
        Self::remove_from(&self.id, directory, all);
    }

    /// Whether bodies may be captured depends on the account.
    fn remove_from(id: &AccountId, directory: &mut Directory, all: &Indexing<'_>) {
        for service in all.records.services_of(id) {
            service.put_into(directory, all);
        }
    }

    /// The services follow.
    fn fill(_: &BTreeMap<AccountId, Self>, _: &mut Directory, _: &Indexing<'_>) {}

    #[cfg(test)]
    fn sample() -> Self {
        Self {
            id: AccountId::new("acme").unwrap(),
            capture_allowed: true,
            created_at: Timestamp(1),
            managed_by: ManagerName::new("git").ok(),
            later: LaterMembers::default(),
        }
    }
}
