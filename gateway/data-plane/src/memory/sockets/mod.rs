//! Kernel memory of callers' connections: measured, bounded, shared between accounts, freed under
//! pressure.
//!
//! Bytes that a caller does not read wait in the kernel, which allows each socket megabytes and
//! limits all sockets of the machine together (`tcp_mem`). Connections that have carried bytes are
//! measured. One that holds memory counts for the account of its last authenticated request. The
//! more connections of an account count, the fewer unsent bytes each may have. Connections of an
//! account that holds more than its share are reset, stalled and large ones first.

mod pressure;

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::limits;
use gw_region::owners::ownership::WorkerId;
use gw_shared::id::AccountId;
use gw_shared::net::{Buffers, Socket};
use gw_shared::runtime;
use gw_telemetry::counters::Counter;
use slab::Slab;

pub use self::pressure::{TcpMemory, watch};

/// Bytes that a connection carries before it is measured for the first time, while a request runs.
const COUNTED_FROM: u64 = 64 * 1024;
/// [`COUNTED_FROM`] for a connection without a running request.
const COUNTED_AT_REST_FROM: u64 = 4 * 1024;
/// Bytes between two measurements of a connection that counts.
const MEASURED_EVERY: u64 = 1024 * 1024;
/// Connections that hold no more than this, reserved memory excluded, are not counted.
const NEGLIGIBLE: usize = 4 * 1024;
/// Sockets that are measured in one turn of the worker.
const MEASURED_PER_TURN: usize = 64;
/// Sockets that are checked for a measurement in one turn of the worker.
const CHECKED_PER_TURN: usize = 256;
/// Sockets that are checked in one sweep. With more sockets, a round takes several sweeps.
const CHECKED_PER_SWEEP: usize = 16 * 1024;
/// Number of rounds after which all sockets are measured, to find received bytes that the gateway
/// has not read.
const ROUNDS_UNTIL_MEASURED: u64 = 16;
/// Interval between measurements of the connections that count.
const INTERVAL: Duration = Duration::from_millis(250);

/// Limit and use of kernel memory of all workers.
pub struct SocketBudget {
    total: usize,
    /// Bytes that each worker held at its last sweep.
    held: Box<[AtomicUsize]>,
    /// The TCP memory of the machine is close to the limit from which the kernel throttles every
    /// connection.
    is_pressed: AtomicBool,
}

impl SocketBudget {
    /// Creates a budget of `total` bytes for this number of workers.
    pub fn new(total: usize, workers: usize) -> Self {
        let held = (0..workers).map(|_| AtomicUsize::new(0)).collect();
        Self {
            total,
            held,
            is_pressed: AtomicBool::new(false),
        }
    }

    /// A budget of half of `relay_memory` (bytes for relayed requests), and at most a third of the
    /// TCP memory from which the kernel throttles every connection.
    pub fn beside(relay_memory: usize, workers: usize) -> Self {
        let third = TcpMemory::of_machine().map(|memory| memory.pressure / 3);
        Self::new(
            third.map_or(relay_memory / 2, |third| third.min(relay_memory / 2)),
            workers,
        )
    }

    /// Most bytes that the connections of callers on all workers may hold.
    pub fn total(&self) -> usize {
        self.total
    }

    fn held(&self) -> usize {
        self.held
            .iter()
            .map(|held| held.load(Ordering::Relaxed))
            .sum()
    }
}

/// Kernel memory of the connections of callers on one worker.
pub(crate) struct SocketMemory {
    worker: WorkerId,
    budget: Arc<SocketBudget>,
    /// All connections.
    watched: RefCell<Slab<Rc<SocketUse>>>,
    /// Position in `watched` at which the next sweep continues.
    cursor: Cell<usize>,
    /// Number of completed rounds through `watched`.
    rounds: Cell<u64>,
    /// The connections that count.
    sockets: RefCell<Slab<Rc<SocketUse>>>,
    /// Accounts with connections that count, or with requests since the last sweep. Key `None`:
    /// connections without an authenticated request.
    accounts: RefCell<HashMap<Option<AccountId>, Rc<AccountSockets>>>,
    /// Number of accounts with connections that count.
    holding_accounts: Cell<usize>,
    /// Number of sweeps.
    sweeps: Cell<u64>,
    /// Bytes that all connections hold, as last measured.
    held: Cell<usize>,
    /// Number of connections that were reset to free memory.
    pub(crate) shed: Counter,
}

