//! Flow control of a tunnel: measures the path, and sets the credit that each end grants on its
//! streams.
//!
//! The gateway chooses the window for both directions: its endpoint grants up to a window on each
//! response, and WINDOW tells the agent what to grant on each request body. Credit is exact, so a
//! smaller window is in force at once.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use gw_base::error::Error;
use gw_shared::net::{Gauge, Socket};
use gw_shared::tunnel::connection::Tunnel;
use gw_shared::tunnel::endpoint::Endpoint;
use gw_shared::tunnel::heartbeat;
use gw_shared::tunnel::window::{self, Demand, Traffic, WindowTuner};

use crate::memory::relay::AccountMemory;

/// Windows and buffered bytes of one tunnel.
pub(crate) struct FlowControl {
    tunnel: Tunnel,
    /// `None` once the connection has ended.
    gauge: RefCell<Option<Gauge>>,
    /// Time of the last received bytes. Used as the current time: without traffic there is nothing
    /// to measure.
    last_received: Rc<Cell<Instant>>,
    next_measurement: Cell<Instant>,
    tuner: RefCell<WindowTuner>,
    streams: Cell<usize>,
    /// Time of the last byte before the last request ended. Valid while there are no requests.
    quiet_since: Cell<Instant>,
    memory: AccountMemory,
    /// Payload of the last PING that measures the path, and when it was queued.
    probe: Cell<(u64, Instant)>,
    /// Shortest time from such a PING to its answer. Longer than the round trip of TCP if there is
    /// a proxy between.
    quickest_answer: Cell<Option<Duration>>,
    /// Time from the last such PING that was answered to its answer.
    latest_answer: Cell<Option<Duration>>,
}

impl FlowControl {
    pub(crate) fn new(tunnel: Tunnel, socket: &Socket, memory: AccountMemory) -> Self {
        let last_received = socket.last_received();
        let now = last_received.get();
        Self {
            tunnel,
            gauge: RefCell::new(Some(socket.gauge())),
            next_measurement: Cell::new(now),
            last_received,
            tuner: RefCell::default(),
            streams: Cell::new(0),
            quiet_since: Cell::new(now),
            memory,
            probe: Cell::new((heartbeat::PAYLOAD, now)),
            quickest_answer: Cell::new(None),
            latest_answer: Cell::new(None),
        }
    }

    pub(super) fn streams(&self) -> usize {
        self.streams.get()
    }

    /// Time of the last byte that arrived.
    pub(super) fn last_received(&self) -> Instant {
        self.last_received.get()
    }

    pub(super) fn window(&self) -> u32 {
        self.tuner.borrow().window()
    }

    /// Bytes received from the agent and not yet sent to callers, and the other way round.
    pub(super) fn held_bytes(&self) -> usize {
        self.tunnel.with(|endpoint| endpoint.held())
    }

    /// Time since the last request ended; zero while a request runs.
    pub(super) fn quiet_for(&self, now: Instant) -> Duration {
        if self.streams.get() > 0 {
            Duration::ZERO
        } else {
            now.saturating_duration_since(self.quiet_since.get())
        }
    }

    /// Time from a PING to its answer, as last measured. The value of TCP is larger on an idle
    /// connection, because acknowledgements of a lone segment are delayed.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        self.latest_answer.get()
    }

    /// Counts a request before its stream is opened. Returns the credit that its response may have,
    /// as far as there is memory for it.
    pub(super) fn enter(&self) -> usize {
        self.streams.set(self.streams.get() + 1);
        self.tunnel.with(|endpoint| endpoint.window())
    }

    /// Error of a request for which there is no memory.
    pub(super) fn refusal(&self) -> Error {
        self.memory.refusal()
    }

    /// Removes a request from the count.
    pub(super) fn leave(&self) {
        self.streams.set(self.streams.get() - 1);
        if self.streams.get() == 0 {
            self.quiet_since.set(self.last_received.get());
        }
    }

    /// Measures the traffic once per interval and adjusts the window. Called before the tunnel is
    /// driven.
    pub(super) fn adjust(&self) {
        let now = self.last_received.get();
        if now < self.next_measurement.get() {
            return;
        }
        self.next_measurement.set(now + window::INTERVAL);
        let Some(traffic) = self.traffic() else {
            return;
        };
        let (committed, unread): (_, Vec<usize>) = self
            .tunnel
            .with(|endpoint| (endpoint.committed(), endpoint.unread_by_stream().collect()));
        let demand = Demand {
            streams: self.streams.get(),
            unread: &unread,
        };
        let allowance =
            (committed + self.memory.share().left_beyond_least()).min(window::TUNNEL_BUDGET);
        let mut tuner = self.tuner.borrow_mut();
        let window = tuner.look(now, traffic, &demand, allowance);
        let is_new = window != tuner.window();
        tuner.set(window);
        drop(tuner);
        self.tunnel
            .with(|endpoint| endpoint.set_credit(window as usize, allowance));
        if is_new {
            tracing::debug!(bytes = window, ?traffic, streams = demand.streams, "window");
            self.announce();
        }
    }

    /// Tells the agent the window, and measures the path by a PING.
    pub(super) fn announce(&self) {
        let window = self.window();
        self.tunnel.with(|endpoint| endpoint.send_window(window));
        self.probe();
    }

    /// Measures the path by a PING.
    pub(super) fn probe(&self) {
        let (last, _) = self.probe.get();
        let probe = last.wrapping_add(1).max(heartbeat::PAYLOAD + 1);
        self.probe.set((probe, Instant::now()));
        self.tunnel.with(|endpoint| endpoint.ping(probe));
    }

    /// Takes the answer to a PING. Called after bytes were received.
    pub(super) fn take_pong(&self, endpoint: &mut Endpoint) {
        let (probe, sent) = self.probe.get();
        if probe != heartbeat::PAYLOAD && endpoint.take_pong() == Some(probe) {
            let took = sent.elapsed();
            self.latest_answer.set(Some(took));
            self.quickest_answer.set(Some(
                self.quickest_answer
                    .get()
                    .map_or(took, |quickest| quickest.min(took)),
            ));
        }
    }

    /// Drops the handle of the connection, which has ended.
    pub(super) fn end(&self) {
        self.gauge.take();
    }

    fn traffic(&self) -> Option<Traffic> {
        let info = self.gauge.borrow().as_ref()?.read().ok()?;
        let rtt = info
            .shortest_rtt
            .unwrap_or_default()
            .max(self.quickest_answer.get().unwrap_or_default());
        Some(Traffic {
            received: info.received,
            sent: info.acknowledged,
            rtt,
        })
    }
}
