//! Own domains on the page of their service, and those that need attention.

use std::time::Duration;

use gw_base::clock::Timestamp;
use gw_shared::id::{AccountId, ServiceId};
use gw_store::{DomainCertificateSource, DomainRecord, DomainState};

use super::view::{DomainView, view_of};
use crate::control::Control;
use crate::limits::DOMAIN_GRACE;

/// Time before the end of a certificate from which on it needs attention.
const CERTIFICATE_ENDS_WITHIN: Duration = Duration::from_secs(7 * 24 * 3600);

/// The domains of a service, by name.
pub(crate) fn of_service(
    control: &Control,
    account: &AccountId,
    service: &ServiceId,
) -> Vec<DomainView> {
    control.look_at(|records| {
        let domains = records.domains_of(account);
        domains
            .filter(|record| record.service == *service)
            .map(|record| view_of(control, records, record))
            .collect()
    })
}

/// A reason why a domain needs attention, and a remedy. `None` if it needs none.
pub(crate) fn attention(record: &DomainRecord, now: Timestamp) -> Option<(String, String)> {
    let name = &record.id;
    let finding = record.finding.as_deref();
    let finding = finding.map_or_else(String::new, |finding| format!(": {finding}"));
    match record.state {
        DomainState::Lost => {
            let until = record.since.after(DOMAIN_GRACE);
            Some((
                format!("DNS does not prove the own domain {name} any more{finding}"),
                format!(
                    "set its DNS record again before {until}, when it stops being served, or \
                     remove the domain"
                ),
            ))
        }
        DomainState::Disabled => Some((
            format!(
                "the own domain {name} is not served, since DNS has not proved it for {} \
                 days{finding}",
                DOMAIN_GRACE.as_secs() / (24 * 3600)
            ),
            "set its DNS record again and check the domain, or remove it".to_owned(),
        )),
        DomainState::Pending | DomainState::Active => end_of_certificate(record, now),
    }
}

/// A certificate that ends soon or has ended. One of the authority that lives for days only needs
/// attention later: its renewal is due at two thirds of its lifetime.
fn end_of_certificate(record: &DomainRecord, now: Timestamp) -> Option<(String, String)> {
    let certificate = record.certificate?;
    let lifetime = certificate.not_after.since(certificate.not_before);
    let (within, remedy) = match certificate.source {
        DomainCertificateSource::Uploaded => (
            CERTIFICATE_ENDS_WITHIN,
            "upload the next one, or order one of the ACME authority with `gw-gateway certificate \
             renew ACCOUNT DOMAIN`",
        ),
        DomainCertificateSource::Acme => (
            CERTIFICATE_ENDS_WITHIN.min(lifetime / 4),
            "remove the cause of the failed orders; the gateway goes on trying",
        ),
    };
    let (name, until) = (&record.id, certificate.not_after);
    let left = until.since(now);
    if left >= within {
        return None;
    }
    let verb = if left.is_zero() { "ended" } else { "ends" };
    let failure = record.failures.as_ref();
    let failure = failure.map_or_else(String::new, |it| {
        format!(", and its renewal failed: {}", it.reason)
    });
    Some((
        format!("the certificate of the own domain {name} {verb} at {until}{failure}"),
        remedy.to_owned(),
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const DAY: i64 = 24 * 3600;

    fn record(state: &str, certificate: Option<(&str, i64)>) -> DomainRecord {
        let certificate = certificate.map(
            |(source, days)| json!({ "source": source, "not_before": 0, "not_after": days * DAY }),
        );
        let failures =
            json!({ "count": 2, "last": 1, "kind": "refused", "reason": "the authority refused" });
        let record = json!({
            "id": "api.customer.example",
            "account": "acme",
            "service": "api",
            "state": state,
            "since": 0,
            "finding": "it has no CNAME record",
            "certificate": certificate,
            "failures": failures,
            "created_at": 0,
            "material": "{}",
        });
        serde_json::from_value(record).unwrap()
    }

    #[test]
    fn a_domain_without_its_proof_needs_attention() {
        for (state, found, remedy) in [
            (
                "lost",
                "any more: it has no CNAME record",
                "again before 1970-01-08T00:00:00Z",
            ),
            (
                "disabled",
                "not proved it for 7 days: it has",
                "check the domain",
            ),
        ] {
            let attention = attention(&record(state, None), Timestamp(DAY)).unwrap();
            assert!(attention.0.contains(found), "{attention:?}");
            assert!(attention.1.contains(remedy), "{attention:?}");
        }
        for state in ["pending", "active"] {
            assert_eq!(attention(&record(state, None), Timestamp(DAY)), None);
        }
    }

    #[test]
    fn a_certificate_needs_attention_a_week_before_its_end_and_a_short_one_later() {
        for (source, days, now, found) in [
            ("uploaded", 90, 82, None),
            ("uploaded", 90, 84, Some(" ends at ")),
            ("uploaded", 90, 91, Some(" ended at ")),
            (
                "acme",
                90,
                84,
                Some(", and its renewal failed: the authority refused"),
            ),
            ("acme", 6, 4, None),
            ("acme", 6, 5, Some(" ends at ")),
        ] {
            let record = record("active", Some((source, days)));
            let attention = attention(&record, Timestamp(now * DAY));
            let text = attention.map(|(found, _)| found);
            assert_eq!(
                text.is_some(),
                found.is_some(),
                "{source} {days} {now} {text:?}"
            );
            assert!(text.unwrap_or_default().contains(found.unwrap_or_default()));
        }
    }
}
