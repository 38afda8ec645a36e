//! Own domains: names of customers that lead to their services.

mod certificate;
mod claim;
mod label;
mod listed;
mod view;

use std::sync::Arc;

use gw_base::clock::Timestamp;
use gw_base::page::{Page, PageQuery};
use gw_base::service::hostname::Region;
use gw_shared::id::{AccountId, DomainName, ServiceId};
use gw_shared::identity::secret::Secret;
use gw_shared::version::later_members::LaterMembers;
use gw_store::{DomainMaterial, DomainRecord, DomainState, RecordId, Records, Step, StoredRecord};
use serde_json::json;

pub use self::certificate::{renew, upload};
pub(crate) use self::claim::look_every;
use self::claim::{Claim, Finding, note};
pub use self::label::{DomainChanges, change};
pub(crate) use self::listed::{attention, of_service};
use self::view::view_of;
pub use self::view::{
    DnsRecordView, DomainCertificateView, DomainView, NewDomain, NewDomainCertificate,
};
use super::account;
use super::name::manager_after;
use super::service;
use crate::control::{Actor, Control, ControlError, Plan};
use crate::limits::DOMAINS_PER_SERVICE;

/// Looks DNS up, and adds a domain to a service; the flag says whether it is new there. A domain
/// that another service has moves if DNS proves the new claim, and not that of the holder. Blocks.
pub fn add(
    control: &Control,
    actor: &Actor,
    account: &str,
    service: &str,
    new: &NewDomain,
) -> Result<(DomainView, bool), ControlError> {
    let name = checked_name(&control.region, &new.name)?;
    let (claim, holder) = control.look_at(|records| {
        let service = service::find(records, account, service)?;
        let record = new_record(&name, &service.account, &service.id, Timestamp::now());
        let holder = records.domains.get(&name);
        let holder = holder.and_then(|it| Claim::of(&control.region, records, it));
        Ok::<_, ControlError>((Claim::of(&control.region, records, &record), holder))
    })?;
    let Some(claim) = claim else {
        let message = format!("service {account}--{service} has no hostname; use a shorter id");
        return Err(ControlError::Conflict(message));
    };
    let finding = claim.look_up(&control.dns_servers);
    let holder = holder.filter(|it| *it != claim).map(|holder| {
        let finding = holder.look_up(&control.dns_servers);
        (holder, finding)
    });
    let managed_by = new.managed_by.as_deref();
    add_claim(
        control,
        actor,
        (&claim, &finding),
        holder.as_ref(),
        managed_by,
    )
}

fn add_claim(
    control: &Control,
    actor: &Actor,
    (claim, finding): (&Claim, &Finding),
    holder: Option<&(Claim, Finding)>,
    managed_by: Option<&str>,
) -> Result<(DomainView, bool), ControlError> {
    let Claim {
        name,
        account,
        service,
        ..
    } = claim;
    let removed = control.state().removed_failures.get(name).cloned();
    control.change(actor, |records, now| {
        let service = service::find(records, account.as_str(), service.as_str())?;
        let existing = records.domains.get(name);
        let is_same =
            |it: &&DomainRecord| it.account == service.account && it.service == service.id;
        if let Some(existing) = existing.filter(is_same) {
            let before = existing.managed_by.as_ref();
            let after = manager_after(managed_by, before)?;
            if after != existing.managed_by {
                let message =
                    format!("domain {name} exists with another managed_by; change it instead");
                return Err(ControlError::Conflict(message));
            }
            return Ok(Plan::already((view_of(control, records, existing), false)));
        }
        if let Some(existing) = existing {
            check_move(existing, claim, finding, holder)?;
        }
        check_quota(records, name, &service.account, &service.id)?;
        let mut record = match existing.filter(|it| it.account == service.account) {
            // The certificate goes along within the account.
            Some(existing) => DomainRecord {
                service: service.id.clone(),
                ..existing.clone()
            },
            // The authority counts failures by name, whatever account has it.
            None => DomainRecord {
                failures: existing.map_or_else(|| removed.clone(), |it| it.failures.clone()),
                ..new_record(name, &service.account, &service.id, now)
            },
        };
        record.managed_by = manager_after(managed_by, record.managed_by.as_ref())?;
        note(&mut record, finding, now);
        let view = view_of(control, records, &record);
        Ok(Plan {
            action: "domain.add",
            account: Some(service.account.clone()),
            target: name.to_string(),
            detail: json!({ "service": service.id, "status": record.state }),
            output: (view, true),
            steps: vec![Step::Put(StoredRecord::Domain(record))],
        })
    })
}

