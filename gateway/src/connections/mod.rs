//! The connections of one worker: how many, what each must do by when, and which can be closed for a drain.
//!
//! One sweep a tick over all of them instead of a timer each: setting a deadline is a store.

pub(crate) mod handshakes;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use gw_shared::net::{Closer, Socket};
use slab::Slab;

use crate::connections::handshakes::HandshakeGuard;
use crate::limit::AddressSlot;
use crate::limits;
use crate::memory::sockets::{SocketMemory, SocketUse, WatchedSocket};
use crate::telemetry::counters::Counter;

/// All connections of a worker, up to a limit.
pub(crate) struct Connections {
    entries: RefCell<Slab<Rc<Entry>>>,
    limit: usize,
    /// In a drain, how long a connection may be idle.
    draining: Cell<Option<Duration>>,
    /// When the drain began.
    draining_since: Cell<Option<Instant>>,
    /// Ended to make room, and still there.
    evicting: Cell<usize>,
    /// Ended to make room so far.
    pub(crate) evicted: Counter,
    socket_memory: Rc<SocketMemory>,
}

struct Entry {
    closer: Closer,
    deadline: Cell<Option<Instant>>,
    /// No request is being served.
    idle: Cell<bool>,
    /// The peer has something to send: a handshake, its first request, the rest of a head.
    expected: Cell<bool>,
    /// How long a request may take that was sent before the drain began, once that was asked.
    on_its_way: Cell<Option<Duration>>,
    /// Since when that is so.
    idle_since: Cell<Instant>,
    evicted: Cell<bool>,
    /// Told to stop once; aborted if the next deadline passes too.
    stopping: Cell<bool>,
    /// Who wants to know that the peer has left, while nobody reads from the connection.
    watcher: RefCell<Option<Waker>>,
    hung_up: Cell<bool>,
    /// The peer has ended its direction, and may: it has left only when both are ended.
    half_closed: Cell<bool>,
    /// Who says goodbye before the connection ends, where the protocol has a word for it.
    farewell: RefCell<Option<Waker>>,
    leaving: Cell<bool>,
}

/// A connection's slot in the table; gives it back when dropped.
pub(crate) struct ConnectionGuard {
    connections: Rc<Connections>,
    key: usize,
    entry: Rc<Entry>,
    socket: WatchedSocket,
    /// Held while the connection lasts.
    _place: Option<AddressSlot>,
    _handshake: Option<HandshakeGuard>,
}

impl Connections {
    pub(crate) fn new(limit: usize, socket_memory: Rc<SocketMemory>) -> Rc<Self> {
        Rc::new(Self {
            entries: RefCell::default(),
            limit,
            draining: Cell::new(None),
            draining_since: Cell::new(None),
            evicting: Cell::new(0),
            evicted: Counter::default(),
            socket_memory,
        })
    }

    /// Takes a connection in, to shake hands by `deadline`; `None` when the worker has all it may have.
    pub(crate) fn register(self: &Rc<Self>, socket: &Socket, deadline: Instant) -> Option<ConnectionGuard> {
        let mut entries = self.entries.borrow_mut();
        if entries.len() - self.evicting.get() >= self.limit - self.slack() {
            self.make_room(&entries);
        }
        if entries.len() >= self.limit {
            return None;
        }
        let entry = Rc::new(Entry {
            closer: socket.closer(),
            deadline: Cell::new(Some(deadline)),
            idle: Cell::new(true),
            expected: Cell::new(true),
            on_its_way: Cell::new(None),
            idle_since: Cell::new(Instant::now()),
            evicted: Cell::new(false),
            stopping: Cell::new(false),
            watcher: RefCell::default(),
            hung_up: Cell::new(false),
            half_closed: Cell::new(false),
            farewell: RefCell::default(),
            leaving: Cell::new(false),
        });
        let key = entries.insert(Rc::clone(&entry));
        let socket = self.socket_memory.watch(socket);
        Some(ConnectionGuard { connections: Rc::clone(self), key, entry, socket, _place: None, _handshake: None })
    }

    /// Places kept free as long as there are idle connections.
    fn slack(&self) -> usize {
        self.limit / 32
    }

