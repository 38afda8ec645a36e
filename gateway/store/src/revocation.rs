//! Which changes take access away: those that the reserve of the disk is for.

use std::collections::BTreeSet;
use std::time::Duration;

use gw_shared::id::ServiceId;
use gw_shared::identity::enrollment::EnrollmentStatus;
use gw_shared::identity::secret::SecretHash;

use crate::records::{AuthorityRole, CallerSecretRecord, Records, Step, StoredRecord};

/// A signing key that is used this soon replaces a stolen one. Others are published first.
const AT_ONCE: Duration = Duration::from_secs(60);

impl Records {
    /// Whether `steps`, which follow these records, only take access away: by deletions, by
    /// switching off and revoking, and by replacing secrets and keys at once.
    pub fn are_revoked_by(&self, steps: &[Step]) -> bool {
        let ends = |step: &Step| {
            matches!(
                step,
                Step::Put(StoredRecord::Authority(new)) if new.role == AuthorityRole::Ended
            )
        };
        let is_less = |new: &StoredRecord| {
            let old = self.get(&new.id())?;
            let (new, old) = (access_by(new)?, access_by(&old)?);
            Some(new.0.is_subset(&old.0) && new != old)
        };
        steps.iter().all(|step| match step {
            // The id of a deleted account belongs to its deletion.
            Step::Delete(_) | Step::Put(StoredRecord::DeletedAccount(_)) => true,
            Step::Put(StoredRecord::SigningKey(new)) => {
                new.active_from.since(new.created_at) <= AT_ONCE
            }
            Step::Put(StoredRecord::Authority(_)) => steps.iter().any(ends),
            Step::Put(new) => is_less(new).unwrap_or(false),
        })
    }
}

