//! Connections of one worker: their number, deadlines, and end in a drain.
//!
//! One sweep per tick checks all deadlines. There is no timer per connection, so setting a deadline
//! is one store.

pub(crate) mod handshakes;
pub(crate) mod unfinished;
mod waits;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::limits;
use gw_interface::rate_limit::{AddressSlot, Claimant};
use gw_shared::net::{Closer, Socket};
use gw_telemetry::counters::Counter;
use slab::Slab;

use crate::connections::handshakes::{HandshakeGuard, Handshakes};
use crate::connections::unfinished::UnfinishedHeads;
use crate::connections::waits::Waits;
use crate::memory::sockets::{SocketMemory, SocketUse, WatchedSocket};

/// Table of the connections of a worker.
pub(crate) struct Connections {
    entries: RefCell<Slab<Rc<ConnectionEntry>>>,
    limit: usize,
    /// Time for which a connection may be idle in a drain; `None` without a drain.
    draining: Cell<Option<Duration>>,
    /// Start of the drain.
    draining_since: Cell<Option<Instant>>,
    /// Number of connections that were ended to make room and still have an entry.
    evicting: Cell<usize>,
    /// Number of connections that were ended to make room.
    pub(crate) evicted: Counter,
    discards: Waits,
    empty_bodies: Waits,
    unread_refusals: Waits,
    unfinished_heads: Rc<Handshakes>,
    unfinished_blocks: Rc<Handshakes>,
    /// Number of connections that were ended because they had the oldest incomplete head.
    pub(crate) ended_unfinished: Counter,
    socket_memory: Rc<SocketMemory>,
}

struct ConnectionEntry {
    closer: Closer,
    deadline: Cell<Option<Instant>>,
    /// No request is served.
    idle: Cell<bool>,
    /// The peer is expected to send: a handshake, its first request, the rest of a head.
    expected: Cell<bool>,
    /// Time for a request that was sent before the drain began to arrive; `None` until first
    /// computed.
    on_its_way: Cell<Option<Duration>>,
    /// Time since which the connection is idle.
    idle_since: Cell<Instant>,
    /// Ended to make room.
    evicted: Cell<bool>,
    /// The input was ended. The connection is aborted at the next deadline.
    stopping: Cell<bool>,
    /// Task to wake when the peer has left, for a connection that is not read from.
    watcher: RefCell<Option<Waker>>,
    /// The peer has left.
    hung_up: Cell<bool>,
    /// What shows that the peer has left.
    left: Cell<Left>,
    /// Task to wake to send GOAWAY before the connection ends (HTTP/2).
    goaway_task: RefCell<Option<Waker>>,
    /// The connection is to send GOAWAY.
    leaving: Cell<bool>,
}

