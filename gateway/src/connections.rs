//! The connections of one worker: how many, what each must do by when, and which can be closed for a drain.
//!
//! One sweep a tick over all of them instead of a timer each: setting a deadline is a store.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use gw_shared::net::Closer;
use slab::Slab;

use crate::limits;

/// All connections of a worker, up to a limit.
pub(crate) struct Connections {
    entries: RefCell<Slab<Rc<Entry>>>,
    limit: usize,
    /// In a drain, how long a connection may be idle.
    draining: Cell<Option<Duration>>,
}

struct Entry {
    closer: Closer,
    deadline: Cell<Option<Instant>>,
    /// No request is being served.
    idle: Cell<bool>,
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

/// A connection's place in the table; gives it back when dropped.
pub(crate) struct Registered {
    connections: Rc<Connections>,
    key: usize,
    entry: Rc<Entry>,
}

impl Connections {
    pub(crate) fn new(limit: usize) -> Rc<Self> {
        Rc::new(Self { entries: RefCell::default(), limit, draining: Cell::new(None) })
    }

    /// Takes a connection in, to shake hands by `deadline`; `None` when the worker has all it may have.
    pub(crate) fn register(self: &Rc<Self>, closer: Closer, deadline: Instant) -> Option<Registered> {
        let mut entries = self.entries.borrow_mut();
        if entries.len() >= self.limit {
            return None;
        }
        let entry = Rc::new(Entry {
            closer,
            deadline: Cell::new(Some(deadline)),
            idle: Cell::new(true),
            stopping: Cell::new(false),
            watcher: RefCell::default(),
            hung_up: Cell::new(false),
            half_closed: Cell::new(false),
            farewell: RefCell::default(),
            leaving: Cell::new(false),
        });
        let key = entries.insert(Rc::clone(&entry));
        Some(Registered { connections: Rc::clone(self), key, entry })
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
        for (_, entry) in self.entries.borrow().iter() {
            if entry.idle.get() && !entry.stopping.get() {
                let earlier = entry.deadline.get().map_or(now + idle, |deadline| deadline.min(now + idle));
                entry.deadline.set(Some(earlier));
            }
            entry.say_goodbye();
        }
    }
}

impl Entry {
    fn has_left(&self) -> bool {
        if self.half_closed.get() { self.closer.is_broken() } else { self.closer.is_hung_up() }
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

impl Registered {
    /// Something is to arrive by `deadline`.
    pub(crate) fn expect_by(&self, deadline: Instant) {
        self.entry.deadline.set(Some(deadline));
    }

    /// No request is running; one may begin until `deadline`.
    pub(crate) fn idle_until(&self, deadline: Instant) {
        self.entry.idle.set(true);
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
        self.entry.farewell.replace(Some(cx.waker().clone()));
        Poll::Pending
    }

    /// A request is running, for as long as it takes.
    pub(crate) fn busy(&self) {
        self.entry.idle.set(false);
        self.entry.deadline.set(None);
        self.entry.watcher.take();
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.connections.entries.borrow_mut().remove(self.key);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gw_shared::net::Socket;
    use gw_shared::runtime::Driver;

    use super::*;

    #[test]
    fn the_limit_holds_and_places_come_back() {
        with_socket(|socket| {
            let connections = Connections::new(1);
            let first = connections.register(socket.closer(), Instant::now());
            assert!(first.is_some() && connections.register(socket.closer(), Instant::now()).is_none());
            drop(first);
            assert_eq!(connections.len(), 0);
            assert!(connections.register(socket.closer(), Instant::now()).is_some());
        });
    }

    #[test]
    fn deadlines_pass_on_virtual_time_and_running_requests_have_none() {
        with_socket(|socket| {
            let (connections, start) = (Connections::new(1), Instant::now());
            let second = Duration::from_secs(1);
            let registered = connections.register(socket.closer(), start + second).unwrap();
            connections.sweep(start);
            assert!(!registered.entry.stopping.get());
            registered.busy();
            connections.sweep(start + 100 * second);
            assert!(!registered.entry.stopping.get());
            registered.idle_until(start + 200 * second);
            connections.sweep(start + 199 * second);
            assert!(!registered.entry.stopping.get());
            connections.sweep(start + 201 * second);
            assert!(registered.entry.stopping.get());
            assert_eq!(registered.entry.deadline.get(), Some(start + 201 * second + limits::LINGER));
        });
    }

    #[test]
    fn a_drain_shortens_what_is_idle_and_tells_who_wants_to_know() {
        with_socket(|socket| {
            let (connections, start) = (Connections::new(3), Instant::now());
            let second = Duration::from_secs(1);
            let [idle, early, busy] =
                [75, 2, 75].map(|seconds| connections.register(socket.closer(), start + seconds * second).unwrap());
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

    fn with_socket(test: impl FnOnce(&Socket) + 'static) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        Driver::choose().unwrap().block_on(async move { test(&Socket::connect(address).await.unwrap()) }).unwrap();
    }
}
