//! How fast a tunnel may go and how much it may hold: measures it, and sets its windows at both ends.
//!
//! The gateway decides for both directions, and one end changes at a time: h2 reads nothing while SETTINGS or their
//! acknowledgement wait to be written, so two ends that are full and both change would wait for each other. The next
//! change therefore waits for the agent's answer, which comes after its SETTINGS.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use gw_shared::net::{Gauge, Socket, TlsStream};
use gw_shared::tunnel::control::ToAgent;
use gw_shared::tunnel::held::{Held, Watched};
use gw_shared::tunnel::settings;
use gw_shared::tunnel::window::{self, Demand, Traffic, WindowTuner};
use h2::RecvStream;

use super::session::Session;
use crate::error::Error;

/// What the relayed requests of one worker may hold.
pub(crate) struct RelayMemory {
    budget: usize,
    /// What all open streams can hold with their windows of now.
    committed: Cell<usize>,
    streams: Cell<usize>,
}

impl RelayMemory {
    pub(crate) fn new(budget: usize) -> Rc<Self> {
        Rc::new(Self { budget, committed: Cell::default(), streams: Cell::default() })
    }

    /// What a tunnel with `streams` that commits `own` may commit: its even share, and what others leave.
    fn allowance(&self, streams: usize, own: usize) -> usize {
        let share = self.budget / self.streams.get().max(1) * streams;
        self.budget.saturating_sub(self.committed.get() - own).max(share).min(window::TUNNEL_BUDGET)
    }

    fn is_exceeded(&self) -> bool {
        self.committed.get() > self.budget
    }

    /// Whether even the least windows have no room for another stream.
    fn is_full(&self) -> bool {
        (self.streams.get() + 1) * window::LEAST as usize > self.budget
    }

    fn add(&self, bytes: usize) {
        self.committed.set(self.committed.get() + bytes);
    }

    fn remove(&self, bytes: usize) {
        self.committed.set(self.committed.get() - bytes);
    }
}

/// The pace of one tunnel.
pub(crate) struct Pace {
    gauge: Gauge,
    /// The time, as of the last bytes: nothing else makes it worth looking.
    last_received: Rc<Cell<Instant>>,
    next_look: Cell<Instant>,
    tuner: RefCell<WindowTuner>,
    /// As in the tuner.
    window: Cell<u32>,
    streams: Cell<usize>,
    /// When the last byte of the last request had come, once there is none any more.
    quiet_since: Cell<Instant>,
    held: Held,
    /// Bytes committed to streams that hold more than a window, beyond that window.
    excess: Cell<usize>,
    memory: Rc<RelayMemory>,
    /// When the agent was told a window that it has not confirmed yet, and how many streams there were.
    told: Cell<Option<Instant>>,
    told_streams: Cell<usize>,
    /// The agent's quickest answer: longer than the round trip of TCP if there is a proxy between.
    quickest_answer: Cell<Option<Duration>>,
    /// Streams that the connection window is for.
    connection_streams: Cell<usize>,
}

impl Pace {
    pub(crate) fn new(socket: &Socket, memory: Rc<RelayMemory>) -> Self {
        let last_received = socket.last_received();
        Self {
            gauge: socket.gauge(),
            next_look: Cell::new(last_received.get()),
            last_received,
            tuner: RefCell::default(),
            window: Cell::new(window::FIRST),
            streams: Cell::new(0),
            quiet_since: Cell::new(socket.last_received().get()),
            held: Held::default(),
            excess: Cell::new(0),
            memory,
            told: Cell::new(None),
            told_streams: Cell::new(0),
            quickest_answer: Cell::new(None),
            connection_streams: Cell::new(0),
        }
    }

    pub(super) fn streams(&self) -> usize {
        self.streams.get()
    }

    pub(super) fn window(&self) -> u32 {
        self.window.get()
    }

    /// Bytes that were received and that callers have not taken yet.
    pub(super) fn held_bytes(&self) -> usize {
        self.held.bytes().iter().sum()
    }

    /// How long nothing has been relayed: none while a request is under way.
    pub(super) fn quiet_for(&self, now: Instant) -> Duration {
        if self.streams.get() > 0 { Duration::ZERO } else { now.saturating_duration_since(self.quiet_since.get()) }
    }