/// Entry of a connection in the table; removed on drop.
pub(crate) struct ConnectionGuard {
    connections: Rc<Connections>,
    key: usize,
    entry: Rc<ConnectionEntry>,
    socket: WatchedSocket,
    /// Count against the limit of the client address.
    address_slot: Option<AddressSlot>,
    /// Counts the handshake, or an incomplete head. Boxed: most connections are idle.
    unfinished: Cell<Option<Box<HandshakeGuard>>>,
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
            discards: Waits::new(limits::DISCARDS, limits::DISCARDS_PER_ADDRESS),
            empty_bodies: Waits::new(limits::EMPTY_BODIES, limits::EMPTY_BODIES_PER_ADDRESS),
            unread_refusals: Waits::new(
                limits::UNREAD_REFUSALS,
                limits::UNREAD_REFUSALS_PER_ADDRESS,
            ),
            unfinished_heads: Handshakes::new(
                limits::UNFINISHED_HEADS,
                limits::UNFINISHED_HEADS_PER_ADDRESS,
            ),
            unfinished_blocks: Handshakes::new(
                limits::UNFINISHED_BLOCKS,
                limits::UNFINISHED_BLOCKS_PER_ADDRESS,
            ),
            ended_unfinished: Counter::default(),
            socket_memory,
        })
    }

    /// Adds a connection, whose handshake must be complete by `deadline`. `None` if the table is
    /// full.
    pub(crate) fn register(
        self: &Rc<Self>,
        socket: &Socket,
        deadline: Instant,
    ) -> Option<ConnectionGuard> {
        let mut entries = self.entries.borrow_mut();
        if entries.len() - self.evicting.get() >= self.limit - self.slack() {
            self.make_room(&entries);
        }
        if entries.len() >= self.limit {
            return None;
        }
        let entry = Rc::new(ConnectionEntry {
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
            left: Cell::new(Left::EndsDirection),
            goaway_task: RefCell::default(),
            leaving: Cell::new(false),
        });
        let key = entries.insert(Rc::clone(&entry));
        let socket = self.socket_memory.watch(socket);
        Some(ConnectionGuard {
            connections: Rc::clone(self),
            key,
            entry,
            socket,
            address_slot: None,
            unfinished: Cell::default(),
        })
    }

    /// Number of entries kept free as long as there are idle connections.
    fn slack(&self) -> usize {
        self.limit / 32
    }

    /// Ends the connections that have been idle for longest, so that a flood of idle connections
    /// does not block new ones. Ends several at once, because each search visits all entries.
    fn make_room(&self, entries: &Slab<Rc<ConnectionEntry>>) {
        let is_idle = |entry: &&Rc<ConnectionEntry>| entry.idle.get() && !entry.evicted.get();
        let mut idle: Vec<&Rc<ConnectionEntry>> = entries
            .iter()
            .map(|(_, entry)| entry)
            .filter(is_idle)
            .collect();
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

    /// Aborts all connections.
    pub(crate) fn abort(&self) {
        self.entries
            .borrow()
            .iter()
            .for_each(|(_, entry)| entry.closer.abort());
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.borrow().len()
    }

    /// Number of refused requests whose rest is received.
    #[cfg(feature = "support")]
    pub(crate) fn discards(&self) -> usize {
        self.discards.len()
    }

    /// Ends connections that have missed their deadline: first by ending their input, which lets
    /// them send GOAWAY, then by an abort. Wakes tasks that watch a peer that has left.
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

    /// Begins a drain: connections may be idle for `idle` from now on, HTTP/2 connections send
    /// GOAWAY, and the rests of refused requests are no longer received.
    pub(crate) fn drain(&self, now: Instant, idle: Duration) {
        self.draining.set(Some(idle));
        self.draining_since.set(Some(now));
        for (_, entry) in self.entries.borrow().iter() {
            if entry.idle.get() && !entry.stopping.get() {
                let earlier = entry
                    .deadline
                    .get()
                    .map_or(now + idle, |deadline| deadline.min(now + idle));
                entry.deadline.set(Some(earlier));
            }
            entry.request_goaway();
        }
        self.discards.end();
    }

    /// Whether, in a drain, no connection has a request, including one sent before the drain began.
    pub(crate) fn are_quiet(&self, now: Instant) -> bool {
        let Some(since) = self.draining_since.get() else {
            return false;
        };
        self.entries
            .borrow()
            .iter()
            .all(|(_, entry)| entry.is_quiet(since, now))
    }

    /// Ends the connections without a request.
    pub(crate) fn end_quiet(&self, now: Instant) {
        let Some(since) = self.draining_since.get() else {
            return;
        };
        for (_, entry) in self.entries.borrow().iter() {
            if entry.is_quiet(since, now) && !entry.stopping.get() && !entry.closer.has_unread() {
                entry.stop(now);
            }
        }
    }
}

/// What shows that the peer of a connection has left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    EndsDirection,
    /// The peer may end its direction and still receive.
    EndsBothDirections,
}

impl ConnectionEntry {
    fn has_left(&self) -> bool {
        match self.left.get() {
            Left::EndsDirection => self.closer.is_hung_up(),
            Left::EndsBothDirections => self.closer.is_broken(),
        }
    }

    /// Whether no request runs, arrives, or can still arrive that was sent before `drain_began`.
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

    /// Wakes the task that sends GOAWAY. Returns whether there is one.
    fn request_goaway(&self) -> bool {
        let task = self.goaway_task.take();
        if task.is_some() {
            self.leaving.set(true);
        }
        task.map(Waker::wake).is_some()
    }

