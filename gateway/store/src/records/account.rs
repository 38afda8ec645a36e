//! Accounts.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use gw_base::clock::Timestamp;
use gw_shared::id::{AccountId, ManagerName};
use gw_shared::version::later_members::LaterMembers;
use rpds::HashTrieMapSync;
use serde::{Deserialize, Serialize};

use super::{Directory, Indexing, RecordKind};
use crate::limits::{ACCOUNT_DOMAINS, ACCOUNT_DOMAINS_MAX};

/// An account: the owner of services, credentials, service keys and agents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccountRecord {
    /// Id of the account, the first part of the hostnames of its services.
    pub id: AccountId,
    /// The plan of the account includes the capture of bodies.
    #[serde(default)]
    pub capture_allowed: bool,
    /// Own domains that the account may have. Records of earlier versions have the default.
    #[serde(default, skip_serializing_if = "DomainsMax::is_default")]
    pub domains_max: DomainsMax,
    /// Time of creation.
    pub created_at: Timestamp,
    /// The first millisecond after the creation, Unix time; `None` in records of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_ms: Option<u64>,
    /// What manages the record by documents; `None` if nothing does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub managed_by: Option<ManagerName>,
    /// Members of a later version.
    #[serde(flatten)]
    pub later: LaterMembers,
}

/// Number of own domains that an account may have: up to [`ACCOUNT_DOMAINS_MAX`],
/// [`ACCOUNT_DOMAINS`] by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct DomainsMax(u32);

/// A number of own domains that no account may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooManyDomains;

impl fmt::Display for TooManyDomains {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "must be a whole number from 0 to {ACCOUNT_DOMAINS_MAX}")
    }
}

impl std::error::Error for TooManyDomains {}

impl DomainsMax {
    /// Returns the number.
    pub fn get(self) -> u32 {
        self.0
    }

    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl Default for DomainsMax {
    fn default() -> Self {
        Self(ACCOUNT_DOMAINS)
    }
}

impl TryFrom<u32> for DomainsMax {
    type Error = TooManyDomains;

    fn try_from(number: u32) -> Result<Self, TooManyDomains> {
        match number {
            0..=ACCOUNT_DOMAINS_MAX => Ok(Self(number)),
            _ => Err(TooManyDomains),
        }
    }
}

impl FromStr for DomainsMax {
    type Err = TooManyDomains;

    fn from_str(text: &str) -> Result<Self, TooManyDomains> {
        text.parse()
            .map_err(|_| TooManyDomains)
            .and_then(u32::try_into)
    }
}

impl From<DomainsMax> for u32 {
    fn from(number: DomainsMax) -> Self {
        number.0
    }
}

impl fmt::Display for DomainsMax {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl AccountRecord {
    fn index(&self, directory: &mut Directory) {
        let created_ms = self.created_ms.unwrap_or(self.created_at.unix_ms());
        directory.accounts.insert_mut(self.id.clone(), created_ms);
    }
}

impl RecordKind for AccountRecord {
    type Id = AccountId;
    /// Unix time of the creation in milliseconds.
    type Index = HashTrieMapSync<AccountId, u64>;

    fn id(&self) -> AccountId {
        self.id.clone()
    }

    fn put_into(&self, directory: &mut Directory, all: &Indexing<'_>) {
        Self::remove_from(&self.id, directory, all);
        self.index(directory);
    }

    /// Whether bodies may be captured depends on the account.
    fn remove_from(id: &AccountId, directory: &mut Directory, all: &Indexing<'_>) {
        directory.accounts.remove_mut(id);
        for service in all.records.services_of(id) {
            service.put_into(directory, all);
        }
    }

    /// The services follow.
    fn fill(records: &BTreeMap<AccountId, Self>, directory: &mut Directory, _: &Indexing<'_>) {
        records.values().for_each(|record| record.index(directory));
    }

    #[cfg(test)]
    fn sample() -> Self {
        Self {
            id: AccountId::new("acme").unwrap(),
            capture_allowed: true,
            domains_max: DomainsMax(5),
            created_at: Timestamp(1),
            created_ms: Some(1_001),
            managed_by: ManagerName::new("git").ok(),
            later: LaterMembers::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_record_of_an_earlier_version_has_the_default_quota_and_keeps_its_text() {
        let text = json!({ "id": "acme", "capture_allowed": true, "created_at": 1 });
        let read = |text: &serde_json::Value| serde_json::from_value::<AccountRecord>(text.clone());
        let record = read(&text).unwrap();
        assert_eq!(record.domains_max.get(), ACCOUNT_DOMAINS);
        assert_eq!(json!(record), text);
        let mut text = json!(AccountRecord::sample());
        assert_eq!(text["domains_max"], 5);
        text["domains_max"] = (ACCOUNT_DOMAINS_MAX + 1).into();
        let error = read(&text).unwrap_err().to_string();
        assert_eq!(error, "must be a whole number from 0 to 10000");
    }
}