/// Kernel memory of the connections of one account.
#[derive(Default)]
struct AccountSockets {
    /// Number of connections that count.
    sockets: Cell<usize>,
    /// Number of connections with requests since the last sweep.
    recent: Cell<usize>,
    held: Cell<usize>,
    /// Bytes that the receive buffers may grow to.
    receivable: Cell<usize>,
}

/// Guard of a watched connection. Ends the watch on drop.
pub(crate) struct WatchedSocket {
    socket: Rc<SocketUse>,
    /// Key in `SocketMemory::watched`.
    key: usize,
}

/// Kernel memory of one connection.
pub(crate) struct SocketUse {
    buffers: Buffers,
    memory: Rc<SocketMemory>,
    /// The account of the last authenticated request.
    account_id: RefCell<Option<AccountId>>,
    /// `Buffers::carried` at the last measurement.
    measured_at: Cell<u64>,
    unsent_limit: Cell<u32>,
    /// Number of the sweep after which the connection was last counted as recent.
    recent_since: Cell<u64>,
    /// The connection was reset to free memory. Its owner drops it soon.
    is_reset: Cell<bool>,
    counted: RefCell<Option<MeasuredConnection>>,
}

/// A connection that holds kernel memory, as last measured.
struct MeasuredConnection {
    key: usize,
    account: Rc<AccountSockets>,
    account_id: Option<AccountId>,
    held: usize,
    receivable: usize,
    /// Approximate number of bytes that the peer has received and sent.
    progress: u64,
    /// No bytes moved between the last two sweeps.
    is_stalled: bool,
}

impl SocketMemory {
    pub(crate) fn new(worker: WorkerId, budget: Arc<SocketBudget>) -> Rc<Self> {
        Rc::new(Self {
            worker,
            budget,
            watched: RefCell::default(),
            cursor: Cell::new(0),
            rounds: Cell::new(0),
            sockets: RefCell::default(),
            accounts: RefCell::default(),
            holding_accounts: Cell::new(0),
            sweeps: Cell::new(1),
            held: Cell::new(0),
            shed: Counter::default(),
        })
    }

    /// Limits the buffers of a new connection and watches them until the result is dropped.
    pub(crate) fn watch(self: &Rc<Self>, socket: &Socket) -> WatchedSocket {
        let watched = SocketUse {
            buffers: socket.buffers(),
            memory: Rc::clone(self),
            account_id: RefCell::default(),
            measured_at: Cell::new(0),
            unsent_limit: Cell::new(0),
            recent_since: Cell::new(0),
            is_reset: Cell::new(false),
            counted: RefCell::default(),
        };
        watched.limit_unsent(limits::UNSENT_MOST);
        let socket = Rc::new(watched);
        let key = self.watched.borrow_mut().insert(Rc::clone(&socket));
        WatchedSocket { socket, key }
    }

    /// Bytes that the connections of this worker hold, as last measured.
    pub(crate) fn held(&self) -> usize {
        self.held.get()
    }

    /// Most bytes that the connections of all workers may hold.
    pub(crate) fn limit(&self) -> usize {
        self.budget.total
    }

    /// Measures the connections that count at intervals, and resets connections of accounts that
    /// hold too much.
    pub(crate) async fn keep_within_budget(self: Rc<Self>) {
        loop {
            runtime::sleep(INTERVAL).await;
            self.sweep().await;
        }
    }

