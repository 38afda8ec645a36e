//! Flow control of a tunnel: measures the path and sets the HTTP/2 windows at both ends.
//!
//! The gateway chooses the windows for both directions. Only one end changes its window at a time: h2 does not read
//! while SETTINGS or their acknowledgement wait to be written, so two congested ends that both send SETTINGS would
//! deadlock. The next change waits for the agent's answer, which the agent sends after its SETTINGS.

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

/// Windows and buffered bytes of one tunnel.
pub(crate) struct FlowControl {
    gauge: Gauge,
    /// Time of the last received bytes. Used as the current time: without traffic there is nothing to measure.
    last_received: Rc<Cell<Instant>>,
    next_measurement: Cell<Instant>,
    tuner: RefCell<WindowTuner>,
    /// The window of each stream, as in `tuner`.
    window: Cell<u32>,
    streams: Cell<usize>,
    /// Time of the last byte before the last request ended. Valid while there are no requests.
    quiet_since: Cell<Instant>,
    held: UnreadBodies,
    /// Bytes that streams hold beyond their window, after the window has shrunk.
    excess: Cell<usize>,
    memory: AccountMemory,
    /// When the last window message was sent; `None` once the agent has answered it.
    announced: Cell<Option<Instant>>,
    /// Number of streams at that time.
    announced_streams: Cell<usize>,
    /// Number of SETTINGS frames sent after the first one.
    changes: Cell<u64>,
    /// Shortest time from a window message to its answer. Longer than the round trip of TCP if there is a proxy
    /// between.
    quickest_answer: Cell<Option<Duration>>,
    /// Number of open streams that the connection window is sized for. Not the number that the agent allows, which is
    /// untrusted.
    connection_streams: Cell<usize>,
}

impl FlowControl {
    pub(crate) fn new(socket: &Socket, memory: AccountMemory) -> Self {
        let last_received = socket.last_received();
        Self {
            gauge: socket.gauge(),
            next_measurement: Cell::new(last_received.get()),
            last_received,
            tuner: RefCell::default(),
            window: Cell::new(window::FIRST),
            streams: Cell::new(0),
            quiet_since: Cell::new(socket.last_received().get()),
            held: UnreadBodies::default(),
            excess: Cell::new(0),
            memory,
            announced: Cell::new(None),
            announced_streams: Cell::new(0),
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

    /// Bytes received from the agent and not yet sent to callers.
    pub(super) fn held_bytes(&self) -> usize {
        self.held.bytes().iter().sum()
    }

    /// Time since the last request ended; zero while a request runs.
    pub(super) fn quiet_for(&self, now: Instant) -> Duration {
        if self.streams.get() > 0 { Duration::ZERO } else { now.saturating_duration_since(self.quiet_since.get()) }
    }

    /// Smoothed round trip of the TCP connection.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        self.gauge.read().ok()?.smoothed_rtt
    }

    /// Counts a request before its stream is opened. Fails if there is no memory for it.
    pub(super) fn enter(&self) -> Result<(), Error> {
        let window = self.window.get() as usize;
        self.memory.enter(window)?;
        self.streams.set(self.streams.get() + 1);
        let exceeded = self.streams.get() * window > window::TUNNEL_BUDGET || self.memory.is_exceeded();
        // The connection window grows before the stream is opened.
        let outgrown = self.streams.get() > self.connection_streams.get();
        if outgrown || (exceeded && self.window.get() > window::LEAST) {
            self.next_measurement.set(self.last_received.get());
        }
        Ok(())
    }

    /// Removes a request from the count.
    pub(super) fn leave(&self) {
        self.streams.set(self.streams.get() - 1);
        self.memory.leave(self.window.get() as usize);
        if self.streams.get() == 0 {
            self.quiet_since.set(self.last_received.get());
            self.set_excess(0);
        }
    }

    /// Counts the bytes that `body` buffers.
    pub(super) fn watch(&self, body: &mut RecvStream) -> UnreadBody {
        self.held.watch(body)
    }

    /// Measures the traffic once per interval and adjusts the windows. Called before each poll of the connection.
    pub(super) fn adjust(&self, session: &Session, connection: &mut h2::client::Connection<Metered, Bytes>) {
        let now = self.last_received.get();
        if now < self.next_measurement.get() {
            return;
        }
        self.next_measurement.set(now + window::INTERVAL);
        self.fit_connection_window(connection);
        let Some(traffic) = self.traffic() else { return };
        let held = self.held.bytes();
        let demand = Demand { streams: self.streams.get(), unread: &held };
        let allowance = self.memory.allowance(demand.streams, self.committed());
        let wanted = self.tuner.borrow_mut().look(now, traffic, &demand, allowance);
        if self.announced.get().is_none() {
            if wanted != self.window.get() {
                // Fails while the last SETTINGS are not acknowledged. The next measurement tries again.
                if connection.set_initial_window_size(wanted).is_ok() {
                    tracing::debug!(agent = %session.agent, bytes = wanted, ?traffic, streams = demand.streams, "window");
                    self.set_window(wanted);
                    self.send_window(session);
                }
            } else if demand.streams >= 2 * self.announced_streams.get().max(1)
                && demand.streams * wanted as usize > allowance / 2
            {
                // The agent adjusts its end by what its own streams hold.
                self.send_window(session);
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

    /// Sends the window to the agent. The time until its answer measures the whole path.
    pub(super) fn send_window(&self, session: &Session) {
        self.announced.set(Some(Instant::now()));
        self.announced_streams.set(self.streams.get());
        session.send(&ToAgent::Window { bytes: self.window.get() });
    }

    /// Number of SETTINGS frames that the agent must have acknowledged when it answers.
    pub(super) fn settings_sent(&self) -> u64 {
        1 + self.changes.get()
    }

    /// Time since an unanswered window message; zero if there is none.
    pub(super) fn unanswered_for(&self, now: Instant) -> Duration {
        self.announced.get().map_or(Duration::ZERO, |sent| now.saturating_duration_since(sent))
    }

    /// Longest time for the answer to a window message.
    pub(super) fn answered_within(&self, is_acknowledged: bool) -> Duration {
        answered_within(self.excess.get(), is_acknowledged)
    }

    /// Records the answer to a window message.
    pub(super) fn answered(&self) {
        if let Some(sent) = self.announced.take() {
            let took = sent.elapsed();
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

/// Number of streams to size the connection window for, with `open` streams and a window for `before`. A power of two.
/// It shrinks only when less than a quarter of it is open.
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
    fn the_connection_window_fits_the_open_streams_and_at_most_four_times_as_many() {
        let first = settings::FIRST_STREAMS;
        let mut before = first;
        for open in (0..settings::STREAMS_MAX).chain((0..settings::STREAMS_MAX).rev()) {
            let streams = connection_streams(open, before);
            assert!(streams >= open && streams <= first.max(4 * open), "{open}: {streams}");
            assert!(settings::connection_window(streams) >= settings::connection_window(open));
            before = streams;
        }
        assert_eq!(before, first);
        // A stream that opens and closes repeatedly does not resize the window.
        assert_eq!(connection_streams(first, connection_streams(first + 1, first)), 2 * first);
    }

    #[test]
    fn a_smaller_window_must_be_acknowledged_sooner_than_others() {
        assert_eq!(answered_within(1, false), Duration::from_secs(60));
        for (excess, is_acknowledged) in [(0, false), (0, true), (1, true)] {
            assert_eq!(answered_within(excess, is_acknowledged), limits::WINDOW_ANSWERED_WITHIN);
        }
    }
}
