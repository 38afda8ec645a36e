//! New orders of accounts that may begin: pauses after rate limits, and the share of each account.
//! The region's own orders are not limited, and have a reserve. Without I/O and without a clock.

use std::collections::{HashMap, VecDeque};

use gw_base::clock::Timestamp;
use gw_shared::id::{AccountId, DomainName};

use crate::limits::{ORDERS_PER_ACCOUNT, ORDERS_SHARED, ORDERS_WITHIN};

/// Decides which orders of accounts may begin at one authority.
#[derive(Debug, Default)]
pub struct Admission {
    /// Orders that began within [`ORDERS_WITHIN`], the oldest first.
    orders: VecDeque<(Timestamp, AccountId)>,
    /// Ends of the pauses of accounts, and the parent domains of the names that were refused.
    limited: HashMap<AccountId, (Timestamp, String)>,
    /// Time before which no order begins.
    paused: Timestamp,
}

impl Admission {
    /// Time before which no order of the account begins.
    pub fn next_order(&self, account: &AccountId) -> Timestamp {
        let limited = self.limited.get(account);
        let paused = limited.map_or(self.paused, |(until, _)| self.paused.max(*until));
        let of_account = self.orders.iter().filter(|(_, it)| it == account).count();
        // An account leaves as many orders as it has: several accounts cannot use up all of them.
        let left = ORDERS_SHARED.saturating_sub(self.orders.len());
        match self.orders.front() {
            Some((oldest, _)) if of_account >= left.min(ORDERS_PER_ACCOUNT) => {
                paused.max(oldest.after(ORDERS_WITHIN))
            }
            _ => paused,
        }
    }

    /// Counts an order of the account that begins now. Fails with the time before which none does.
    pub fn begin(&mut self, account: &AccountId, now: Timestamp) -> Result<(), Timestamp> {
        let is_old = |(began, _): &mut (Timestamp, _)| began.after(ORDERS_WITHIN) <= now;
        while self.orders.pop_front_if(is_old).is_some() {}
        let next = self.next_order(account);
        if next > now {
            return Err(next);
        }
        self.orders.push_back((now, account.clone()));
        Ok(())
    }

    /// Takes back the last order of the account: the authority has not accepted it.
    pub fn take_back(&mut self, account: &AccountId) {
        let last = self.orders.iter().rposition(|(_, it)| it == account);
        last.map(|last| self.orders.remove(last));
    }

    /// Pauses new orders of an account that met a rate limit with `name`, and those of all once
    /// another account meets one meanwhile with a name of another parent domain.
    pub fn limit(
        &mut self,
        account: &AccountId,
        name: &DomainName,
        until: Timestamp,
        now: Timestamp,
    ) {
        let labels: Vec<&str> = name.as_str().rsplitn(3, '.').take(2).collect();
        let parent = labels.join(".");
        let before = self.limited.remove(account);
        let until = before.map_or(until, |(before, _)| before.max(until));
        self.limited.retain(|_, (until, _)| *until > now);
        if self.limited.values().any(|(_, other)| *other != parent) {
            self.paused = self.paused.max(until);
        }
        self.limited.insert(account.clone(), (until, parent));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests stop at the first surprise")]

    use std::time::Duration;

    use super::*;

    const START: Timestamp = Timestamp(1_000_000);

    fn account(number: usize) -> AccountId {
        AccountId::new(&format!("account{number}")).unwrap()
    }

    fn later(seconds: u64) -> Timestamp {
        START.after(Duration::from_secs(seconds))
    }

    /// Pauses an account for some seconds after a limit of an order for `name`.
    fn limit(admission: &mut Admission, number: usize, name: &str, pause: u64, now: Timestamp) {
        let name = DomainName::new(name).unwrap();
        let until = now.after(Duration::from_secs(pause));
        admission.limit(&account(number), &name, until, now);
    }

    /// How many of `attempts` orders of an account begin.
    fn begun(admission: &mut Admission, number: usize, attempts: usize, now: Timestamp) -> usize {
        let attempts = 0..attempts;
        attempts
            .filter(|_| admission.begin(&account(number), now).is_ok())
            .count()
    }

    #[test]
    fn a_limit_stops_the_new_orders_of_one_account() {
        let mut admission = Admission::default();
        limit(&mut admission, 1, "a.customer.test", 30, START);
        limit(&mut admission, 1, "a.another.test", 1, START);
        assert_eq!(admission.begin(&account(1), START), Err(later(30)));
        assert_eq!(admission.begin(&account(2), START), Ok(()));
        assert_eq!(admission.begin(&account(1), later(30)), Ok(()));
    }

    #[test]
    fn limits_of_accounts_without_a_common_parent_domain_stop_all_within_one_pause() {
        let limited = |second: &str, at: u64| {
            let mut admission = Admission::default();
            limit(&mut admission, 1, "a.customer.test", 600, START);
            limit(&mut admission, 2, second, 600, later(at));
            admission.begin(&account(3), later(at)).err()
        };
        for same in ["b.customer.test", "customer.test", "x.y.customer.test"] {
            assert_eq!(limited(same, 0), None, "{same}");
        }
        for other in ["b.other.test", "xcustomer.test", "customer.test.other"] {
            assert_eq!(limited(other, 599), Some(later(599 + 600)), "{other}");
        }
        assert_eq!(limited("b.other.test", 600), None, "the first is over");
    }

    #[test]
    fn an_account_begins_a_hundred_orders_in_three_hours() {
        let mut admission = Admission::default();
        let window = ORDERS_WITHIN.as_secs();
        assert_eq!(begun(&mut admission, 1, 60, START), 60);
        assert_eq!(begun(&mut admission, 1, 60, later(5)), 40);
        assert_eq!(admission.begin(&account(1), later(5)), Err(later(window)));
        // The authority did not accept one.
        admission.take_back(&account(1));
        assert_eq!(begun(&mut admission, 1, 2, later(6)), 1);
        assert_eq!(begun(&mut admission, 1, 60, later(window - 1)), 0);
        assert_eq!(begun(&mut admission, 1, 99, later(window)), 60);
        let most: Vec<u64> = (0..window).step_by(60).collect();
        let mut admission = Admission::default();
        let hourly = most
            .iter()
            .map(|at| begun(&mut admission, 1, 9, later(*at)));
        assert_eq!(hourly.sum::<usize>(), ORDERS_PER_ACCOUNT);
        assert!(admission.orders.len() <= ORDERS_PER_ACCOUNT);
    }

    #[test]
    fn many_accounts_leave_orders_to_others_and_to_the_region() {
        let mut admission = Admission::default();
        for number in 0..50 {
            let orders = begun(&mut admission, number, 1000, START);
            assert!(
                (1..=ORDERS_PER_ACCOUNT).contains(&orders),
                "{number}: {orders}"
            );
            if admission.orders.len() == ORDERS_SHARED {
                break;
            }
        }
        assert!(admission.orders.len() <= ORDERS_SHARED);
        // Accounts that are there from the beginning have equal shares.
        let mut admission = Admission::default();
        let mut orders = [0; 9];
        for _ in 0..1000 {
            for (number, orders) in orders.iter_mut().enumerate() {
                *orders += begun(&mut admission, number, 1, START);
            }
        }
        assert_eq!(orders, [28; 9]);
        assert_eq!(begun(&mut admission, 10, 1000, START), 14, "a late one");
        assert!(admission.limited.is_empty());
    }
}
