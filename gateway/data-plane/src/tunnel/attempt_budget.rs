//! Bound on further attempts: which failed attempts may be followed by another one, and how many of
//! a service's requests, as the retry budgets of Finagle and linkerd. No I/O, no clock.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// Agents that a request is sent to, at most.
const AGENTS_MAX: u32 = 3;
/// Attempts that a backend may have received, at most.
const MAYBE_SENT_MAX: u32 = 2;

/// Seconds for which requests and attempts count.
const MEMORY_SECONDS: usize = 10;
/// Cost of a further attempt, in deposits of one request: one further attempt for each five
/// requests.
const ATTEMPT_COST: i64 = 5;
/// Further attempts per second that need no deposits.
const RESERVE_PER_SECOND: i64 = 10;
const RESERVE: i64 = RESERVE_PER_SECOND * MEMORY_SECONDS as i64 * ATTEMPT_COST;

/// Budget of one service for further attempts. Bounds the load that they add when all agents fail.
///
/// A ring of ten buckets of one second: deposits and attempts of a second are forgotten ten seconds
/// later. Within these seconds, attempts are at most a fifth of the requests and the reserve.
#[derive(Debug)]
pub(crate) struct AttemptBudget {
    start: Instant,
    /// Second of the last call, since `start`.
    second: u64,
    /// Deposits less costs of each second.
    buckets: [i64; MEMORY_SECONDS],
    /// Sum of the buckets.
    balance: i64,
}

impl AttemptBudget {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            start: now,
            second: 0,
            buckets: [0; MEMORY_SECONDS],
            balance: 0,
        }
    }

    /// Deposits for a request. Called once for each request, not for its further attempts.
    pub(crate) fn request(&mut self, now: Instant) {
        self.add(1, now);
    }

    /// Whether everything is forgotten.
    pub(crate) fn is_idle(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.start).as_secs() >= self.second + MEMORY_SECONDS as u64
    }

    /// Takes one further attempt, if the budget has one.
    pub(crate) fn try_take(&mut self, now: Instant) -> bool {
        self.forget(now);
        let has_one = self.balance + RESERVE >= ATTEMPT_COST;
        if has_one {
            self.add(-ATTEMPT_COST, now);
        }
        has_one
    }

    fn add(&mut self, amount: i64, now: Instant) {
        self.forget(now);
        self.buckets[(self.second % MEMORY_SECONDS as u64) as usize] += amount;
        self.balance += amount;
    }

    /// Empties the buckets of seconds that are no longer remembered.
    fn forget(&mut self, now: Instant) {
        let second = now.saturating_duration_since(self.start).as_secs();
        if second <= self.second {
            return;
        }
        // After a long pause the whole ring is emptied, once.
        let passed = (second - self.second).min(MEMORY_SECONDS as u64);
        for expired in second + 1 - passed..=second {
            let bucket = &mut self.buckets[(expired % MEMORY_SECONDS as u64) as usize];
            self.balance -= std::mem::take(bucket);
        }
        self.second = second;
    }
}

/// What provably happened to the request of a failed attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transmission {
    /// No byte of it reached a backend, or no backend processed any of it.
    NeverSent,
    /// A backend may have processed it.
    MaybeSent,
    /// A backend's answer was, at least in part, passed on.
    Answered,
}

impl Transmission {
    /// Transmission of an attempt. `is_unsent`: no stream was opened for it, or its refusal says
    /// that no backend processed any of the request. `is_passed_on`: something of a response was
    /// passed to the caller.
    pub(crate) fn of(is_unsent: bool, is_passed_on: bool) -> Self {
        match (is_passed_on, is_unsent) {
            (true, _) => Self::Answered,
            (false, true) => Self::NeverSent,
            (false, false) => Self::MaybeSent,
        }
    }
}

/// Budgets of services that this worker has no tunnels of: their requests go to another node.
#[derive(Default)]
pub(crate) struct AttemptBudgets {
    by_service: HashMap<Arc<str>, AttemptBudget>,
    /// Number of entries at which idle ones are removed.
    removed_at: usize,
}

