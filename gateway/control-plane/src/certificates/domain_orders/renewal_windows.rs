//! Renewal information (RFC 9773) of the certificates of own domains, in memory. A process that
//! starts asks for all of it again, spread over some hours.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use gw_acme::RenewalInfo;
use gw_acme::schedule::Window;
use gw_base::clock::Timestamp;
use gw_shared::id::DomainName;
use gw_store::{DomainCertificate, DomainCertificateSource, DomainRecord, Records};

use crate::certificates::ASK_AGAIN;

/// Renewal information of a domain's certificate.
pub(super) struct KnownWindow {
    /// End of the certificate for which it counts.
    not_after: Timestamp,
    window: Option<Window>,
    /// Time of the next question.
    ask_at: Timestamp,
    /// Whether the authority offers renewal information at all.
    is_offered: bool,
}

pub(super) struct RenewalWindows {
    known: HashMap<DomainName, KnownWindow>,
    began: Timestamp,
    /// Time before which an authority that offers no renewal information is not asked.
    not_offered_until: Timestamp,
    spread: RandomState,
}

impl KnownWindow {
    /// The authority's answer about a certificate. `None` if there was none.
    pub(super) fn new(
        certificate: Option<DomainCertificate>,
        answer: Option<RenewalInfo>,
        now: Timestamp,
    ) -> Self {
        let (window, ask_again) = match &answer {
            Some(RenewalInfo::Window { window, ask_again }) => (Some(*window), *ask_again),
            Some(RenewalInfo::NotOffered) | None => (None, ASK_AGAIN),
        };
        Self {
            not_after: certificate.map_or(Timestamp(0), |it| it.not_after),
            window,
            ask_at: now.after(ask_again),
            is_offered: !matches!(answer, Some(RenewalInfo::NotOffered)),
        }
    }
}

impl RenewalWindows {
    pub(super) fn new(began: Timestamp) -> Self {
        Self {
            known: HashMap::new(),
            began,
            not_offered_until: Timestamp(0),
            spread: RandomState::new(),
        }
    }

    /// The window for the certificate of the domain.
    pub(super) fn of(&self, record: &DomainRecord) -> Option<Window> {
        self.known(record)?.window
    }

    /// Whether the authority is to be asked about the certificate of the domain.
    pub(super) fn is_due(&self, record: &DomainRecord, now: Timestamp) -> bool {
        let is_issued = record
            .certificate
            .is_some_and(|it| it.source == DomainCertificateSource::Acme);
        if !is_issued || self.not_offered_until > now {
            return false;
        }
        let at = match self.known(record) {
            Some(known) => known.ask_at,
            None => {
                let part = self.spread.hash_one(&record.id) % ASK_AGAIN.as_secs();
                self.began.after(Duration::from_secs(part))
            }
        };
        at <= now
    }

    /// Takes an answer over. Without one, the window before stays.
    pub(super) fn note(&mut self, domain: DomainName, mut known: KnownWindow) {
        let before = self.known.get(&domain);
        let before = before.filter(|it| it.not_after == known.not_after);
        known.window = known.window.or_else(|| before?.window);
        if known.is_offered {
            self.known.insert(domain, known);
        } else {
            self.not_offered_until = known.ask_at;
        }
    }

    pub(super) fn forget_removed(&mut self, records: &Records) {
        self.known
            .retain(|domain, _| records.domains.contains_key(domain));
    }

    fn known(&self, record: &DomainRecord) -> Option<&KnownWindow> {
        let certificate = record.certificate?;
        let known = self.known.get(&record.id)?;
        (known.not_after == certificate.not_after).then_some(known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::records::domain::tests::record_of;

    fn certified(not_after: i64) -> DomainRecord {
        let mut record = record_of("acme", "api");
        record.certificate = Some(DomainCertificate {
            not_before: Timestamp(0),
            not_after: Timestamp(not_after),
            source: DomainCertificateSource::Acme,
        });
        record
    }

    #[test]
    fn an_answer_counts_for_its_certificate_and_until_the_next_question() {
        let record = certified(1000);
        let mut windows = RenewalWindows::new(Timestamp(0));
        let first = Timestamp(0).after(ASK_AGAIN);
        assert!(
            windows.is_due(&record, first),
            "asked within this time of a start"
        );
        let window = Window {
            start: Timestamp(5),
            end: Timestamp(6),
        };
        let answer = RenewalInfo::Window {
            window,
            ask_again: Duration::from_secs(60),
        };
        let known = KnownWindow::new(record.certificate, Some(answer), first);
        windows.note(record.id.clone(), known);
        assert_eq!(windows.of(&record), Some(window));
        assert!(!windows.is_due(&record, Timestamp(first.0 + 59)));
        let next = Timestamp(first.0 + 60);
        assert!(windows.is_due(&record, next));
        let unanswered = KnownWindow::new(record.certificate, None, next);
        windows.note(record.id.clone(), unanswered);
        assert_eq!(windows.of(&record), Some(window));
        assert!(!windows.is_due(&record, next));
        let renewed = certified(2000);
        assert_eq!(windows.of(&renewed), None);
        assert!(windows.is_due(&renewed, first));
    }

    #[test]
    fn an_authority_without_renewal_information_is_asked_rarely() {
        let record = certified(1000);
        let mut windows = RenewalWindows::new(Timestamp(0));
        let first = Timestamp(0).after(ASK_AGAIN);
        let answer = Some(RenewalInfo::NotOffered);
        let known = KnownWindow::new(record.certificate, answer, first);
        windows.note(record.id.clone(), known);
        let later = first.after(ASK_AGAIN);
        assert!(!windows.is_due(&record, Timestamp(later.0 - 1)));
        assert!(windows.is_due(&record, later));
    }

    #[test]
    fn uploaded_certificates_and_missing_ones_have_no_window() {
        let mut record = certified(1000);
        let windows = RenewalWindows::new(Timestamp(0));
        let later = Timestamp(0).after(ASK_AGAIN);
        record.certificate = record.certificate.map(|it| DomainCertificate {
            source: DomainCertificateSource::Uploaded,
            ..it
        });
        assert!(!windows.is_due(&record, later));
        record.certificate = None;
        assert!(!windows.is_due(&record, later));
    }
}