    /// The smoothed round trip of the tunnel's connection.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        self.gauge.read().ok()?.smoothed_rtt
    }

    /// Counts a request that is about to open its stream.
    pub(super) fn enter(&self) -> Result<(), Error> {
        if self.memory.is_full() {
            return Err(Error::Overloaded("at its limit of relayed requests"));
        }
        let window = self.window.get() as usize;
        self.streams.set(self.streams.get() + 1);
        self.memory.streams.set(self.memory.streams.get() + 1);
        self.memory.add(window);
        let exceeded = self.streams.get() * window > window::TUNNEL_BUDGET || self.memory.is_exceeded();
        if exceeded && self.window.get() > window::LEAST {
            self.next_look.set(self.last_received.get());
        }
        Ok(())
    }

    /// Counts a request out.
    pub(super) fn leave(&self) {
        self.streams.set(self.streams.get() - 1);
        self.memory.streams.set(self.memory.streams.get() - 1);
        self.memory.remove(self.window.get() as usize);
        if self.streams.get() == 0 {
            self.quiet_since.set(self.last_received.get());
            self.set_excess(0);
        }
    }

    /// Counts what `body` holds.
    pub(super) fn watch(&self, body: &mut RecvStream) -> Watched {
        self.held.watch(body)
    }

    /// Called whenever the connection is about to be driven: looks now and then, and changes what should be otherwise.
    pub(super) fn look(&self, session: &Session, connection: &mut h2::client::Connection<TlsStream, Bytes>) {
        let now = self.last_received.get();
        if now < self.next_look.get() {
            return;
        }
        self.next_look.set(now + window::INTERVAL);
        let streams = connection.max_concurrent_send_streams();
        if self.connection_streams.replace(streams) != streams {
            connection.set_target_window_size(settings::connection_window(streams));
        }
        let Some(traffic) = self.traffic() else { return };
        let held = self.held.bytes();
        let demand = Demand { streams: self.streams.get(), held: &held };
        let allowance = self.memory.allowance(demand.streams, self.committed());
        let wanted = self.tuner.borrow_mut().look(now, traffic, &demand, allowance);
        if self.told.get().is_none() {
            if wanted != self.window.get() {
                // Refused while the last SETTINGS are not acknowledged: then at one of the next looks.
                if connection.set_initial_window_size(wanted).is_ok() {
                    tracing::debug!(agent = %session.agent, bytes = wanted, ?traffic, streams = demand.streams, "window");
                    self.set_window(wanted);
                    self.tell(session);
                }
            } else if demand.streams >= 2 * self.told_streams.get().max(1)
                && demand.streams * wanted as usize > allowance / 2
            {
                // The agent alone knows what its own streams hold.
                self.tell(session);
            }
        }
        self.set_excess(demand.excess(self.window.get()));
    }

    /// Tells the agent the window. Its answer says how long the whole path is.
    pub(super) fn tell(&self, session: &Session) {
        self.told.set(Some(Instant::now()));
        self.told_streams.set(self.streams.get());
        session.tell(&ToAgent::Window { bytes: self.window.get() });
    }

    /// The agent has answered.
    pub(super) fn answered(&self) {
        if let Some(told) = self.told.take() {
            let took = told.elapsed();
            self.quickest_answer.set(Some(self.quickest_answer.get().map_or(took, |quickest| quickest.min(took))));
        }
    }

    fn traffic(&self) -> Option<Traffic> {
        let info = self.gauge.read().ok()?;
        let rtt = info.shortest_rtt.unwrap_or_default().max(self.quickest_answer.get().unwrap_or_default());
        Some(Traffic { received: info.received, sent: info.acknowledged, rtt })
    }

    fn committed(&self) -> usize {
        self.streams.get() * self.window.get() as usize + self.excess.get()
    }

    fn set_window(&self, window: u32) {
        self.memory.remove(self.streams.get() * self.window.get() as usize);
        self.memory.add(self.streams.get() * window as usize);
        self.tuner.borrow_mut().set(window);
        self.window.set(window);
    }

    fn set_excess(&self, bytes: usize) {
        self.memory.remove(self.excess.replace(bytes));
        self.memory.add(bytes);
    }
}

impl Drop for Pace {
    fn drop(&mut self) {
        self.set_excess(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: usize = window::FIRST as usize;

    #[test]
    fn a_tunnel_may_commit_what_others_leave_and_never_less_than_its_share() {
        let memory = RelayMemory::new(100 * WINDOW);
        memory.streams.set(10);
        memory.add(10 * WINDOW);
        assert_eq!(memory.allowance(10, 10 * WINDOW), 100 * WINDOW);
        memory.streams.set(100);
        memory.add(80 * WINDOW);
        assert_eq!(memory.allowance(10, 10 * WINDOW), 20 * WINDOW);
        memory.add(60 * WINDOW);
        assert!(memory.is_exceeded());
        assert_eq!(memory.allowance(10, 10 * WINDOW), 10 * WINDOW);
    }

    #[test]
    fn what_one_tunnel_may_commit_is_bounded_however_much_is_left() {
        let memory = RelayMemory::new(usize::MAX);
        assert_eq!(memory.allowance(1, 0), window::TUNNEL_BUDGET);
        assert!(!memory.is_full());
    }

    #[test]
    fn least_windows_beyond_the_budget_are_refused() {
        let memory = RelayMemory::new(3 * window::LEAST as usize);
        memory.streams.set(2);
        assert!(!memory.is_full());
        memory.streams.set(3);
        assert!(memory.is_full());
    }
}