    fn stop(&self, now: Instant) {
        if self.request_goaway() {
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
    /// To be called after parts of bodies were sent or received. Measures kernel memory from time
    /// to time.
    pub(crate) fn carried(&self) {
        self.socket.carried();
    }

    /// Kernel memory of the connection.
    pub(crate) fn socket_use(&self) -> Rc<SocketUse> {
        self.socket.usage()
    }

    /// To be called before the connection is closed. Bounds the time for which the kernel keeps
    /// unacknowledged bytes.
    pub(crate) fn closes(&self) {
        self.socket.closes();
    }

    /// The peer has to send by `deadline`.
    pub(crate) fn expect_by(&self, deadline: Instant) {
        self.entry.expected.set(true);
        self.entry.deadline.set(Some(deadline));
    }

    /// Extends the deadline of the connection by the time in which [`Self::discard`] receives the
    /// rest of a request.
    pub(crate) fn discards(&self) {
        self.expect_by(Instant::now() + limits::DISCARD_WITHIN + limits::LINGER);
    }

    /// Runs `discard`, which receives the rest of a request of the peer. Returns `None` if that
    /// takes too long, or if the rest of another request takes its place.
    pub(crate) async fn discard<T>(&self, discard: impl Future<Output = T>) -> Option<T> {
        let within = if self.is_draining() {
            limits::LINGER
        } else {
            limits::DISCARD_WITHIN
        };
        let discards = &self.connections.discards;
        discards.run(self.claimant(), within, discard).await
    }

    /// Runs `end`, which waits for the end of a request that announced an empty body. Returns
    /// `None` if that takes too long, or if another such request takes its place.
    pub(crate) async fn empty_body<T>(&self, end: impl Future<Output = T>) -> Option<T> {
        let bodies = &self.connections.empty_bodies;
        bodies.run(self.claimant(), limits::HEAD, end).await
    }

    /// Runs `refusal`, which waits for the peer to take a response of the gateway. Returns `None`
    /// if that takes too long, or if another such response takes its place.
    pub(crate) async fn unread_refusal<T>(&self, refusal: impl Future<Output = T>) -> Option<T> {
        let refusals = &self.connections.unread_refusals;
        refusals.run(self.claimant(), limits::HEAD, refusal).await
    }

    /// What counts the incomplete heads of the connection.
    pub(crate) fn unfinished_heads(&self) -> UnfinishedHeads {
        UnfinishedHeads {
            connections: Rc::clone(&self.connections),
            closer: self.entry.closer.clone(),
            claimant: self.claimant(),
        }
    }

    fn claimant(&self) -> Claimant {
        Claimant::counted(self.address_slot.as_ref())
    }

    /// Holds `slot` until the connection ends.
    pub(crate) fn counts_for(&mut self, slot: Option<AddressSlot>) {
        self.address_slot = slot;
    }

    /// Counts the connection as a handshake until [`Self::has_shaken_hands`].
    pub(crate) fn shakes_hands(&mut self, handshake: HandshakeGuard) {
        self.unfinished.set(Some(Box::new(handshake)));
    }

    /// The handshake is complete, or the head that began to arrive.
    pub(crate) fn has_shaken_hands(&self) {
        self.unfinished.take();
    }

    /// Counts an incomplete head over HTTP/1.1 until [`Self::has_shaken_hands`] or [`Self::busy`],
    /// unless the connection counts already.
    pub(crate) fn begins_head(&self) {
        let counted = self.unfinished.take();
        let counted = counted.unwrap_or_else(|| Box::new(self.unfinished_heads().begin()));
        self.unfinished.set(Some(counted));
    }

    /// No request runs. The next one has to begin by `deadline`.
    pub(crate) fn idle_until(&self, deadline: Instant) {
        self.socket.rests();
        self.entry.idle.set(true);
        self.entry.expected.set(false);
        self.entry.idle_since.set(Instant::now());
        let draining = self
            .connections
            .draining
            .get()
            .map(|idle| Instant::now() + idle);
        self.entry.deadline.set(Some(
            draining.map_or(deadline, |draining| deadline.min(draining)),
        ));
    }

    /// Whether the worker drains: the connection should end after its running request.
    pub(crate) fn is_draining(&self) -> bool {
        self.connections.draining.get().is_some()
    }

    /// Resolves within a tick after the peer has left. For a connection that is not read from,
    /// which would not notice.
    pub(crate) fn poll_hung_up(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.entry.hung_up.get() {
            return Poll::Ready(());
        }
        self.entry.watcher.replace(Some(cx.waker().clone()));
        Poll::Pending
    }

    /// Whether the peer has reset the connection, if this side has not ended its direction.
    pub(crate) fn is_broken(&self) -> bool {
        self.entry.closer.is_broken()
    }

    /// As [`Self::poll_hung_up`], for a peer that may end its direction and still receive.
    pub(crate) fn poll_broken(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.entry.left.set(Left::EndsBothDirections);
        self.poll_hung_up(cx)
    }

    /// Resolves when the connection should send GOAWAY: running requests may finish, new ones are
    /// not accepted.
    pub(crate) fn poll_leave(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.entry.leaving.get() || self.is_draining() {
            return Poll::Ready(());
        }
        let mut task = self.entry.goaway_task.borrow_mut();
        if !task.as_ref().is_some_and(|task| task.will_wake(cx.waker())) {
            *task = Some(cx.waker().clone());
        }
        Poll::Pending
    }

    /// A request runs. There is no deadline.
    pub(crate) fn busy(&self) {
        self.entry.idle.set(false);
        self.entry.expected.set(false);
        self.entry.deadline.set(None);
        self.entry.watcher.take();
        self.unfinished.take();
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.connections.entries.borrow_mut().remove(self.key);
        if self.entry.evicted.get() {
            self.connections
                .evicting
                .set(self.connections.evicting.get() - 1);
        }
    }
}

#[cfg(test)]
mod tests;
