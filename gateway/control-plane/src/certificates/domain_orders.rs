//! Orders certificates of own domains: chooses the domains that are due, and runs their orders
//! beside each other.

mod renewal_windows;
mod steps;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use gw_acme::schedule::{Situation, Validity, Window};
use gw_base::clock::Timestamp;
use gw_shared::id::DomainName;
use gw_store::{DomainRecord, Records};
use tokio::time::{Instant, sleep_until};

use self::renewal_windows::{KnownWindow, RenewalWindows};
use self::steps::may_order;
pub(super) use self::steps::{OrdersByProof, Steps};
use super::known_failures;
use super::places::Places;
use crate::limits::{CERTIFICATE_LOOK_EVERY, CERTIFICATE_STORE_RETRY, DOMAIN_ORDERS};

/// Shortest time between two looks at which domains are due.
const LOOK_AFTER: Duration = Duration::from_secs(1);
/// Shortest time between two looks when an order has ended.
const LOOK_AFTER_END: Duration = Duration::from_millis(200);

/// Orders of this process.
pub(super) struct DomainOrders {
    steps: Arc<Steps>,
    places: Places<Ended>,
    /// Times before which no step of a domain is made.
    waits: HashMap<DomainName, Timestamp>,
    windows: RenewalWindows,
}

/// Result of the work for a domain.
enum Ended {
    /// An order makes no step before this time.
    Order(Timestamp),
    /// Renewal information.
    Window(KnownWindow),
}

/// Work for a domain. The order of the variants is that in which it begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    /// The next step of an order that is under way.
    Step,
    /// A new order. The certificate that is served ends at this time; 0 without one.
    Order(i64),
    /// Renewal information.
    Window,
}

impl DomainOrders {
    pub(super) fn new(steps: Steps) -> Self {
        Self {
            steps: Arc::new(steps),
            places: Places::new(DOMAIN_ORDERS),
            waits: HashMap::new(),
            windows: RenewalWindows::new(Timestamp::now()),
        }
    }

    /// Orders certificates until the tasks stop.
    pub(super) async fn run(mut self) {
        let mut changed = self.steps.control().domains_changed();
        loop {
            let wait = self.begin_due().await;
            let looked = Instant::now();
            let mut next = looked + wait;
            while Instant::now() < next {
                tokio::select! {
                    (domain, ended) = self.places.ended() => {
                        self.note(domain, ended);
                        next = next.min(looked + LOOK_AFTER_END);
                    }
                    _ = changed.changed() => next = next.min(looked + LOOK_AFTER),
                    () = sleep_until(next) => {}
                }
            }
        }
    }

    /// Begins the work that is due and has a place, and returns the time until the next look.
    async fn begin_due(&mut self) -> Duration {
        let now = Timestamp::now();
        let control = Arc::clone(self.steps.control());
        if let Err(wait) = self.steps.account(now) {
            return wait.min(CERTIFICATE_LOOK_EVERY);
        }
        let (due, next) = control.look_at(|records| {
            self.waits
                .retain(|name, at| *at > now && records.domains.contains_key(name));
            self.windows.forget_removed(records);
            let (due, next) = self.due(records, now);
            let chosen = self.places.choose(due).into_iter();
            let chosen = chosen.map(|(due, record)| (due, record.clone()));
            (chosen.collect::<Vec<_>>(), next)
        });
        let has_work = !due.is_empty() || !self.places.are_free();
        if has_work && !self.steps.hold_lease(now).await {
            return CERTIFICATE_STORE_RETRY;
        }
        for (due, record) in due {
            let steps = Arc::clone(&self.steps);
            let (domain, account) = (record.id.clone(), record.account.clone());
            match due {
                Due::Step | Due::Order(_) => {
                    let order = steps.run(domain.clone());
                    let order = async move { Ended::Order(order.await) };
                    self.places.begin(domain, account, order);
                }
                Due::Window => {
                    let ask = async move { Ended::Window(steps.ask_window(&record).await) };
                    self.places.begin(domain, account, ask);
                }
            }
        }
        let wait = next.map_or(CERTIFICATE_LOOK_EVERY, |next| next.since(now));
        wait.clamp(LOOK_AFTER, CERTIFICATE_LOOK_EVERY)
    }

    fn note(&mut self, domain: DomainName, ended: Ended) {
        match ended {
            Ended::Order(next) => drop(self.waits.insert(domain, next)),
            Ended::Window(known) => self.windows.note(domain, known),
        }
    }