/// Checks that a domain may go from `existing` to `claim`, of which DNS says `finding`.
fn check_move(
    existing: &DomainRecord,
    claim: &Claim,
    finding: &Finding,
    holder: Option<&(Claim, Finding)>,
) -> Result<(), ControlError> {
    let name = &claim.name;
    let refused = |text: String| Err(ControlError::Conflict(format!("domain {name}: {text}")));
    match finding {
        Finding::Proved => {}
        Finding::NotProved(text) | Finding::Unknown(text) => {
            return refused(format!(
                "another service has it, so a proof is needed before it can move: {text}"
            ));
        }
    }
    // The account may decide about its own domains; the TXT record proves them for all its
    // services.
    if existing.account == claim.account {
        return Ok(());
    }
    let seen = holder.filter(|(claim, _)| {
        claim.account == existing.account && claim.service == existing.service
    });
    match seen {
        Some((_, Finding::NotProved(_))) => Ok(()),
        Some((_, Finding::Unknown(text))) => refused(format!(
            "another service has it, and DNS does not say whether it still may: {text}"
        )),
        Some((_, Finding::Proved)) => refused(
            "DNS still proves it for another service, too; remove that record from DNS, or the \
             domain from that service, and add it again"
                .to_owned(),
        ),
        None => refused("it has changed meanwhile; add it again".to_owned()),
    }
}

/// Checks that the service and its account may have a domain with this name, which is new there or
/// leaves another service.
fn check_quota(
    records: &Records,
    name: &DomainName,
    account: &AccountId,
    service: &ServiceId,
) -> Result<(), ControlError> {
    let (mut of_account, mut of_service) = (0, 0);
    let others = records.domains_of(account);
    for record in others.filter(|record| record.id != *name) {
        of_account += 1;
        of_service += usize::from(record.service == *service);
    }
    let account_max = account::find(records, account.as_str())?.domains_max.get();
    let refused = |object: &str, count: usize, most: usize, remedy: &str| {
        Err(ControlError::Conflict(format!(
            "{object} has {count} domains, and may have {most}; remove one with `gw-gateway domain \
             remove`{remedy}"
        )))
    };
    if of_service >= DOMAINS_PER_SERVICE {
        let object = format!("service {service}");
        return refused(&object, of_service, DOMAINS_PER_SERVICE, "");
    }
    if of_account >= account_max as usize {
        let object = format!("account {account}");
        let remedy = format!(
            ", or raise its `domains_max`: `gw-gateway account change {account} --domains-max N`"
        );
        return refused(&object, of_account, account_max as usize, &remedy);
    }
    Ok(())
}

fn new_record(
    name: &DomainName,
    account: &AccountId,
    service: &ServiceId,
    now: Timestamp,
) -> DomainRecord {
    DomainRecord {
        id: name.clone(),
        account: account.clone(),
        service: service.clone(),
        state: DomainState::Pending,
        since: now,
        finding: None,
        certificate: None,
        order: None,
        failures: None,
        renewal_requested: None,
        created_at: now,
        managed_by: None,
        material: Arc::new(Secret::new("{}".to_owned())),
        later: LaterMembers::default(),
    }
}