/// What a record gives access to, and by which secret; `None` if it gives none.
fn access_by(record: &StoredRecord) -> Option<(BTreeSet<&str>, Option<&SecretHash>)> {
    // A record that is off has its services, too: the deletion of one changes it.
    fn if_on(is_on: bool, services: &BTreeSet<ServiceId>) -> BTreeSet<&str> {
        let services = services.iter().map(ServiceId::as_str);
        services.chain(is_on.then_some("--on")).collect()
    }
    const NONE: &BTreeSet<ServiceId> = &BTreeSet::new();
    Some(match record {
        StoredRecord::Account(it) => (if_on(it.capture_allowed, NONE), None),
        StoredRecord::Domain(it) => (if_on(it.state.is_served(), NONE), None),
        StoredRecord::EnrollmentToken(it) => (if_on(true, &it.services), None),
        StoredRecord::Agent(it) => {
            let is_on = it.status != EnrollmentStatus::Revoked;
            (if_on(is_on, &it.services), None)
        }
        StoredRecord::Credential(CallerSecretRecord { access, .. })
        | StoredRecord::ServiceKey(CallerSecretRecord { access, .. }) => {
            let services = if_on(access.enabled, &access.allowed_services);
            (services, Some(&access.secret))
        }
        StoredRecord::Service(it) => {
            let it = &it.settings;
            let switches = [
                ("enabled", it.enabled),
                ("jwt", it.modes.jwt),
                ("service_key", it.modes.service_key),
                ("log", it.request_logging),
                ("requests", it.capture_request_body),
                ("responses", it.capture_response_body),
            ];
            let on = switches.iter().filter(|(_, is_on)| *is_on);
            (on.map(|(name, _)| *name).collect(), None)
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use gw_base::clock::Timestamp;
    use gw_shared::id::AccountId;

    use super::*;
    use crate::records::{
        AccountRecord, AgentRecord, AuthorityRecord, DeletedAccountRecord, DomainRecord,
        DomainState, EnrollmentTokenRecord, RecordId, RecordKind, SecretAccess, ServiceRecord,
        SigningKeyRecord,
    };

    /// Records with one of each kind.
    fn records() -> Records {
        StoredRecord::samples().into_iter().collect()
    }

    /// The steps with which the record of `R` changes as `change` says.
    fn changed<R: RecordKind + Clone>(
        old: &R,
        stored: impl Fn(R) -> StoredRecord,
        change: impl Fn(&mut R),
    ) -> Step {
        let mut new = old.clone();
        change(&mut new);
        Step::Put(stored(new))
    }

    #[test]
    fn every_deletion_takes_access_away_and_every_new_record_but_a_key_at_once_gives_some() {
        let records = records();
        for record in StoredRecord::samples() {
            let id = record.id();
            assert!(records.are_revoked_by(&[Step::Delete(id.clone())]));
            let notes_deletion = matches!(record, StoredRecord::DeletedAccount(_));
            let steps = [Step::Put(record)];
            for records in [&records, &Records::default()] {
                let is_at_once = matches!(
                    &steps[0],
                    Step::Put(StoredRecord::SigningKey(key))
                        if key.active_from <= key.created_at.after(AT_ONCE)
                );
                assert_eq!(
                    records.are_revoked_by(&steps),
                    notes_deletion || is_at_once,
                    "{id:?}"
                );
            }
        }
    }

    #[test]
    fn what_is_switched_off_or_replaced_takes_access_away() {
        let mut records = records();
        let off = |records: &Records, step: Step| records.are_revoked_by(&[step]);
        for service in records.services.values_mut() {
            service.settings.enabled = true;
            service.settings.capture_request_body = true;
            service.settings.capture_response_body = false;
        }
        let service = |change: fn(&mut ServiceRecord)| {
            changed(
                records.services.values().next().unwrap(),
                StoredRecord::Service,
                change,
            )
        };
        assert!(off(&records, service(|it| it.settings.enabled = false)));
        assert!(off(
            &records,
            service(|it| it.settings.capture_request_body = false)
        ));
        assert!(off(
            &records,
            service(|it| {
                it.settings.modes.jwt = false;
                it.settings.retries = !it.settings.retries;
            })
        ));
        assert!(!off(
            &records,
            service(|it| it.settings.retries = !it.settings.retries)
        ));
        assert!(!off(
            &records,
            service(|it| {
                it.settings.enabled = false;
                it.settings.capture_response_body = true;
            })
        ));

        for secret in records.service_keys.values_mut() {
            secret.access.enabled = true;
        }
        let key = |change: fn(&mut SecretAccess)| {
            let old = records.service_keys.values().next().unwrap();
            changed(old, StoredRecord::ServiceKey, |it| change(&mut it.access))
        };
        assert!(off(&records, key(|it| it.enabled = false)));
        assert!(off(&records, key(|it| it.secret = SecretHash::of("new"))));
        assert!(off(
            &records,
            key(|it| drop(it.allowed_services.pop_first()))
        ));
        assert!(off(
            &records,
            key(|it| {
                it.allowed_services.clear();
                it.enabled = false;
            })
        ));
        assert!(!off(&records, key(|it| it.name = None)));
        assert!(!off(
            &records,
            key(|it| {
                it.secret = SecretHash::of("new");
                it.allowed_services.insert("new".parse().unwrap());
            })
        ));
    }

    #[test]
    fn agents_tokens_accounts_and_domains_lose_what_they_had() {
        let mut records = records();
        let off = |records: &Records, step: Step| records.are_revoked_by(&[step]);
        for agent in records.agents.values_mut() {
            agent.status = EnrollmentStatus::Approved;
        }
        let agent = |change: fn(&mut AgentRecord)| {
            changed(
                records.agents.values().next().unwrap(),
                StoredRecord::Agent,
                change,
            )
        };
        assert!(off(
            &records,
            agent(|it| it.status = EnrollmentStatus::Revoked)
        ));
        assert!(off(&records, agent(|it| drop(it.services.pop_last()))));
        assert!(!off(
            &records,
            agent(|it| it.certificate_not_after = Some(Timestamp(9)))
        ));
        assert!(!off(&records, agent(|it| it.absent_since = None)));

        let token = |change: fn(&mut EnrollmentTokenRecord)| {
            let old = records.enrollment_tokens.values().next().unwrap();
            changed(old, StoredRecord::EnrollmentToken, change)
        };
        assert!(off(&records, token(|it| drop(it.services.pop_last()))));
        assert!(!off(&records, token(|it| it.used += 1)));

        for account in records.accounts.values_mut() {
            account.capture_allowed = true;
        }
        for domain in records.domains.values_mut() {
            domain.state = DomainState::Lost;
        }
        let account = |change: fn(&mut AccountRecord)| {
            changed(
                records.accounts.values().next().unwrap(),
                StoredRecord::Account,
                change,
            )
        };
        assert!(off(&records, account(|it| it.capture_allowed = false)));
        assert!(!off(&records, account(|it| it.created_at = Timestamp(9))));
        let domain = |change: fn(&mut DomainRecord)| {
            changed(
                records.domains.values().next().unwrap(),
                StoredRecord::Domain,
                change,
            )
        };
        assert!(off(&records, domain(|it| it.state = DomainState::Disabled)));
        assert!(!off(&records, domain(|it| it.state = DomainState::Active)));
    }

    #[test]
    fn keys_that_are_replaced_at_once_take_access_away() {
        let records = records();
        let signing = |after: u64| {
            let old = records.signing_keys.values().next().unwrap();
            changed(
                old,
                StoredRecord::SigningKey,
                |it: &mut SigningKeyRecord| {
                    it.active_from = it.created_at.after(Duration::from_secs(after));
                },
            )
        };
        assert!(records.are_revoked_by(&[signing(1)]) && !records.are_revoked_by(&[signing(600)]));
        let authority = |role| {
            let old = records.authorities.values().next().unwrap();
            changed(old, StoredRecord::Authority, |it: &mut AuthorityRecord| {
                it.role = role;
            })
        };
        let ended = || authority(AuthorityRole::Ended);
        assert!(records.are_revoked_by(&[ended(), authority(AuthorityRole::Issuing)]));
        let switched = [
            authority(AuthorityRole::Earlier),
            authority(AuthorityRole::Issuing),
        ];
        assert!(!records.are_revoked_by(&switched));
        // A change is for the reserve as a whole, or not at all.
        let account: AccountId = "acme".parse().unwrap();
        let deleted = [
            Step::Delete(RecordId::Account(account.clone())),
            Step::Put(StoredRecord::DeletedAccount(DeletedAccountRecord {
                id: account,
                ..DeletedAccountRecord::sample()
            })),
        ];
        assert!(records.are_revoked_by(&deleted));
        assert!(!records.are_revoked_by(&[&deleted[..], &[signing(600)]].concat()));
    }
}