    async fn sweep(&self) {
        // Keys instead of references: a reference would keep the descriptor of a connection open
        // after its end.
        let keys: Vec<usize> = self.sockets.borrow().iter().map(|(key, _)| key).collect();
        for some in keys.chunks(MEASURED_PER_TURN) {
            for key in some {
                let socket = self.sockets.borrow().get(*key).cloned();
                socket.iter().for_each(|socket| socket.measure(true));
            }
            runtime::yield_now().await;
        }
        self.find_holders().await;
        self.budget.held[self.worker.0].store(self.held.get(), Ordering::Relaxed);
        self.shed();
        self.sweeps.set(self.sweeps.get() + 1);
        self.accounts.borrow_mut().retain(|_, account| {
            account.recent.set(0);
            account.sockets.get() > 0
        });
    }

    /// Measures connections that do not count yet: those that have carried bytes since their last
    /// measurement, and all of them every [`ROUNDS_UNTIL_MEASURED`] rounds.
    async fn find_holders(&self) {
        let places = self.watched.borrow().capacity();
        let mut left = places.min(CHECKED_PER_SWEEP);
        while left > 0 {
            let all = self.rounds.get().is_multiple_of(ROUNDS_UNTIL_MEASURED);
            let from = self.cursor.get();
            let to = (from + CHECKED_PER_TURN.min(left)).min(places);
            left -= to - from;
            if to == places {
                self.cursor.set(0);
                self.rounds.set(self.rounds.get() + 1);
            } else {
                self.cursor.set(to);
            }
            let may_hold = |socket: &&Rc<SocketUse>| {
                !socket.is_counted()
                    && (all || socket.carried_since_measured() >= COUNTED_AT_REST_FROM)
            };
            let found: Vec<Rc<SocketUse>> = {
                let watched = self.watched.borrow();
                (from..to)
                    .filter_map(|key| watched.get(key))
                    .filter(may_hold)
                    .cloned()
                    .collect()
            };
            found.iter().for_each(|socket| socket.measure(false));
            drop(found);
            runtime::yield_now().await;
            if from >= to {
                break;
            }
        }
    }

    /// Resets connections of accounts that exceed their allowance.
    fn shed(&self) {
        let mut excess: Vec<(Rc<AccountSockets>, usize)> = Vec::new();
        for account in self.accounts.borrow().values() {
            let beyond = account.held.get().saturating_sub(self.allowance(account));
            if beyond > 0 {
                excess.push((Rc::clone(account), beyond));
            }
        }
        if self.budget.is_pressed.load(Ordering::Relaxed)
            && self.held.get() > self.budget.total / 16
        {
            // Frees an eighth of the memory from the account that holds most.
            let accounts = self.accounts.borrow();
            if let Some(largest) = accounts.values().max_by_key(|account| account.held.get()) {
                excess.push((Rc::clone(largest), self.held.get() / 8));
            }
        }
        if excess.is_empty() {
            return;
        }
        let mut sockets: Vec<Rc<SocketUse>> = self
            .sockets
            .borrow()
            .iter()
            .map(|(_, socket)| Rc::clone(socket))
            .collect();
        // Connections that are already reset come first: their memory becomes free soon.
        sockets.sort_by_cached_key(|socket| Reverse(socket.rank()));
        let mut reset = 0u64;
        for socket in &sockets {
            let counted = socket.counted.borrow();
            let Some(counted) = counted.as_ref() else {
                continue;
            };
            let of_account = |(account, _): &&mut (Rc<AccountSockets>, usize)| {
                Rc::ptr_eq(account, &counted.account)
            };
            if let Some((_, beyond)) = excess.iter_mut().find(of_account)
                && *beyond > 0
            {
                *beyond = beyond.saturating_sub(counted.held);
                if !socket.is_reset.replace(true) {
                    socket.buffers.reset();
                    self.shed.increment();
                    reset += 1;
                }
            }
        }
        if reset == 0 {
            return;
        }
        tracing::warn!(
            connections = reset,
            held_mib = self.held.get() >> 20,
            limit_mib = self.budget.total >> 20,
            "reset connections that hold more kernel memory than their account's share"
        );
    }

