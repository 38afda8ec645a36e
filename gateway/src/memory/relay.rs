//! Memory for the relayed requests of one worker, and the share of each account.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use gw_shared::id::AccountId;
use gw_shared::tunnel::window;

use crate::error::Error;
use crate::memory::sockets::SocketMemory;

/// Memory of the relayed requests of one worker: the credit of their streams, and kernel memory of their callers.
pub(crate) struct RelayMemory {
    budget: usize,
    use_of_all: Use,
    accounts: RefCell<HashMap<AccountId, Rc<Use>>>,
    sockets: Rc<SocketMemory>,
}

#[derive(Default)]
struct Use {
    /// Bytes that were granted to agents and are not relayed yet.
    committed: Cell<usize>,
    streams: Cell<usize>,
}

impl Use {
    fn add(&self, bytes: usize) {
        self.committed.set(self.committed.get() + bytes);
    }

    fn remove(&self, bytes: usize) {
        self.committed.set(self.committed.get() - bytes);
    }

    /// Bytes that the streams need with the least windows once one more is open.
    fn least_with_one_more(&self) -> usize {
        (self.streams.get() + 1) * window::LEAST as usize
    }
}

impl RelayMemory {
    pub(crate) fn new(budget: usize, sockets: Rc<SocketMemory>) -> Rc<Self> {
        Rc::new(Self { budget, use_of_all: Use::default(), accounts: RefCell::default(), sockets })
    }

    /// A handle of the share of `account`, for one of its tunnels.
    pub(crate) fn account(self: &Rc<Self>, account: &AccountId) -> AccountMemory {
        let own = Rc::clone(self.accounts.borrow_mut().entry(account.clone()).or_default());
        AccountMemory { all: Rc::clone(self), account: account.clone(), own }
    }

    /// The budget minus kernel memory, and at least half of the budget. The limit on kernel memory applies to all
    /// workers together, so one worker may hold more than its part.
    fn for_windows(&self) -> usize {
        self.budget - self.sockets.held().min(self.budget / 2)
    }

    /// Most bytes that one account may commit: half, so that one account cannot exhaust the memory.
    fn account_most(&self) -> usize {
        self.for_windows() / 2
    }

    /// Number of accounts with running requests, at least one.
    fn active_accounts(&self) -> usize {
        self.accounts.borrow().values().filter(|account| account.streams.get() > 0).count().max(1)
    }
}

/// Handle of the share of one account, for one of its tunnels.
pub(crate) struct AccountMemory {
    all: Rc<RelayMemory>,
    account: AccountId,
    own: Rc<Use>,
}

impl AccountMemory {
    /// Counts a stream before it is opened. Fails if the least windows of all streams would exceed the
    /// share of the account or the memory of the worker.
    pub(crate) fn enter(&self) -> Result<(), Error> {
        if self.own.least_with_one_more() > self.all.account_most() {
            return Err(Error::Overloaded("at this account's limit of relayed requests"));
        }
        if self.all.use_of_all.least_with_one_more() > self.all.for_windows() {
            return Err(Error::Overloaded("at its limit of relayed requests"));
        }
        for counted in [&self.all.use_of_all, &*self.own] {
            counted.streams.set(counted.streams.get() + 1);
        }
        Ok(())
    }

    /// Removes a stream from the count.
    pub(crate) fn leave(&self) {
        for counted in [&self.all.use_of_all, &*self.own] {
            counted.streams.set(counted.streams.get() - 1);
        }
    }

    /// Counts granted bytes.
    pub(crate) fn add(&self, bytes: usize) {
        self.all.use_of_all.add(bytes);
        self.own.add(bytes);
    }

    /// Removes granted bytes that were relayed or given up.
    pub(crate) fn remove(&self, bytes: usize) {
        self.all.use_of_all.remove(bytes);
        self.own.remove(bytes);
    }