    /// The domains for which work is due, and the time at which the next one is.
    fn due<'a>(
        &self,
        records: &'a Records,
        now: Timestamp,
    ) -> (Vec<(Due, &'a DomainRecord)>, Option<Timestamp>) {
        let (mut due, mut next) = (Vec::new(), None::<Timestamp>);
        let admission = self.steps.admission();
        let mut admitted = HashMap::new();
        let all = records.domains.values();
        for record in all.filter(|it| may_order(it) && !self.places.has(&it.id)) {
            let wait = self.waits.get(&record.id).copied().unwrap_or(now);
            let mut at = next_attempt(record, self.windows.of(record), now).max(wait);
            let is_begun = record.order.is_some();
            if at <= now && !is_begun {
                let account = &record.account;
                let admitted = admitted.entry(account);
                at = *admitted.or_insert_with(|| admission.next_order(account));
            }
            if at <= now {
                let end = record.certificate.map_or(0, |it| it.not_after.0);
                due.push((if is_begun { Due::Step } else { Due::Order(end) }, record));
            } else if self.windows.is_due(record, now) {
                due.push((Due::Window, record));
            } else {
                next = Some(next.map_or(at, |next| next.min(at)));
            }
        }
        (due, next)
    }
}

/// Time of the next step of a domain's order, or of the next order.
fn next_attempt(record: &DomainRecord, window: Option<Window>, now: Timestamp) -> Timestamp {
    let is_wanted = record.order.is_some() || record.renewal_requested.is_some();
    let certificate = record.certificate.filter(|_| !is_wanted);
    let situation = Situation {
        validity: certificate.map(|it| Validity {
            not_before: it.not_before,
            not_after: it.not_after,
        }),
        window,
        failures: record.failures.as_ref().map(known_failures),
        seed: seed(record),
    };
    situation.next_attempt(now)
}

/// A number that stays the same for a certificate.
fn seed(record: &DomainRecord) -> u64 {
    let end = record.certificate.map_or(0, |it| it.not_after.0);
    let bytes = record.id.as_str().bytes();
    // FNV-1a: the schedule mixes the bits.
    bytes
        .chain(end.to_le_bytes())
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
}

#[cfg(test)]
mod tests {
    use gw_store::{AcmeFailures, DomainCertificate, DomainCertificateSource, DomainOrder};

    use super::*;
    use crate::control::records::domain::tests::record_of;

    const DAY: i64 = 24 * 60 * 60;

    fn failed(kind: &str, last: i64) -> AcmeFailures {
        AcmeFailures {
            count: 1,
            last: Timestamp(last),
            kind: kind.to_owned(),
            retry_after_seconds: None,
            reason: "reason".to_owned(),
        }
    }

    #[test]
    fn a_refused_step_of_an_order_is_not_made_again_at_once() {
        let now = Timestamp(1000);
        let mut record = record_of("acme", "api");
        assert_eq!(next_attempt(&record, None, now), now);
        record.order = Some(DomainOrder {
            began: now,
            challenge: None,
        });
        record.failures = Some(failed("refused", 1000));
        let wait = next_attempt(&record, None, now).0 - now.0;
        assert!((60..70).contains(&wait), "{wait}");
    }

    #[test]
    fn a_request_and_the_authority_renew_a_certificate_early() {
        let now = Timestamp(DAY);
        let certificate = |days: i64| DomainCertificate {
            not_before: Timestamp(0),
            not_after: Timestamp(days * DAY),
            source: DomainCertificateSource::Acme,
        };
        let mut record = record_of("acme", "api");
        record.certificate = Some(certificate(90));
        assert!(next_attempt(&record, None, now) > Timestamp(50 * DAY));
        let window = Window {
            start: Timestamp(0),
            end: Timestamp(10),
        };
        assert!(next_attempt(&record, Some(window), now) <= now);
        record.renewal_requested = Some(now);
        assert_eq!(next_attempt(&record, None, now), now);
        record.failures = Some(failed("rate_limited", now.0));
        assert!(next_attempt(&record, None, now) > now, "the wait counts");
    }

    #[test]
    fn orders_under_way_come_first_and_then_certificates_that_end_soon() {
        let mut all = [Due::Window, Due::Order(5), Due::Step, Due::Order(0)];
        all.sort();
        assert_eq!(all, [Due::Step, Due::Order(0), Due::Order(5), Due::Window]);
    }
}