    /// Ends those that have been without a request for longest, so that a flood of idle connections keeps nobody out.
    /// Many at once: finding them is a look at all.
    fn make_room(&self, entries: &Slab<Rc<Entry>>) {
        let waits = |entry: &&Rc<Entry>| entry.idle.get() && !entry.evicted.get();
        let mut idle: Vec<&Rc<Entry>> = entries.iter().map(|(_, entry)| entry).filter(waits).collect();
        let most = (self.slack().max(1)).min(idle.len());
        if most == 0 {
            return;
        }
        idle.select_nth_unstable_by_key(most - 1, |entry| entry.idle_since.get());
        for entry in &idle[..most] {
            entry.evicted.set(true);
            entry.closer.abort();
            self.evicting.set(self.evicting.get() + 1);
            self.evicted.increment();
        }
    }

    /// Ends them all at once.
    pub(crate) fn abort(&self) {
        self.entries.borrow().iter().for_each(|(_, entry)| entry.closer.abort());
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.borrow().len()
    }

    /// Ends what has missed its deadline: first by ending its input, which lets it say goodbye, then the hard way. Tells
    /// those who watch for it that their peer has left.
    pub(crate) fn sweep(&self, now: Instant) {
        for (_, entry) in self.entries.borrow().iter() {
            if entry.watcher.borrow().is_some() && entry.has_left() {
                entry.hung_up.set(true);
                entry.watcher.take().into_iter().for_each(Waker::wake);
            }
            if entry.deadline.get().is_some_and(|deadline| deadline <= now) {
                entry.stop(now);
            }
        }
    }

    /// From now on a connection may be idle for `idle` and no longer; those that can say goodbye are told to.
    pub(crate) fn drain(&self, now: Instant, idle: Duration) {
        self.draining.set(Some(idle));
        self.draining_since.set(Some(now));
        for (_, entry) in self.entries.borrow().iter() {
            if entry.idle.get() && !entry.stopping.get() {
                let earlier = entry.deadline.get().map_or(now + idle, |deadline| deadline.min(now + idle));
                entry.deadline.set(Some(earlier));
            }
            entry.say_goodbye();
        }
    }

    /// Whether, in a drain, no connection has a request, not even one that was on its way when the drain began.
    pub(crate) fn are_quiet(&self, now: Instant) -> bool {
        let Some(since) = self.draining_since.get() else { return false };
        self.entries.borrow().iter().all(|(_, entry)| entry.is_quiet(since, now))
    }

    /// Ends those without a request now.
    pub(crate) fn end_quiet(&self, now: Instant) {
        let Some(since) = self.draining_since.get() else { return };
        for (_, entry) in self.entries.borrow().iter() {
            if entry.is_quiet(since, now) && !entry.stopping.get() && !entry.closer.has_unread() {
                entry.stop(now);
            }
        }
    }
}

impl Entry {
    fn has_left(&self) -> bool {
        if self.half_closed.get() { self.closer.is_broken() } else { self.closer.is_hung_up() }
    }

    /// Whether no request runs or arrives, nor can be on its way since before `drain_began`.
    fn is_quiet(&self, drain_began: Instant, now: Instant) -> bool {
        if !self.idle.get() || self.expected.get() {
            return false;
        }
        let on_its_way = self.on_its_way.get().unwrap_or_else(|| {
            let round_trip = self.closer.round_trip().unwrap_or(limits::DRAIN_IDLE);
            (limits::DRAIN_QUIET + round_trip).min(limits::DRAIN_IDLE)
        });
        self.on_its_way.set(Some(on_its_way));
        now >= self.idle_since.get().max(drain_began) + on_its_way
    }

    /// Whether somebody does so now.
    fn say_goodbye(&self) -> bool {
        let farewell = self.farewell.take();
        if farewell.is_some() {
            self.leaving.set(true);
        }
        farewell.map(Waker::wake).is_some()
    }

    fn stop(&self, now: Instant) {
        if self.say_goodbye() {
            self.deadline.set(Some(now + limits::LINGER));
        } else if self.stopping.replace(true) {
            self.closer.abort();
        } else {
            self.closer.stop_reading();
            self.deadline.set(Some(now + limits::LINGER));
        }
    }
}