    /// Bytes that an account may hold: what other accounts leave, at most half of the budget, and
    /// at least an even share.
    fn allowance(&self, account: &AccountSockets) -> usize {
        let accounts = self.holding_accounts.get();
        // Memory of other workers is known as of their last sweep.
        let elsewhere =
            self.budget.held() - self.budget.held[self.worker.0].load(Ordering::Relaxed);
        let workers = self.budget.held.len();
        allowance(
            self.budget.total,
            workers,
            accounts,
            elsewhere + self.held.get(),
            account.held.get(),
        )
    }

    fn account(&self, id: &Option<AccountId>) -> Rc<AccountSockets> {
        Rc::clone(self.accounts.borrow_mut().entry(id.clone()).or_default())
    }
}

/// See [`SocketMemory::allowance`]. `accounts`: of this worker; `held`: by all accounts of all
/// workers; `own`: by the account on this worker.
fn allowance(total: usize, workers: usize, accounts: usize, held: usize, own: usize) -> usize {
    let left = total.saturating_sub(held.saturating_sub(own));
    (total / workers / accounts.max(2)).max(left.min(total / 2))
}

/// Limit on unsent bytes of each of `sockets` connections of an account with `allowance`, a power
/// of two. A sixteenth of the even share, because a connection can hold twice its limit, and
/// earlier connections have larger limits.
fn unsent_limit(allowance: usize, sockets: usize) -> u32 {
    let even = u32::try_from(allowance / 16 / sockets.max(1)).unwrap_or(u32::MAX);
    let power_of_two = 1 << even.max(1).ilog2();
    power_of_two.clamp(limits::UNSENT_LEAST, limits::UNSENT_MOST)
}

/// Bytes that each of `sockets` connections may hold once their account holds half of its
/// allowance.
fn even_share(allowance: usize, sockets: usize) -> usize {
    (allowance / 2 / sockets.max(1)).max(limits::SOCKET_BUFFER_LEAST)
}

impl WatchedSocket {
    pub(crate) fn usage(&self) -> Rc<SocketUse> {
        Rc::clone(&self.socket)
    }

    /// To be called after bytes were sent or received. Measures the buffers if enough bytes were
    /// carried.
    pub(crate) fn carried(&self) {
        let since = self.socket.carried_since_measured();
        if since >= MEASURED_EVERY || (since >= COUNTED_FROM && !self.socket.is_counted()) {
            self.socket.measure(false);
        }
    }

    /// To be called when no request runs any more. Measures a response that the peer does not read.
    pub(crate) fn rests(&self) {
        if self.socket.carried_since_measured() >= COUNTED_AT_REST_FROM {
            self.socket.measure(false);
        }
    }

    /// To be called before the connection is closed. Bounds the time for which the kernel keeps
    /// unacknowledged bytes.
    pub(crate) fn closes(&self) {
        self.socket.buffers.give_up_within(limits::CLOSED_DELIVERY);
    }
}

impl Drop for WatchedSocket {
    fn drop(&mut self) {
        self.socket.stop_counting();
        self.socket.memory.watched.borrow_mut().remove(self.key);
    }
}

impl SocketUse {
    /// Records an authenticated request for a service of `account`.
    pub(crate) fn serves(&self, account: &AccountId) {
        if self.account_id.borrow().as_ref() != Some(account) {
            self.account_id.replace(Some(account.clone()));
        }
        // Once between two sweeps.
        let sweep = self.memory.sweeps.get();
        if self.recent_since.replace(sweep) != sweep {
            self.tighten();
        }
    }

    /// Lowers the unsent limit to that of the other connections of its account. Connections with
    /// requests since the last sweep are included, because each may stall.
    fn tighten(&self) {
        let account = self.memory.account(&self.account_id.borrow());
        account.recent.set(account.recent.get() + 1);
        let sockets = account.sockets.get() + account.recent.get();
        let unsent = unsent_limit(self.memory.allowance(&account), sockets);
        if unsent < self.unsent_limit.get() {
            self.limit_unsent(unsent);
        }
    }

    fn carried_since_measured(&self) -> u64 {
        self.buffers.carried() - self.measured_at.get()
    }

