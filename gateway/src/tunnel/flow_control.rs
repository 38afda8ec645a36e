//! How fast a tunnel may go and how much it may hold: measures it, and sets its windows at both ends.
//!
//! The gateway decides for both directions, and one end changes at a time: h2 reads nothing while SETTINGS or their
//! acknowledgement wait to be written, so two ends that are full and both change would wait for each other. The next
//! change therefore waits for the agent's answer, which comes after its SETTINGS.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use gw_shared::net::{Gauge, Socket};
use gw_shared::tunnel::control::ToAgent;
use gw_shared::tunnel::settings;
use gw_shared::tunnel::unread::{UnreadBodies, UnreadBody};
use gw_shared::tunnel::window::{self, Demand, Traffic, WindowTuner};
use h2::RecvStream;

use super::session::Session;
use crate::error::Error;
use crate::http2::frame_meter::Metered;
use crate::limits;
use crate::memory::relay::AccountMemory;

/// The pace of one tunnel.
pub(crate) struct FlowControl {
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
    held: UnreadBodies,
    /// Bytes committed to streams that hold more than a window, beyond that window.
    excess: Cell<usize>,
    memory: AccountMemory,
    /// When the agent was told a window that it has not confirmed yet, and how many streams there were.
    told: Cell<Option<Instant>>,
    told_streams: Cell<usize>,
    /// How often the window was changed: SETTINGS that were sent after the first.
    changes: Cell<u64>,
    /// The agent's quickest answer: longer than the round trip of TCP if there is a proxy between.
    quickest_answer: Cell<Option<Duration>>,
    /// Open streams that the connection window is for. Not those that the agent allows: it may claim any number.
    connection_streams: Cell<usize>,
}

impl FlowControl {
    pub(crate) fn new(socket: &Socket, memory: AccountMemory) -> Self {
        let last_received = socket.last_received();
        Self {
            gauge: socket.gauge(),
            next_look: Cell::new(last_received.get()),
            last_received,
            tuner: RefCell::default(),
            window: Cell::new(window::FIRST),
            streams: Cell::new(0),
            quiet_since: Cell::new(socket.last_received().get()),
            held: UnreadBodies::default(),
            excess: Cell::new(0),
            memory,
            told: Cell::new(None),
            told_streams: Cell::new(0),
            changes: Cell::new(0),
            quickest_answer: Cell::new(None),
            connection_streams: Cell::new(settings::FIRST_STREAMS),
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
        let window = self.window.get() as usize;
        self.memory.enter(window)?;
        self.streams.set(self.streams.get() + 1);
        let exceeded = self.streams.get() * window > window::TUNNEL_BUDGET || self.memory.is_exceeded();
        // The connection window grows before the stream is opened.
        let outgrown = self.streams.get() > self.connection_streams.get();
        if outgrown || (exceeded && self.window.get() > window::LEAST) {
            self.next_look.set(self.last_received.get());
        }
        Ok(())
    }

    /// Counts a request out.
    pub(super) fn leave(&self) {
        self.streams.set(self.streams.get() - 1);
        self.memory.leave(self.window.get() as usize);
        if self.streams.get() == 0 {
            self.quiet_since.set(self.last_received.get());
            self.set_excess(0);
        }
    }

    /// Counts what `body` holds.
    pub(super) fn watch(&self, body: &mut RecvStream) -> UnreadBody {
        self.held.watch(body)
    }

    /// Called whenever the connection is about to be driven: looks now and then, and changes what should be otherwise.
    pub(super) fn look(&self, session: &Session, connection: &mut h2::client::Connection<Metered, Bytes>) {
        let now = self.last_received.get();
        if now < self.next_look.get() {
            return;
        }
        self.next_look.set(now + window::INTERVAL);
        self.fit_connection_window(connection);
        let Some(traffic) = self.traffic() else { return };
        let held = self.held.bytes();
        let demand = Demand { streams: self.streams.get(), unread: &held };
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

    fn fit_connection_window(&self, connection: &mut h2::client::Connection<Metered, Bytes>) {
        let streams = connection_streams(self.streams.get(), self.connection_streams.get());
        if self.connection_streams.replace(streams) != streams {
            connection.set_target_window_size(settings::connection_window(streams));
        }
    }

    /// Tells the agent the window. Its answer says how long the whole path is.
    pub(super) fn tell(&self, session: &Session) {
        self.told.set(Some(Instant::now()));
        self.told_streams.set(self.streams.get());
        session.tell(&ToAgent::Window { bytes: self.window.get() });
    }

    /// SETTINGS that the agent has to have acknowledged when it answers.
    pub(super) fn settings_sent(&self) -> u64 {
        1 + self.changes.get()
    }

    /// How long the agent has owed an answer.
    pub(super) fn unanswered_for(&self, now: Instant) -> Duration {
        self.told.get().map_or(Duration::ZERO, |told| now.saturating_duration_since(told))
    }

    /// How long the agent may owe an answer to a change that it has acknowledged, or not.
    pub(super) fn answered_within(&self, is_acknowledged: bool) -> Duration {
        answered_within(self.excess.get(), is_acknowledged)
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
        self.changes.set(self.changes.get() + 1);
        self.tuner.borrow_mut().set(window);
        self.window.set(window);
    }

    fn set_excess(&self, bytes: usize) {
        self.memory.remove(self.excess.replace(bytes));
        self.memory.add(bytes);
    }
}

fn answered_within(excess: usize, is_acknowledged: bool) -> Duration {
    if excess > 0 && !is_acknowledged { limits::WINDOW_ACKNOWLEDGED_WITHIN } else { limits::WINDOW_ANSWERED_WITHIN }
}

/// Streams that the connection window is to be for, with `open` ones and a window for `before`: a power of two that is
/// halved only when three quarters of it are not needed.
fn connection_streams(open: usize, before: usize) -> usize {
    if open <= before && open >= before / 4 {
        return before;
    }
    open.next_power_of_two().clamp(settings::FIRST_STREAMS, settings::STREAMS_MAX.next_power_of_two())
}

impl Drop for FlowControl {
    fn drop(&mut self) {
        self.set_excess(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_connection_window_has_room_for_the_open_streams_and_little_more() {
        let first = settings::FIRST_STREAMS;
        let mut before = first;
        for open in (0..settings::STREAMS_MAX).chain((0..settings::STREAMS_MAX).rev()) {
            let streams = connection_streams(open, before);
            assert!(streams >= open && streams <= first.max(4 * open), "{open}: {streams}");
            assert!(settings::connection_window(streams) >= settings::connection_window(open));
            before = streams;
        }
        assert_eq!(before, first);
        // One that comes and goes changes nothing.
        assert_eq!(connection_streams(first, connection_streams(first + 1, first)), 2 * first);
    }

    #[test]
    fn a_change_that_bounds_what_streams_hold_is_to_be_acknowledged_sooner() {
        assert_eq!(answered_within(1, false), Duration::from_secs(60));
        for (excess, is_acknowledged) in [(0, false), (0, true), (1, true)] {
            assert_eq!(answered_within(excess, is_acknowledged), limits::WINDOW_ANSWERED_WITHIN);
        }
    }
}
