//! Certificates that an ACME authority issues: their record, and its use by the listeners.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use gw_acme::{Proof, State, tls_alpn};
use gw_base::clock::Timestamp;
use gw_base::page::{Page, PageQuery};
use gw_base::tls::ServerConfigs;
use gw_base::tls::certificate::{Mistakes, Pair};
use gw_interface::config::{Challenge, Config};
use gw_shared::id::{CertificateId, DomainName};
use gw_shared::identity::secret::Secret;
use gw_shared::version::later_members::LaterMembers;
use gw_store::{
    AcmeFailures, AcmeRecord, DomainChallengeKind, DomainRecord, Records, Step, StoredRecord,
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::{Notify, watch};
use utoipa::ToSchema;

use crate::control::{Actor, Control, ControlError, Plan};

/// Part of its lifetime before whose end a certificate needs attention. It is renewed when a third
/// is left.
const ATTENTION_PART: u32 = 6;

/// Use of the certificates of an ACME authority by this process.
pub(crate) struct IssuedCertificates {
    names: Vec<String>,
    directory: String,
    /// Whether challenges for the region are answered in handshakes. Those for own domains always
    /// are.
    answers_challenges: bool,
    used: Mutex<Used>,
    /// Notified when the record has changed.
    changed: Notify,
}

/// The contents of the records that the listeners use.
#[derive(Default)]
struct Used {
    chain: String,
    /// Proofs for names of the region.
    proofs: Vec<Proof>,
    /// Proofs for own domains.
    domains: BTreeMap<DomainName, Proof>,
}

/// A certificate that an ACME authority issues.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Certificate)]
pub struct CertificateView {
    /// `region` for the certificate of the region.
    #[schema(value_type = String)]
    pub id: CertificateId,
    /// Names that it is, or will be, valid for.
    pub names: Vec<String>,
    /// Directory of the authority.
    pub directory: String,
    /// State of the certificate.
    pub status: CertificateStatus,
    /// End of its validity, RFC 3339; absent until there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    pub not_after: Option<String>,
    /// Failed attempts in a row to get the next one.
    pub failures: u32,
    /// Cause of the last failure and what to do; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_failure: Option<String>,
    /// Why the certificate needs attention and what to do; absent if it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention: Option<String>,
}

/// State of a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CertificateStatus {
    /// There is none yet: the gateway answers with a certificate of its development authority.
    Missing,
    /// In use.
    Valid,
    /// In use, and the next one is ordered.
    Renewing,
    /// In use although it has expired.
    Expired,
}

impl IssuedCertificates {
    /// `None` without an authority.
    pub(crate) fn of(config: &Config) -> Option<Self> {
        let acme = config.acme.as_ref()?;
        Some(Self {
            names: acme.settings.names.clone(),
            directory: acme.settings.directory.clone(),
            answers_challenges: matches!(acme.challenge, Some(Challenge::TlsAlpn)),
            used: Mutex::default(),
            changed: Notify::new(),
        })
    }

    /// Whether the authority issues the certificate of the region, and not only those of own
    /// domains.
    fn is_for_region(&self) -> bool {
        !self.names.is_empty()
    }
}

impl Control {
    /// Whether an ACME authority issues certificates.
    pub(crate) fn has_authority(&self) -> bool {
        self.issued.is_some()
    }

    /// Waits until the record of the certificates changes.
    pub(crate) async fn certificates_changed(&self) {
        match &self.issued {
            Some(issued) => issued.changed.notified().await,
            None => std::future::pending().await,
        }
    }

    /// The record of the certificate of the region; a new one if there is none.
    pub(crate) fn acme_record(&self) -> AcmeRecord {
        self.look_at(|records| stored(records).cloned())
            .unwrap_or_else(new_record)
    }

    /// Failed attempts in a row to get the certificate of the region; 0 without an authority.
    pub(crate) fn certificate_failures(&self) -> u32 {
        let record = self.issued.as_ref().map(|_| self.acme_record());
        record
            .and_then(|record| record.failures)
            .map_or(0, |it| it.count)
    }

