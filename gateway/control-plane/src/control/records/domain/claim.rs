//! Claims to own domains: what is looked up in DNS, and what follows from the answer.

use std::net::SocketAddr;
use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use gw_acme::ownership::{Ownership, look_up};
use gw_base::clock::Timestamp;
use gw_base::service::hostname::Region;
use gw_shared::id::{AccountId, DomainName, ServiceId};
use gw_store::{AccountRecord, DomainRecord, DomainState, Records};

use crate::limits::DOMAIN_GRACE;

/// What DNS says of an account's control over a domain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Finding {
    Proved,
    /// Object, cause and remedy.
    NotProved(String),
    /// DNS did not answer: object, cause and remedy.
    Unknown(String),
}

/// What is looked up to prove that an account controls a domain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) name: DomainName,
    pub(super) account: AccountId,
    pub(super) service: ServiceId,
    /// The service's hostname. `None` if an alias proves nothing: a customer of an earlier account
    /// with the same id may have set it.
    alias_of: Option<String>,
    token: String,
}

impl Claim {
    /// Looks the claim up. Blocks.
    pub(super) fn look_up(&self, servers: &[SocketAddr]) -> Finding {
        let alias_of = self.alias_of.as_deref();
        match look_up(servers, self.name.as_str(), alias_of, &self.token) {
            Ok(Ownership::Cname | Ownership::Txt) => Finding::Proved,
            Ok(Ownership::NotProved(text)) => Finding::NotProved(text),
            Err(error) => Finding::Unknown(error.message),
        }
    }

    /// The claim of a record; `None` without the account or a hostname.
    pub(super) fn of(region: &Region, records: &Records, record: &DomainRecord) -> Option<Self> {
        let account = records.accounts.get(&record.account)?;
        let hostname = region.tenant_hostname(&record.account, &record.service)?;
        Some(Self {
            name: record.id.clone(),
            account: record.account.clone(),
            service: record.service.clone(),
            alias_of: alias_proves(records, account).then_some(hostname),
            token: token(region, records, account),
        })
    }
}

/// Whether a CNAME record to a service of the account proves a domain. It does not if an account
/// with this id was deleted before: the record may be older than this account.
pub(super) fn alias_proves(records: &Records, account: &AccountRecord) -> bool {
    !records.deleted_accounts.contains_key(&account.id)
}

