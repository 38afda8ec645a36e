//! Memory for the relayed requests of one worker, and the share of each account.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use gw_base::error::{Error, Overload};
use gw_shared::id::AccountId;
pub(crate) use gw_shared::tunnel::ledger::Reserved;
use gw_shared::tunnel::ledger::{Ledger, Share};

use crate::memory::sockets::SocketMemory;

/// Memory of the relayed requests of one worker: their streams and kept bodies, and kernel memory
/// of their callers.
pub(crate) struct RelayMemory {
    budget: usize,
    ledger: Rc<Ledger>,
    /// Shares by account. Those that nothing uses stay until there are twice as many as are used.
    accounts: RefCell<Accounts>,
    /// Share of requests of other nodes until their accounts are known.
    links: Rc<Share>,
    sockets: Rc<SocketMemory>,
}

#[derive(Default)]
struct Accounts {
    shares: HashMap<AccountId, Rc<Share>>,
    /// Number of shares at which unused ones are removed.
    removed_at: usize,
}

impl Accounts {
    fn insert(&mut self, account: &AccountId, share: &Rc<Share>) {
        const LEAST: usize = 64;
        if self.shares.len() >= self.removed_at {
            self.shares.retain(|_, share| Rc::strong_count(share) > 1);
            self.removed_at = LEAST.max(2 * self.shares.len());
        }
        self.shares.insert(account.clone(), Rc::clone(share));
    }
}

impl RelayMemory {
    pub(crate) fn new(budget: usize, sockets: Rc<SocketMemory>) -> Rc<Self> {
        let ledger = Ledger::new(budget);
        let links = ledger.share();
        Rc::new(Self {
            budget,
            ledger,
            accounts: RefCell::default(),
            links,
            sockets,
        })
    }

    /// Share of requests of other nodes until their accounts are known.
    pub(crate) fn links(&self) -> Rc<Share> {
        Rc::clone(&self.links)
    }

    /// A handle of the share of `account`.
    pub(crate) fn account(self: &Rc<Self>, account: &AccountId) -> AccountMemory {
        let mut accounts = self.accounts.borrow_mut();
        let known = accounts.shares.get(account).map(Rc::clone);
        let share = known.unwrap_or_else(|| {
            let share = self.ledger.share();
            accounts.insert(account, &share);
            share
        });
        AccountMemory {
            all: Rc::clone(self),
            share,
        }
    }

    /// Charges `bytes` of a request to `account` until the result is dropped. Fails if there is no
    /// room.
    pub(crate) fn reserve(
        self: &Rc<Self>,
        account: &AccountId,
        bytes: usize,
    ) -> Result<Reserved, Error> {
        let memory = self.account(account);
        memory
            .share()
            .reserve(bytes)
            .ok_or_else(|| memory.refusal())
    }

    /// As [`Self::reserve`], for what a request can do without: `None` once the account has used
    /// half of its share, so that the other half has room for further requests.
    pub(crate) fn spare(self: &Rc<Self>, account: &AccountId, bytes: usize) -> Option<Reserved> {
        self.account(account).share().spare(bytes)
    }

    /// Bytes that are charged to all accounts.
    pub(crate) fn charged(&self) -> usize {
        self.ledger.charged()
    }

    /// Bytes that are charged to each account with a request.
    #[cfg(feature = "support")]
    pub(crate) fn charged_by_account(&self) -> std::collections::BTreeMap<AccountId, usize> {
        let accounts = self.accounts.borrow();
        let charged = |(account, share): (&AccountId, &Rc<Share>)| {
            (share.charged() > 0).then(|| (account.clone(), share.charged()))
        };
        accounts.shares.iter().filter_map(charged).collect()
    }

    /// The budget minus kernel memory, and at least half of the budget. The limit on kernel memory
    /// applies to all workers together, so one worker may hold more than its part.
    pub(crate) fn limit(&self) -> usize {
        self.budget - self.sockets.held().min(self.budget / 2)
    }
}

/// Handle of the share of one account.
pub(crate) struct AccountMemory {
    all: Rc<RelayMemory>,
    share: Rc<Share>,
}

impl AccountMemory {
    /// The share, as kernel memory leaves it.
    pub(crate) fn share(&self) -> &Rc<Share> {
        self.all.ledger.set_total(self.all.limit());
        &self.share
    }

    /// Error of a request for which the share has no room.
    pub(crate) fn refusal(&self) -> Error {
        let others = self.all.ledger.charged() - self.share.charged();
        // With most of the memory, the others leave less than this account has.
        if others > self.all.ledger.total() / 2 {
            Error::Overloaded(Overload::RelayMemory)
        } else {
            at_account_limit()
        }
    }
}

/// Error of a request for which the share of its account has no room.
pub(crate) fn at_account_limit() -> Error {
    Error::Overloaded(Overload::AccountMemory)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gw_region::owners::ownership::WorkerId;

    use super::*;
    use crate::memory::sockets::SocketBudget;

    fn memory(budget: usize) -> Rc<RelayMemory> {
        RelayMemory::new(
            budget,
            SocketMemory::new(WorkerId(0), Arc::new(SocketBudget::new(budget, 1))),
        )
    }

    fn account(memory: &Rc<RelayMemory>, name: &str) -> AccountMemory {
        memory.account(&name.parse().unwrap())
    }

    #[test]
    fn handles_of_one_account_have_one_share() {
        let memory = memory(1000);
        let (one, again, two) = (
            account(&memory, "one"),
            account(&memory, "one"),
            account(&memory, "two"),
        );
        one.share().charge(0, 300);
        assert_eq!(
            (one.share().left(), again.share().left(), two.share().left()),
            (200, 200, 350)
        );
        assert_eq!(memory.charged(), 300);
    }

    #[test]
    fn a_request_without_room_is_refused_with_the_limit_that_it_meets() {
        let memory = memory(1000);
        let text = |refused: Result<Reserved, Error>| refused.err().unwrap().to_string();
        let one = "one".parse().unwrap();
        let two = "two".parse().unwrap();
        let held = memory.reserve(&one, 500).unwrap();
        assert!(text(memory.reserve(&one, 1)).contains("this account"));
        let also = memory.reserve(&two, 250).unwrap();
        assert!(text(memory.reserve(&"three".parse().unwrap(), 200)).contains("its limit"));
        drop(held);
        memory.reserve(&one, 300).unwrap();
        drop(also);
        assert_eq!(memory.charged(), 0);
    }

    #[test]
    fn accounts_that_nothing_uses_are_removed() {
        let memory = memory(1000);
        let used: Vec<_> = (0..100)
            .map(|number| account(&memory, &format!("used{number}")))
            .collect();
        (0..1000).for_each(|number| drop(account(&memory, &format!("left{number}"))));
        assert!(memory.accounts.borrow().shares.len() <= 2 * used.len());
        let one = account(&memory, "used0");
        assert!(Rc::ptr_eq(one.share(), used[0].share()));
    }
}