    /// Uses the certificate and the challenges in `records` from now on. Workers have them before a
    /// change counts as applied.
    pub(crate) fn use_certificates(&self, records: &Records) {
        let (Some(issued), Some(record)) = (&self.issued, stored(records)) else {
            return;
        };
        if let Err(error) = self.try_use_certificates(issued, record) {
            tracing::error!(%error,
                "the stored certificate of the region cannot be used: the one before stays in use");
        }
        issued.changed.notify_one();
    }

    fn try_use_certificates(
        &self,
        issued: &IssuedCertificates,
        record: &AcmeRecord,
    ) -> Result<(), ControlError> {
        let state = parsed(record)?;
        let publish = |configs: &Arc<ServerConfigs>| self.workers.publish_certificates(configs);
        let mut used = issued.used.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(certificate) = &state.certificate
            && certificate.chain != used.chain
        {
            let pair = Pair::from_pem(&certificate.chain, certificate.key.reveal())
                .map_err(|reason| mistake(&reason))?;
            let until = pair.first_validity().map(|(_, end)| end.to_string());
            self.tls.use_issued(pair, publish)?;
            used.chain.clone_from(&certificate.chain);
            tracing::info!(names = %certificate.names.join(", "), until,
                "uses the certificate of the ACME authority");
        }
        let proofs = state.order.map(|order| order.proofs).unwrap_or_default();
        if issued.answers_challenges && proofs != used.proofs {
            used.proofs = proofs;
            self.answer_challenges(&used)?;
        }
        Ok(())
    }

    /// Answers the challenges of the orders of own domains from now on: of those in `changed`, or
    /// of all.
    pub(crate) fn use_domains(&self, records: &Records, changed: Option<&[DomainName]>) {
        if let Some(issued) = &self.issued
            && let Err(error) = self.try_use_domains(issued, records, changed)
        {
            tracing::error!(%error,
                "the challenge of an own domain cannot be answered; its order fails, and is tried \
                 again");
        }
        self.domains_changed.send_replace(());
    }

    fn try_use_domains(
        &self,
        issued: &IssuedCertificates,
        records: &Records,
        changed: Option<&[DomainName]>,
    ) -> Result<(), ControlError> {
        let proof = |record: &DomainRecord| {
            let challenge = record.order.as_ref()?.challenge.as_ref()?;
            let proof = Proof {
                name: record.id.to_string(),
                value: challenge.value.to_string(),
            };
            (challenge.kind == DomainChallengeKind::TlsAlpn).then(|| (record.id.clone(), proof))
        };
        let mut used = issued.used.lock().unwrap_or_else(PoisonError::into_inner);
        let mut domains = used.domains.clone();
        match changed {
            None => domains = records.domains.values().filter_map(proof).collect(),
            Some(changed) => {
                domains.retain(|name, _| !changed.contains(name));
                let changed = changed.iter().filter_map(|name| records.domains.get(name));
                domains.extend(changed.filter_map(proof));
            }
        }
        if domains == used.domains {
            return Ok(());
        }
        used.domains = domains;
        self.answer_challenges(&used)
    }

    fn answer_challenges(&self, used: &Used) -> Result<(), ControlError> {
        let proofs = used.proofs.iter().chain(used.domains.values());
        let proofs: Vec<_> = proofs.cloned().collect();
        let challenge = match proofs.is_empty() {
            true => None,
            false => {
                Some(tls_alpn::server_config(&proofs).map_err(|error| mistake(&error.message))?)
            }
        };
        let publish = |configs: &Arc<ServerConfigs>| self.workers.publish_certificates(configs);
        self.tls.answer_challenges(challenge, publish);
        Ok(())
    }

    /// Tells of changes of own domains.
    pub(crate) fn domains_changed(&self) -> watch::Receiver<()> {
        self.domains_changed.subscribe()
    }