impl ConnectionGuard {
    /// To be called after parts of bodies were sent or received: kernel memory that the peer does not free is counted.
    pub(crate) fn carried(&self) {
        self.socket.carried();
    }

    /// What the connection holds in the kernel, to say for which account.
    pub(crate) fn socket_use(&self) -> Rc<SocketUse> {
        self.socket.usage()
    }

    /// The connection is about to be closed: bytes that its peer does not take are kept for a while, not for ever.
    pub(crate) fn closes(&self) {
        self.socket.closes();
    }

    /// Something is to arrive by `deadline`.
    pub(crate) fn expect_by(&self, deadline: Instant) {
        self.entry.expected.set(true);
        self.entry.deadline.set(Some(deadline));
    }

    /// Counts for its address while it lasts.
    pub(crate) fn counts_for(&mut self, slot: Option<AddressSlot>) {
        self._place = slot;
    }

    /// Counts as a handshake until [`Self::has_shaken_hands`].
    pub(crate) fn shakes_hands(&mut self, handshake: HandshakeGuard) {
        self._handshake = Some(handshake);
    }

    pub(crate) fn has_shaken_hands(&mut self) {
        self._handshake = None;
    }

    /// No request is running; one may begin until `deadline`.
    pub(crate) fn idle_until(&self, deadline: Instant) {
        self.socket.rests();
        self.entry.idle.set(true);
        self.entry.expected.set(false);
        self.entry.idle_since.set(Instant::now());
        let draining = self.connections.draining.get().map(|idle| Instant::now() + idle);
        self.entry.deadline.set(Some(draining.map_or(deadline, |draining| deadline.min(draining))));
    }

    /// Resolves when the peer has left, within a tick: for a connection that is not read from, and so does not see it.
    pub(crate) fn poll_hung_up(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.entry.hung_up.get() {
            return Poll::Ready(());
        }
        self.entry.watcher.replace(Some(cx.waker().clone()));
        Poll::Pending
    }

    /// Resolves when the peer, which has ended its direction, has left: the connection is of no use in the other one.
    pub(crate) fn poll_broken(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.entry.half_closed.set(true);
        self.poll_hung_up(cx)
    }

    /// Resolves when the connection is to end and its peer to be told first: what runs on it may end, nothing new should
    /// come.
    pub(crate) fn poll_leave(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.entry.leaving.get() || self.connections.draining.get().is_some() {
            return Poll::Ready(());
        }
        let mut farewell = self.entry.farewell.borrow_mut();
        if !farewell.as_ref().is_some_and(|farewell| farewell.will_wake(cx.waker())) {
            *farewell = Some(cx.waker().clone());
        }
        Poll::Pending
    }