/// Checks that a name can be an own domain.
fn checked_name(region: &Region, name: &str) -> Result<DomainName, ControlError> {
    let name = DomainName::new(name).map_err(ControlError::bad_id("name"))?;
    let apex = region.apex();
    let below = name.as_str().strip_suffix(apex);
    if below.is_some_and(|rest| rest.is_empty() || rest.ends_with('.')) {
        let message =
            format!("{name} is a name of the region {apex}; use a domain of the customer");
        return Err(ControlError::invalid("name", message));
    }
    Ok(name)
}
/// Lists the domains of an account, page by page.
pub fn list(
    control: &Control,
    account: &str,
    query: &PageQuery,
) -> Result<Page<DomainView>, ControlError> {
    let state = control.state();
    let account = &account::find(&state.records, account)?.id;
    Ok(Page::of(
        state.records.domains_of(account),
        |record| record.id.as_str(),
        query,
        |record| view_of(control, &state.records, record),
    )?)
}

/// Returns a domain of the account. Fails with [`ControlError::NotFound`] if it does not exist.
pub fn show(control: &Control, account: &str, name: &str) -> Result<DomainView, ControlError> {
    control.look_at(|records| find(records, account, name).map(|it| view_of(control, records, it)))
}

/// Looks DNS up for a domain of the account, and takes over what it says. Blocks.
pub fn check(
    control: &Control,
    actor: &Actor,
    account: &str,
    name: &str,
) -> Result<DomainView, ControlError> {
    let claim = control.look_at(|records| {
        let record = find(records, account, name)?;
        Claim::of(&control.region, records, record).ok_or_else(|| missing(account, name))
    })?;
    let finding = claim.look_up(&control.dns_servers);
    take_over(control, actor, &claim, &finding)
}

/// Looks the claim of a stored domain up, and takes over what DNS says. Returns whether DNS proves
/// it. Blocks.
pub(crate) fn look(control: &Control, name: &DomainName) -> Result<bool, ControlError> {
    let claim =
        control.look_at(|records| Claim::of(&control.region, records, records.domains.get(name)?));
    let Some(claim) = claim else {
        return Ok(false);
    };
    let finding = claim.look_up(&control.dns_servers);
    take_over(control, &Actor::Gateway, &claim, &finding)?;
    Ok(finding == Finding::Proved)
}

/// Takes over what DNS says of a claim.
fn take_over(
    control: &Control,
    actor: &Actor,
    claim: &Claim,
    finding: &Finding,
) -> Result<DomainView, ControlError> {
    control.change(actor, |records, now| {
        let record = find(records, claim.account.as_str(), claim.name.as_str())?;
        let mut changed = record.clone();
        // A domain that has moved to another service meanwhile has another claim.
        let mut is_new = record.service == claim.service && note(&mut changed, finding, now);
        if is_new
            && let (Some(text), Ok(mut findings)) = (&changed.finding, control.findings.lock())
        {
            findings.retain(|name, _| records.domains.contains_key(name));
            findings.insert(changed.id.clone(), text.clone());
        }
        // A DNS server can answer with another text at each look: that alone is not stored.
        let is_asked_for = *actor != Actor::Gateway;
        is_new &= is_asked_for || changed.state != record.state;
        if is_asked_for && let Some(failures) = &mut changed.failures {
            // An administrator knows more than the waits after failures.
            failures.last = Timestamp(0);
            is_new = true;
        }
        if !is_new {
            return Ok(Plan::already(view_of(control, records, record)));
        }
        if changed.state != record.state {
            tracing::info!(
                domain = %record.id,
                from = ?record.state,
                to = ?changed.state,
                finding = changed.finding,
                "the proof of an own domain has changed"
            );
        }
        Ok(Plan {
            action: "domain.check",
            account: Some(changed.account.clone()),
            target: changed.id.to_string(),
            detail: json!({ "status": changed.state, "finding": changed.finding }),
            output: view_of(control, records, &changed),
            steps: vec![Step::Put(StoredRecord::Domain(changed))],
        })
    })
}

/// Removes a domain from its service.
pub fn remove(
    control: &Control,
    actor: &Actor,
    account: &str,
    name: &str,
) -> Result<(), ControlError> {
    control.change(actor, |records, _| {
        let record = find(records, account, name)?;
        Ok(Plan {
            action: "domain.remove",
            account: Some(record.account.clone()),
            target: record.id.to_string(),
            detail: json!({ "service": record.service }),
            output: (),
            steps: vec![Step::Delete(RecordId::Domain(record.id.clone()))],
        })
    })
}