    /// Stores a step of the order of a domain, unless the domain was removed. `update` gets the
    /// record of the region, and changes that of the domain.
    pub(crate) fn store_domain(
        &self,
        name: &DomainName,
        action: &'static str,
        update: impl Fn(&AcmeRecord, &mut DomainRecord, Timestamp) -> Result<(), ControlError>,
    ) -> Result<(), ControlError> {
        self.change(&Actor::Gateway, |records, now| {
            let Some(record) = records.domains.get(name) else {
                return Ok(Plan::already(()));
            };
            let mut record = record.clone();
            let region = stored(records).cloned().unwrap_or_else(new_record);
            update(&region, &mut record, now)?;
            Ok(Plan {
                target: name.to_string(),
                action,
                account: Some(record.account.clone()),
                detail: json!({ "service": record.service }),
                steps: vec![Step::Put(StoredRecord::Domain(record))],
                output: (),
            })
        })
    }

    /// Stores a step of an order. `update` changes the stored record.
    pub(crate) fn store_acme(
        &self,
        action: &'static str,
        update: impl Fn(&mut AcmeRecord) -> Result<(), ControlError>,
    ) -> Result<(), ControlError> {
        let names = self.issued.as_ref().map(|issued| issued.names.join(", "));
        self.change(&Actor::Gateway, |records, _| {
            let mut record = stored(records).cloned().unwrap_or_else(new_record);
            update(&mut record)?;
            Ok(Plan {
                target: record.id.to_string(),
                steps: vec![Step::Put(StoredRecord::Acme(record))],
                action,
                account: None,
                detail: json!({ "names": names }),
                output: (),
            })
        })
    }
}

/// Lists the certificates that an ACME authority issues.
pub fn list(control: &Control, page: &PageQuery) -> Result<Page<CertificateView>, ControlError> {
    let now = Timestamp::now();
    let views: Vec<CertificateView> = match &control.issued {
        Some(issued) if issued.is_for_region() => {
            vec![view(issued, &control.acme_record(), now)?]
        }
        _ => Vec::new(),
    };
    Ok(Page::of(
        views.iter(),
        |view| view.id.as_str(),
        page,
        |view| view.clone(),
    )?)
}

/// Orders a new certificate now, although the one in use is not due.
pub fn renew(control: &Control, actor: &Actor) -> Result<CertificateView, ControlError> {
    let Some(issued) = control.issued.as_ref().filter(|it| it.is_for_region()) else {
        return Err(ControlError::Conflict(
            "no certificate is issued by an ACME authority: set tls = \"acme\" in the \
             configuration and restart"
                .to_owned(),
        ));
    };
    control.change(actor, |records, now| {
        let mut record = stored(records).cloned().unwrap_or_else(new_record);
        record.renewal_requested = Some(now);
        // An administrator knows more than the waits after failures.
        record.failures = None;
        Ok(Plan {
            target: record.id.to_string(),
            output: view(issued, &record, now)?,
            steps: vec![Step::Put(StoredRecord::Acme(record))],
            action: "certificate.renew",
            account: None,
            detail: json!({ "names": issued.names }),
        })
    })
}

fn view(
    issued: &IssuedCertificates,
    record: &AcmeRecord,
    now: Timestamp,
) -> Result<CertificateView, ControlError> {
    let state = parsed(record)?;
    let validity = state.certificate.as_ref().and_then(|certificate| {
        let pair = Pair::from_pem(&certificate.chain, certificate.key.reveal()).ok()?;
        pair.first_validity()
    });
    let end = validity.map(|(_, end)| end);
    let is_asked = record.renewal_requested.is_some();
    let status = match end {
        None => CertificateStatus::Missing,
        Some(end) if end <= now => CertificateStatus::Expired,
        Some(_) if state.order.is_some() || is_asked => CertificateStatus::Renewing,
        Some(_) => CertificateStatus::Valid,
    };
    Ok(CertificateView {
        id: record.id.clone(),
        names: issued.names.clone(),
        directory: issued.directory.clone(),
        status,
        not_after: end.map(|end| end.to_string()),
        failures: record.failures.as_ref().map_or(0, |it| it.count),
        last_failure: record.failures.as_ref().map(|it| it.reason.clone()),
        attention: attention(validity, record.failures.as_ref(), now),
    })
}