impl AttemptBudgets {
    /// As [`AttemptBudget::request`], for the service with this label.
    pub(crate) fn request(&mut self, label: &Arc<str>, now: Instant) {
        const LEAST: usize = 64;
        if let Some(budget) = self.by_service.get_mut(label) {
            return budget.request(now);
        }
        if self.by_service.len() >= self.removed_at {
            self.by_service.retain(|_, budget| !budget.is_idle(now));
            self.removed_at = LEAST.max(2 * self.by_service.len());
        }
        self.by_service
            .entry(Arc::clone(label))
            .or_insert_with(|| AttemptBudget::new(now))
            .request(now);
    }

    /// As [`AttemptBudget::try_take`].
    pub(crate) fn try_take(&mut self, label: &Arc<str>, now: Instant) -> bool {
        self.by_service
            .entry(Arc::clone(label))
            .or_insert_with(|| AttemptBudget::new(now))
            .try_take(now)
    }
}

/// Failed attempts of one request, and the rules for a further one. The caller then asks the
/// [budget](AttemptBudget).
#[derive(Debug)]
pub(crate) struct FailedAttempts {
    is_repeatable: bool,
    failed: u32,
    maybe_sent: u32,
}

impl FailedAttempts {
    /// Rules for a request. `is_safe`: its method is safe (RFC 9110 §9.2.1) and it has no body.
    /// `repeats_sent`: the setting of the service.
    pub(crate) fn new(is_safe: bool, repeats_sent: bool) -> Self {
        Self {
            is_repeatable: is_safe && repeats_sent,
            failed: 0,
            maybe_sent: 0,
        }
    }

    /// Whether the request may be sent again although a backend may have received it.
    pub(crate) fn is_repeatable(&self) -> bool {
        self.is_repeatable
    }

    /// Whether the request may go to another agent now, although the agent of this attempt has not
    /// answered.
    pub(crate) fn may_leave(&self) -> bool {
        self.is_repeatable && self.maybe_sent + 1 < MAYBE_SENT_MAX && self.failed + 1 < AGENTS_MAX
    }