/// The material of a record, as it is stored.
pub(crate) fn sealed(material: &DomainMaterial) -> Result<Secret, ControlError> {
    serde_json::to_string(material)
        .map(Secret::new)
        .map_err(|error| ControlError::Conflict(format!("certificate: not JSON: {error}")))
}

fn find<'a>(
    records: &'a Records,
    account: &str,
    name: &str,
) -> Result<&'a DomainRecord, ControlError> {
    let account = &account::find(records, account)?.id;
    let found = records.domains.get(name);
    found
        .filter(|record| record.account == *account)
        .ok_or_else(|| missing(account.as_str(), name))
}

fn missing(account: &str, name: &str) -> ControlError {
    ControlError::NotFound {
        kind: "domain",
        id: format!("{name} of account {account}"),
        remedy: format!("; `gw-gateway domain list {account}` lists them"),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeSet;
    use std::net::SocketAddr;

    use gw_bed::dns::{self, Answer};
    use gw_store::{AccountRecord, AuditQuery, DomainsMax};

    use super::*;
    use crate::control::changes::audit;
    use crate::control::tests::TemporaryControl;

    fn record(service: &str) -> DomainRecord {
        record_of("acme", service)
    }

    pub(crate) fn record_of(account: &str, service: &str) -> DomainRecord {
        let account = AccountId::new(account).unwrap();
        let name = DomainName::new("api.customer.test").unwrap();
        new_record(
            &name,
            &account,
            &ServiceId::new(service).unwrap(),
            Timestamp(0),
        )
    }

    fn claim(account: &str, service: &str) -> Claim {
        let record = record_of(account, service);
        let account = AccountRecord {
            id: record.account.clone(),
            capture_allowed: false,
            domains_max: DomainsMax::default(),
            created_at: Timestamp(0),
            created_ms: None,
            managed_by: None,
            later: LaterMembers::default(),
        };
        let records = Records::from_iter([StoredRecord::Account(account)]);
        Claim::of(&Region::new("eu1", "example.com"), &records, &record).unwrap()
    }

    #[test]
    fn a_domain_moves_with_a_proof_and_without_one_of_its_holder() {
        let (rival, own) = (claim("rival", "api"), claim("acme", "web"));
        let not_proved = || Finding::NotProved("no record".to_owned());
        let unknown = || Finding::Unknown("no answer".to_owned());
        let refusal = |finding: &Finding, holder: Option<(Claim, Finding)>| {
            let checked = check_move(&record("api"), &rival, finding, holder.as_ref());
            checked.err().map(|error| error.to_string())
        };
        let holder = |finding: Finding| Some((claim("acme", "api"), finding));
        assert_eq!(refusal(&Finding::Proved, holder(not_proved())), None);
        // Within the account, a TXT record proves the claim of the holder, too.
        let both = holder(Finding::Proved);
        assert!(check_move(&record("api"), &own, &Finding::Proved, both.as_ref()).is_ok());
        assert!(check_move(&record("api"), &own, &not_proved(), both.as_ref()).is_err());
        for (finding, holder, cause) in [
            (not_proved(), holder(not_proved()), "a proof is needed"),
            (unknown(), holder(not_proved()), "a proof is needed"),
            (Finding::Proved, holder(Finding::Proved), "still proves it"),
            (Finding::Proved, holder(unknown()), "DNS does not say"),
            (Finding::Proved, None, "changed meanwhile"),
            (
                Finding::Proved,
                Some((claim("acme", "other"), not_proved())),
                "changed meanwhile",
            ),
        ] {
            let refused = refusal(&finding, holder).unwrap();
            assert!(refused.contains(cause), "{refused}");
        }
    }

    #[test]
    fn a_move_within_the_account_needs_no_more_of_its_quota() {
        let account = AccountRecord {
            id: AccountId::new("acme").unwrap(),
            capture_allowed: false,
            domains_max: DomainsMax::try_from(1).unwrap(),
            created_at: Timestamp(0),
            created_ms: None,
            managed_by: None,
            later: LaterMembers::default(),
        };
        let records = Records::from_iter([
            StoredRecord::Account(account),
            StoredRecord::Domain(record("api")),
        ]);
        let account = AccountId::new("acme").unwrap();
        let check = |name: &str| {
            let name = DomainName::new(name).unwrap();
            let checked = check_quota(&records, &name, &account, &ServiceId::new("web").unwrap());
            checked.err().map(|error| error.to_string())
        };
        assert_eq!(check("api.customer.test"), None);
        let refused = check("shop.customer.test").unwrap();
        let expected = "account acme has 1 domains, and may have 1; remove one with `gw-gateway \
                        domain remove`, or raise its `domains_max`: `gw-gateway account change \
                        acme --domains-max N`";
        assert_eq!(refused, expected);
    }

    #[test]
    fn a_served_domain_without_a_certificate_tells_that_no_authority_issues_one() {
        let control = TemporaryControl::start(|_| {});
        for (state, failure) in [
            (DomainState::Pending, None),
            (DomainState::Active, Some(view::NO_AUTHORITY)),
        ] {
            let record = DomainRecord {
                state,
                ..record("api")
            };
            let view = view_of(&control, &control.records(), &record);
            assert_eq!(view.last_failure.as_deref(), failure, "{state:?}");
        }
    }

    #[test]
    fn names_of_the_region_are_refused() {
        let region = Region::new("eu1", "example.com");
        for good in [
            "api.customer.test",
            "example.com",
            "xeu1.example.com",
            "xn--bcher-kva.example",
        ] {
            assert!(checked_name(&region, good).is_ok(), "{good}");
        }
        for bad in [
            "eu1.example.com",
            "acme--api.eu1.example.com",
            "a.b.eu1.example.com",
            "*.a.test",
            "A.test",
            "1.2.3.4",
            "test",
        ] {
            assert!(checked_name(&region, bad).is_err(), "{bad}");
        }
    }

    /// Starts a server that answers questions about TXT records with another text each time, and
    /// every third one with a failure. Other questions get no record. Returns its address.
    fn changing_dns() -> SocketAddr {
        let mut asked = 0;
        dns::serve(move |_, kind| {
            if kind != dns::TXT {
                return Answer::Nothing;
            }
            asked += 1;
            match asked % 3 {
                0 => Answer::Error(dns::SERVER_FAILURE),
                _ => Answer::Record {
                    kind,
                    data: dns::character_string(&format!("text {asked}")),
                },
            }
        })
    }

    #[test]
    fn a_dns_server_that_answers_with_another_text_at_each_look_makes_no_change() {
        const NAME: &str = "api.customer.test";
        const LOOKS: usize = 30;
        let dns = changing_dns();
        let control = TemporaryControl::start(|config| config.dns_servers = vec![dns]);
        let new = NewDomain {
            name: NAME.to_owned(),
            managed_by: None,
        };
        let (added, _) = add(&control, &Actor::Admin, "acme", "api", &new).unwrap();
        assert_eq!(added.status, DomainState::Pending);
        // The number of the newest change.
        let newest = || {
            let query = AuditQuery {
                account: None,
                before: None,
                limit: 1,
            };
            audit::list(&control, &query).unwrap().items[0].number
        };

        let before = newest();
        let findings: BTreeSet<_> = (0..LOOKS)
            .map(|_| {
                check(&control, &Actor::Gateway, "acme", NAME).unwrap();
                show(&control, "acme", NAME).unwrap().finding
            })
            .collect();
        assert_eq!(newest(), before);
        // The latest one is shown all the same.
        assert!(findings.len() > LOOKS / 2, "{findings:?}");

        // The look of an administrator is a change.
        check(&control, &Actor::Admin, "acme", NAME).unwrap();
        assert_eq!(newest(), before + 1);
    }
}