    /// Bytes that a tunnel with `streams` and `committed` bytes may commit: what is left of half of the memory, and at
    /// least its even part of the even share of the account.
    pub(crate) fn allowance(&self, streams: usize, committed: usize) -> usize {
        let windows = self.all.for_windows();
        let left = windows.saturating_sub(self.all.use_of_all.committed.get() - committed);
        let left_to_account = self.all.account_most().saturating_sub(self.own.committed.get() - committed);
        let share = (windows / self.all.active_accounts()).min(self.all.account_most());
        let even = share / self.own.streams.get().max(1) * streams;
        left.min(left_to_account).max(even).min(window::TUNNEL_BUDGET)
    }

    /// Bytes that this account may still commit.
    pub(crate) fn left(&self) -> usize {
        let left_to_account = self.all.account_most().saturating_sub(self.own.committed.get());
        left_to_account.min(self.all.for_windows().saturating_sub(self.all.use_of_all.committed.get()))
    }
}

impl Drop for AccountMemory {
    fn drop(&mut self) {
        // This reference and that of the table.
        if Rc::strong_count(&self.own) <= 2 {
            self.all.accounts.borrow_mut().remove(&self.account);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::memory::sockets::SocketBudget;
    use crate::ownership::WorkerId;

    const WINDOW: usize = window::FIRST as usize;
    const LEAST: usize = window::LEAST as usize;

    fn memory(budget: usize) -> Rc<RelayMemory> {
        RelayMemory::new(budget, SocketMemory::new(WorkerId(0), Arc::new(SocketBudget::new(budget, 1))))
    }

    fn tunnel(memory: &Rc<RelayMemory>, account: &str, streams: usize) -> AccountMemory {
        let tunnel = memory.account(&account.parse().unwrap());
        (0..streams).for_each(|_| tunnel.enter().unwrap());
        tunnel.add(streams * WINDOW);
        tunnel
    }

    #[test]
    fn the_allowance_is_the_rest_of_half_the_memory_and_at_least_an_even_share() {
        let memory = memory(100 * WINDOW);
        let one = tunnel(&memory, "one", 10);
        assert_eq!(one.allowance(10, 10 * WINDOW), 50 * WINDOW);
        // Another tunnel of the account.
        let more = tunnel(&memory, "one", 30);
        assert_eq!(one.allowance(10, 10 * WINDOW), 20 * WINDOW);
        let others = [tunnel(&memory, "two", 40), tunnel(&memory, "three", 10)];
        assert_eq!(one.allowance(10, 10 * WINDOW), 20 * WINDOW);
        assert_eq!(others[1].allowance(10, 10 * WINDOW) / WINDOW, 33);
        assert_eq!((one.left(), others[1].left()), (10 * WINDOW, 10 * WINDOW));
        others[1].add(40 * WINDOW);
        assert_eq!((one.left(), others[1].left()), (0, 0));
        drop(more);
        assert_eq!(memory.accounts.borrow().len(), 3);
    }

    #[test]
    fn the_allowance_of_one_tunnel_is_bounded() {
        let memory = memory(usize::MAX);
        assert_eq!(tunnel(&memory, "one", 1).allowance(1, WINDOW), window::TUNNEL_BUDGET);
    }

    #[test]
    fn an_account_at_its_share_is_refused_and_others_are_not() {
        let memory = memory(8 * LEAST);
        let (one, two) = (memory.account(&"one".parse().unwrap()), memory.account(&"two".parse().unwrap()));
        for tunnel in [&one, &two] {
            (0..4).for_each(|_| tunnel.enter().unwrap());
            assert!(tunnel.enter().unwrap_err().to_string().contains("this account"));
        }
        let three = memory.account(&"three".parse().unwrap());
        assert!(three.enter().is_err(), "no memory is left");
        one.leave();
        three.enter().unwrap();
    }

    #[test]
    fn accounts_without_tunnels_are_removed() {
        let memory = memory(8 * LEAST);
        let tunnels = [tunnel(&memory, "one", 0), tunnel(&memory, "one", 0)];
        let [first, second] = tunnels;
        drop(first);
        assert_eq!(memory.accounts.borrow().len(), 1);
        drop(second);
        assert_eq!(memory.accounts.borrow().len(), 0);
    }
}