/// Value of the TXT record of an account. An account that is created again with the same id has
/// another one.
pub(super) fn token(region: &Region, records: &Records, account: &AccountRecord) -> String {
    let mut text = format!(
        "own domain\n{}\n{}\n{}",
        region.apex(),
        account.id,
        account.created_at
    );
    if let Some(deleted) = records.deleted_accounts.get(&account.id) {
        text.push_str(&format!("\n{}", deleted.deletions));
    }
    let digest = digest(&SHA256, text.as_bytes());
    format!(
        "gw-{}",
        BASE64_URL_SAFE_NO_PAD.encode(&digest.as_ref()[..24])
    )
}
/// Takes a finding over into the record. Returns whether the record has changed.
pub(super) fn note(record: &mut DomainRecord, finding: &Finding, now: Timestamp) -> bool {
    let (state, text) = match (finding, record.state) {
        (Finding::Proved, _) => (DomainState::Active, None),
        (Finding::NotProved(text), DomainState::Active) => (DomainState::Lost, Some(text)),
        (Finding::NotProved(text), DomainState::Lost)
            if now.since(record.since) >= DOMAIN_GRACE =>
        {
            (DomainState::Disabled, Some(text))
        }
        (Finding::NotProved(text), state) => (state, Some(text)),
        // An answer is missing: what was known still counts.
        (Finding::Unknown(text), DomainState::Pending) => (DomainState::Pending, Some(text)),
        (Finding::Unknown(_), _) => return false,
    };
    if record.state == state && record.finding.as_ref() == text {
        return false;
    }
    if record.state != state {
        record.state = state;
        record.since = now;
    }
    record.finding = text.cloned();
    true
}
/// Time between two looks at DNS for a domain, without a request to look.
pub(crate) fn look_every(record: &DomainRecord, now: Timestamp) -> Duration {
    let hours = |hours: u64| Duration::from_secs(hours * 60 * 60);
    let age = now.since(record.since);
    match record.state {
        DomainState::Active => hours(24),
        DomainState::Lost => hours(1),
        _ if age < hours(1) => Duration::from_secs(20),
        _ if age < hours(24) => Duration::from_secs(5 * 60),
        _ if age < hours(30 * 24) => hours(1),
        _ => hours(24),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gw_shared::identity::secret::Secret;
    use gw_shared::version::later_members::LaterMembers;
    use gw_store::{DeletedAccountRecord, DomainsMax, StoredRecord};

    use super::*;

    const HOUR: i64 = 3600;

    fn record(state: DomainState) -> DomainRecord {
        DomainRecord {
            id: DomainName::new("api.customer.test").unwrap(),
            account: AccountId::new("acme").unwrap(),
            service: ServiceId::new("api").unwrap(),
            state,
            since: Timestamp(0),
            finding: None,
            certificate: None,
            order: None,
            failures: None,
            renewal_requested: None,
            created_at: Timestamp(0),
            managed_by: None,
            material: Arc::new(Secret::new("{}".to_owned())),
            later: LaterMembers::default(),
        }
    }

    fn after(state: DomainState, finding: &Finding, now: i64) -> (DomainState, Timestamp, bool) {
        let mut record = record(state);
        let changed = note(&mut record, finding, Timestamp(now));
        (record.state, record.since, changed)
    }

    #[test]
    fn a_proof_counts_at_once_and_its_loss_after_a_time_of_grace() {
        use DomainState::{Active, Disabled, Lost, Pending};
        let grace = i64::try_from(DOMAIN_GRACE.as_secs()).unwrap();
        let not_proved = Finding::NotProved("nothing".to_owned());
        let unknown = Finding::Unknown("no answer".to_owned());
        let now = 5 * HOUR;
        for state in [Pending, Lost, Disabled] {
            assert_eq!(
                after(state, &Finding::Proved, now),
                (Active, Timestamp(now), true)
            );
        }
        assert_eq!(
            after(Active, &Finding::Proved, now),
            (Active, Timestamp(0), false)
        );
        assert_eq!(
            after(Pending, &not_proved, grace * 2),
            (Pending, Timestamp(0), true)
        );
        assert_eq!(
            after(Active, &not_proved, now),
            (Lost, Timestamp(now), true)
        );
        assert_eq!(
            after(Lost, &not_proved, grace - 1),
            (Lost, Timestamp(0), true)
        );
        assert_eq!(
            after(Lost, &not_proved, grace),
            (Disabled, Timestamp(grace), true)
        );
        assert_eq!(after(Disabled, &not_proved, grace * 2).0, Disabled);
        // A server that does not answer takes nothing away.
        for state in [Active, Lost, Disabled] {
            assert_eq!(
                after(state, &unknown, grace * 2),
                (state, Timestamp(0), false)
            );
        }
        assert_eq!(after(Pending, &unknown, now), (Pending, Timestamp(0), true));
    }

    #[test]
    fn a_finding_is_kept_until_there_is_another() {
        let mut record = record(DomainState::Active);
        let found = Finding::NotProved("nothing".to_owned());
        assert!(note(&mut record, &found, Timestamp(1)));
        assert_eq!(record.finding.as_deref(), Some("nothing"));
        assert!(!note(&mut record, &found, Timestamp(2)), "nothing new");
        assert!(note(&mut record, &Finding::Proved, Timestamp(3)));
        assert_eq!(record.finding, None);
    }

    #[test]
    fn new_domains_are_looked_up_often_and_old_ones_rarely() {
        let every = |state, age: i64| look_every(&record(state), Timestamp(age)).as_secs();
        assert_eq!(every(DomainState::Pending, 60), 20);
        assert_eq!(every(DomainState::Pending, 2 * HOUR), 5 * 60);
        assert_eq!(every(DomainState::Disabled, 48 * HOUR), 3600);
        assert_eq!(every(DomainState::Pending, 60 * 24 * HOUR), 24 * 3600);
        assert_eq!(every(DomainState::Active, 60), 24 * 3600);
        assert_eq!(every(DomainState::Lost, 60), 3600);
    }

    fn account(id: &str, created_at: i64) -> AccountRecord {
        AccountRecord {
            id: AccountId::new(id).unwrap(),
            capture_allowed: false,
            domains_max: DomainsMax::default(),
            created_at: Timestamp(created_at),
            created_ms: None,
            managed_by: None,
            later: LaterMembers::default(),
        }
    }

    fn delete(records: &mut Records, id: &str) {
        let id = AccountId::new(id).unwrap();
        let before = records.deleted_accounts.get(&id);
        let deletions = 1 + before.map_or(0, |it| it.deletions);
        records.put(StoredRecord::DeletedAccount(DeletedAccountRecord {
            id,
            deletions,
            later: LaterMembers::default(),
        }));
    }

    #[test]
    fn a_cname_record_proves_nothing_for_an_account_that_is_created_again() {
        let region = Region::new("eu1", "example.com");
        let mut records = Records::from_iter([StoredRecord::Account(account("acme", 2))]);
        let alias = |records: &Records| {
            let claim = Claim::of(&region, records, &record(DomainState::Active));
            claim.unwrap().alias_of
        };
        let hostname = "acme--api.eu1.example.com".to_owned();
        assert_eq!(alias(&records), Some(hostname.clone()));
        delete(&mut records, "acmf");
        assert_eq!(alias(&records), Some(hostname));
        delete(&mut records, "acme");
        assert_eq!(alias(&records), None);
    }

    #[test]
    fn an_account_that_is_created_again_has_another_token() {
        let region = Region::new("eu1", "example.com");
        let mut records = Records::default();
        let first = token(&region, &records, &account("acme", 1));
        assert_eq!(first.len(), "gw-".len() + 32);
        assert_eq!(first, token(&region, &records, &account("acme", 1)));
        for other in [account("acme", 2), account("acmf", 1)] {
            assert_ne!(first, token(&region, &records, &other));
        }
        let elsewhere = Region::new("eu2", "example.com");
        assert_ne!(first, token(&elsewhere, &records, &account("acme", 1)));
        // Also within the second in which the one before was created.
        let mut seen = vec![first];
        for _ in 0..2 {
            delete(&mut records, "acme");
            let next = token(&region, &records, &account("acme", 1));
            assert!(!seen.contains(&next));
            seen.push(next);
        }
    }
}