    fn is_counted(&self) -> bool {
        self.counted.borrow().is_some()
    }

    /// Order in which connections are reset, greatest first: stalled ones, then large ones.
    fn rank(&self) -> (bool, bool, usize) {
        let (is_stalled, held) = self
            .counted
            .borrow()
            .as_ref()
            .map_or((false, 0), |counted| (counted.is_stalled, counted.held));
        (self.is_reset.get(), is_stalled, held)
    }

    fn measure(self: &Rc<Self>, is_sweep: bool) {
        self.measured_at.set(self.buffers.carried());
        let used = self.buffers.measure().unwrap_or_default();
        if used.to_send + used.to_read <= NEGLIGIBLE {
            return self.stop_counting();
        }
        self.count();
        let mut counted = self.counted.borrow_mut();
        let Some(counted) = counted.as_mut() else {
            return;
        };
        let taken = self.buffers.carried().saturating_sub(used.to_send as u64);
        let receivable = if used.to_read > NEGLIGIBLE {
            used.receive_limit
        } else {
            0
        };
        if is_sweep {
            counted.is_stalled = taken.abs_diff(counted.progress) < NEGLIGIBLE as u64;
            counted.progress = taken;
        }
        let account = &counted.account;
        account
            .held
            .set(account.held.get() - counted.held + used.total());
        account
            .receivable
            .set(account.receivable.get() - counted.receivable + receivable);
        self.memory
            .held
            .set(self.memory.held.get() - counted.held + used.total());
        (counted.held, counted.receivable) = (used.total(), receivable);

        let allowance = self.memory.allowance(account);
        let unsent = unsent_limit(allowance, account.sockets.get());
        if unsent != self.unsent_limit.get() {
            self.limit_unsent(unsent);
        }
        let share = even_share(allowance, account.sockets.get());
        if account.held.get() > allowance / 2 && used.to_send > share && used.send_limit > share {
            log_failure(self.buffers.limit_send_buffer(share));
        }
        if account.receivable.get() > allowance && receivable > share {
            log_failure(self.buffers.limit_receive_buffer(share));
        }
    }

    fn limit_unsent(&self, bytes: u32) {
        self.unsent_limit.set(bytes);
        log_failure(self.buffers.limit_unsent(bytes));
    }

    /// Begins to count the connection, or moves it to the account of its last request.
    fn count(self: &Rc<Self>) {
        let account_id = self.account_id.borrow().clone();
        if self
            .counted
            .borrow()
            .as_ref()
            .is_some_and(|counted| counted.account_id == account_id)
        {
            return;
        }
        self.stop_counting();
        let account = self.memory.account(&account_id);
        account.sockets.set(account.sockets.get() + 1);
        if account.sockets.get() == 1 {
            self.memory
                .holding_accounts
                .set(self.memory.holding_accounts.get() + 1);
        }
        let key = self.memory.sockets.borrow_mut().insert(Rc::clone(self));
        let counted = MeasuredConnection {
            key,
            account,
            account_id,
            held: 0,
            receivable: 0,
            progress: 0,
            is_stalled: false,
        };
        self.counted.replace(Some(counted));
    }

    fn stop_counting(&self) {
        let Some(counted) = self.counted.take() else {
            return;
        };
        let account = &counted.account;
        account.sockets.set(account.sockets.get() - 1);
        account.held.set(account.held.get() - counted.held);
        account
            .receivable
            .set(account.receivable.get() - counted.receivable);
        self.memory.held.set(self.memory.held.get() - counted.held);
        if account.sockets.get() == 0 {
            self.memory
                .holding_accounts
                .set(self.memory.holding_accounts.get() - 1);
        }
        self.memory.sockets.borrow_mut().try_remove(counted.key);
    }
}

/// Logs a failure at debug level: the kernel accepts all valid limits on a connected socket.
fn log_failure(limited: std::io::Result<()>) {
    if let Err(error) = limited {
        tracing::debug!(%error, "cannot limit the buffers of a socket");
    }
}

#[cfg(test)]
mod tests;