/// Why a certificate with this validity needs attention: there is none, its end is near, or its
/// renewal fails.
fn attention(
    validity: Option<(Timestamp, Timestamp)>,
    failures: Option<&AcmeFailures>,
    now: Timestamp,
) -> Option<String> {
    let found = match validity {
        None => Some("there is none yet, and callers see one of the development authority".into()),
        Some((_, end)) if end <= now => Some(format!("expired on {end}")),
        Some((start, end)) if end.since(now) < end.since(start) / ATTENTION_PART => {
            Some(format!("expires on {end}, and should have been renewed"))
        }
        Some(_) => None,
    };
    let failed = failures.map(|failures| match failures.count {
        1 => format!("the last order failed: {}", failures.reason),
        count => format!(
            "the last {count} orders failed, the last one: {}",
            failures.reason
        ),
    });
    match (found, failed) {
        (found, Some(failed)) => Some(
            found
                .into_iter()
                .chain([failed])
                .collect::<Vec<_>>()
                .join("; "),
        ),
        (Some(found), None) => Some(format!(
            "{found}; see the steps of its order in the log, or order another one with `gw-gateway \
             certificate renew`"
        )),
        (None, None) => None,
    }
}

/// The state of the orders in a record.
pub(crate) fn parsed(record: &AcmeRecord) -> Result<State, ControlError> {
    serde_json::from_str(record.state.reveal())
        .map_err(|error| mistake(&format!("its state is not JSON of this version: {error}")))
}

fn mistake(reason: &str) -> ControlError {
    let text = format!(
        "record of the certificate of the region: {reason}; order a new one with `gw-gateway \
         certificate renew`"
    );
    gw_base::tls::TlsError::from(Mistakes(vec![text])).into()
}

fn stored(records: &Records) -> Option<&AcmeRecord> {
    records.acme.get(CertificateId::region().as_str())
}

fn new_record() -> AcmeRecord {
    AcmeRecord {
        id: CertificateId::region(),
        state: Secret::new("{}".to_owned()),
        failures: None,
        renewal_requested: None,
        lease: None,
        later: LaterMembers::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: i64 = 24 * 60 * 60;

    fn failures(count: u32) -> AcmeFailures {
        AcmeFailures {
            count,
            last: Timestamp(0),
            kind: "unreachable".to_owned(),
            retry_after_seconds: None,
            reason: "new order at https://a/dir: away; check it".to_owned(),
        }
    }

    #[test]
    fn a_certificate_needs_attention_in_the_last_sixth_of_any_lifetime() {
        for days in [6, 90] {
            let validity = Some((Timestamp(0), Timestamp(days * DAY)));
            let last_sixth = Timestamp(days * DAY * 5 / 6);
            assert_eq!(attention(validity, None, last_sixth), None);
            let soon = attention(validity, None, Timestamp(last_sixth.0 + 1)).unwrap();
            assert!(soon.starts_with("expires on "), "{soon}");
            let expired = attention(validity, None, Timestamp(days * DAY)).unwrap();
            assert!(expired.starts_with("expired on "), "{expired}");
            assert!(expired.contains("certificate renew"), "{expired}");
        }
        let missing = attention(None, None, Timestamp(0)).unwrap();
        assert!(missing.starts_with("there is none yet"), "{missing}");
    }

    #[test]
    fn a_failure_needs_attention_with_its_cause() {
        let validity = Some((Timestamp(0), Timestamp(90 * DAY)));
        let text = |validity, count| attention(validity, Some(&failures(count)), Timestamp(1));
        assert_eq!(
            text(validity, 1).unwrap(),
            "the last order failed: new order at https://a/dir: away; check it"
        );
        let many = text(None, 7).unwrap();
        assert!(many.starts_with("there is none yet"), "{many}");
        assert!(many.contains("the last 7 orders failed"), "{many}");
        assert!(many.ends_with("away; check it"), "{many}");
    }
}