    /// A request is running, for as long as it takes.
    pub(crate) fn busy(&self) {
        self.entry.idle.set(false);
        self.entry.expected.set(false);
        self.entry.deadline.set(None);
        self.entry.watcher.take();
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.connections.entries.borrow_mut().remove(self.key);
        if self.entry.evicted.get() {
            self.connections.evicting.set(self.connections.evicting.get() - 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use std::sync::Arc;

    use gw_shared::runtime::Driver;

    use super::*;
    use crate::memory::sockets::SocketBudget;
    use crate::ownership::WorkerId;

    #[test]
    fn the_limit_holds_and_places_come_back() {
        with_socket(|socket| {
            let connections = connections(1);
            let first = connections.register(socket, Instant::now());
            assert!(first.is_some() && connections.register(socket, Instant::now()).is_none());
            drop(first);
            assert_eq!(connections.len(), 0);
            assert!(connections.register(socket, Instant::now()).is_some());
        });
    }

    #[test]
    fn deadlines_pass_on_virtual_time_and_running_requests_have_none() {
        with_socket(|socket| {
            let (connections, start) = (connections(1), Instant::now());
            let second = Duration::from_secs(1);
            let guard = connections.register(socket, start + second).unwrap();
            connections.sweep(start);
            assert!(!guard.entry.stopping.get());
            guard.busy();
            connections.sweep(start + 100 * second);
            assert!(!guard.entry.stopping.get());
            guard.idle_until(start + 200 * second);
            connections.sweep(start + 199 * second);
            assert!(!guard.entry.stopping.get());
            connections.sweep(start + 201 * second);
            assert!(guard.entry.stopping.get());
            assert_eq!(guard.entry.deadline.get(), Some(start + 201 * second + limits::LINGER));
        });
    }

    #[test]
    fn a_drain_shortens_what_is_idle_and_tells_who_wants_to_know() {
        with_socket(|socket| {
            let (connections, start) = (connections(3), Instant::now());
            let second = Duration::from_secs(1);
            let [idle, early, busy] =
                [75, 2, 75].map(|seconds| connections.register(socket, start + seconds * second).unwrap());
            busy.busy();
            let mut cx = Context::from_waker(Waker::noop());
            assert!(busy.poll_leave(&mut cx).is_pending());
            connections.drain(start, 5 * second);
            assert!(busy.poll_leave(&mut cx).is_ready());
            assert_eq!(idle.entry.deadline.get(), Some(start + 5 * second));
            assert_eq!(early.entry.deadline.get(), Some(start + 2 * second));
            assert_eq!(busy.entry.deadline.get(), None);
            busy.idle_until(start + 75 * second);
            assert!(busy.entry.deadline.get().unwrap() < start + 75 * second);
        });
    }

    #[test]
    fn a_drain_waits_for_requests_on_their_way_and_for_no_other() {
        with_socket(|socket| {
            let connections = connections(4);
            let register = || connections.register(socket, Instant::now() + limits::IDLE).unwrap();
            let (idle, busy) = (register(), register());
            idle.idle_until(Instant::now() + limits::IDLE);
            busy.busy();
            let began = Instant::now();
            // Longer than any request is on its way.
            let later = began + limits::DRAIN_IDLE;
            assert!(!connections.are_quiet(later), "no drain");
            connections.drain(began, limits::DRAIN_IDLE);
            assert!(!connections.are_quiet(later), "a request runs");
            drop(busy);
            assert!(!connections.are_quiet(began) && connections.are_quiet(later));
            idle.expect_by(later);
            assert!(!connections.are_quiet(later), "a head has begun");
            idle.idle_until(later + limits::IDLE);
            let fresh = register();
            assert!(!connections.are_quiet(later), "a handshake");
            drop(fresh);
            connections.end_quiet(began);
            assert!(!idle.entry.stopping.get());
            connections.end_quiet(later);
            assert!(idle.entry.stopping.get());
        });
    }

    #[test]
    fn those_idle_for_longest_make_room_and_running_requests_do_not() {
        with_socket(|socket| {
            let (connections, now) = (connections(64), Instant::now());
            let register = || connections.register(socket, now);
            let mut all: Vec<ConnectionGuard> = (0..62).map(|_| register().unwrap()).collect();
            all[0].busy();
            all[1].idle_until(now);
            assert_eq!(connections.evicted.value(), 0);
            all.push(register().unwrap());
            let evicted = |all: &[ConnectionGuard]| -> Vec<usize> {
                (0..all.len()).filter(|at| all[*at].entry.evicted.get()).collect()
            };
            assert_eq!((connections.evicted.value(), evicted(&all)), (2, vec![2, 3]));
            all.push(register().unwrap());
            // Full, and two are on their way out: two more have to go.
            assert!(register().is_none());
            assert_eq!((connections.evicted.value(), evicted(&all)), (4, vec![2, 3, 4, 5]));
            drop(all.drain(2..6).collect::<Vec<_>>());
            assert_eq!((connections.evicting.get(), connections.len()), (0, 60));
            all.iter().for_each(ConnectionGuard::busy);
            while let Some(guard) = register() {
                guard.busy();
                all.push(guard);
            }
            assert_eq!((connections.evicted.value(), connections.len()), (4, 64));
        });
    }

    fn connections(limit: usize) -> Rc<Connections> {
        let budget = Arc::new(SocketBudget::new(usize::MAX, 1));
        Connections::new(limit, SocketMemory::new(WorkerId(0), budget))
    }

    fn with_socket(test: impl FnOnce(&Socket) + 'static) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        Driver::choose()
            .unwrap()
            .block_on(async move { test(&Socket::connect(address, None).await.unwrap()) })
            .unwrap();
    }
}