    /// Records a failed attempt, and returns whether the request may go to another agent: one that
    /// was never sent to three agents in all, one that may have been sent once more.
    pub(crate) fn may_go_on_after(&mut self, transmission: Transmission) -> bool {
        self.failed += 1;
        self.maybe_sent += u32::from(transmission == Transmission::MaybeSent);
        let is_allowed = match transmission {
            Transmission::NeverSent => true,
            Transmission::MaybeSent => self.is_repeatable && self.maybe_sent < MAYBE_SENT_MAX,
            Transmission::Answered => false,
        };
        is_allowed && self.failed < AGENTS_MAX
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    const RESERVE_ATTEMPTS: usize = 100;

    fn taken(budget: &mut AttemptBudget, now: Instant) -> usize {
        (0..1_000_000).take_while(|_| budget.try_take(now)).count()
    }

    #[test]
    fn five_requests_pay_for_an_attempt_beyond_the_reserve() {
        let start = Instant::now();
        let mut budget = AttemptBudget::new(start);
        assert_eq!(taken(&mut budget, start), RESERVE_ATTEMPTS);
        (0..4).for_each(|_| budget.request(start));
        assert!(!budget.try_take(start));
        budget.request(start);
        assert!(budget.try_take(start) && !budget.try_take(start));
        (0..1000).for_each(|_| budget.request(start));
        assert_eq!(taken(&mut budget, start), 200);
    }

    #[test]
    fn deposits_and_attempts_count_for_ten_seconds() {
        let start = Instant::now();
        let after = |millis| start + Duration::from_millis(millis);
        let mut budget = AttemptBudget::new(start);
        (0..1000).for_each(|_| budget.request(start));
        assert_eq!(taken(&mut budget, after(9_999)), RESERVE_ATTEMPTS + 200);
        assert_eq!(
            taken(&mut budget, after(10_000)),
            0,
            "the deposits are forgotten, the attempts are not"
        );
        assert_eq!(taken(&mut budget, after(18_999)), 0);
        assert_eq!(taken(&mut budget, after(19_000)), RESERVE_ATTEMPTS);
        assert!(!budget.is_idle(after(28_999)) && budget.is_idle(after(29_000)));
        let day = start + Duration::from_secs(86_400);
        budget.request(day);
        assert_eq!(budget.balance, 1, "all is forgotten after a pause");
        budget.request(start);
        assert_eq!(budget.balance, 2, "a clock that goes back forgets nothing");
    }

    #[test]
    fn each_service_has_its_budget_and_idle_ones_are_forgotten() {
        let mut budgets = AttemptBudgets::default();
        let start = Instant::now();
        let one = Arc::from("a--one");
        let other = Arc::from("a--other");
        (0..5).for_each(|_| budgets.request(&one, start));
        let mut taken = |label| {
            (0..1000)
                .take_while(|_| budgets.try_take(label, start))
                .count()
        };
        assert_eq!(
            (taken(&one), taken(&other)),
            (RESERVE_ATTEMPTS + 1, RESERVE_ATTEMPTS)
        );
        let later = |service: u64| start + Duration::from_secs(20 * service);
        (1..1000)
            .for_each(|service| budgets.request(&format!("a--{service}").into(), later(service)));
        assert!(budgets.by_service.len() <= 64);
    }

    proptest! {
        /// The ring gives what a list of all events gives: attempts within ten seconds are at most
        /// a fifth of the requests in them and the reserve.
        #[test]
        fn attempts_are_bounded_in_each_ten_seconds(
            events in prop::collection::vec((0u64..3_000, 0u32..40, 0u32..60), 1..60),
        ) {
            let start = Instant::now();
            let mut budget = AttemptBudget::new(start);
            let mut all: Vec<(u64, i64)> = Vec::new();
            let mut now = start;
            for (pause, requests, asked) in events {
                now += Duration::from_millis(pause);
                let second = (now - start).as_secs();
                for _ in 0..requests {
                    budget.request(now);
                    all.push((second, 1));
                }
                for _ in 0..asked {
                    let remembered = all.iter().filter(|(at, _)| second - at < 10);
                    let balance: i64 = remembered.map(|(_, amount)| amount).sum();
                    let took = budget.try_take(now);
                    prop_assert_eq!(took, balance + 500 >= 5);
                    if took {
                        all.push((second, -5));
                    }
                }
            }
        }
    }

    #[test]
    fn the_class_of_a_failure_is_what_is_proved() {
        for (is_unsent, is_passed_on, transmission) in [
            (true, false, Transmission::NeverSent),
            (false, false, Transmission::MaybeSent),
            (false, true, Transmission::Answered),
            (true, true, Transmission::Answered),
        ] {
            assert_eq!(Transmission::of(is_unsent, is_passed_on), transmission);
        }
    }

    #[test]
    fn the_rules_for_a_further_attempt() {
        use Transmission::{Answered, MaybeSent, NeverSent};
        let allowed = |is_safe, repeats_sent, transmissions: &[Transmission]| {
            let mut failed = FailedAttempts::new(is_safe, repeats_sent);
            let allowed: Vec<bool> = transmissions
                .iter()
                .map(|transmission| failed.may_go_on_after(*transmission))
                .collect();
            allowed
        };
        for is_safe in [false, true] {
            for repeats_sent in [false, true] {
                assert_eq!(
                    allowed(is_safe, repeats_sent, &[NeverSent; 3]),
                    [true, true, false]
                );
                assert_eq!(allowed(is_safe, repeats_sent, &[Answered]), [false]);
                assert_eq!(
                    allowed(is_safe, repeats_sent, &[MaybeSent]),
                    [is_safe && repeats_sent]
                );
                assert_eq!(
                    FailedAttempts::new(is_safe, repeats_sent).is_repeatable(),
                    is_safe && repeats_sent
                );
            }
        }
        assert_eq!(allowed(true, true, &[MaybeSent, MaybeSent]), [true, false]);
        assert_eq!(
            allowed(true, true, &[MaybeSent, NeverSent, NeverSent]),
            [true, true, false]
        );
        assert_eq!(
            allowed(true, true, &[NeverSent, MaybeSent, MaybeSent]),
            [true, true, false]
        );
        assert_eq!(allowed(false, true, &[NeverSent, MaybeSent]), [true, false]);
    }
}
