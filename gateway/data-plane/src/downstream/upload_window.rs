//! Size of the windows for request bodies of one HTTP/2 connection: follows the path to the caller.

use std::time::Instant;

use crate::limits;
use bytes::Bytes;
use gw_shared::net::Gauge;
use gw_shared::tunnel::window::{self, Demand, Traffic, WindowTuner};

use crate::http2::frame_meter::{CallerStream, Metered};

pub(crate) struct UploadWindow {
    gauge: Gauge,
    tuner: WindowTuner,
    next_look: Instant,
}

impl UploadWindow {
    pub(crate) fn new(gauge: Gauge) -> Self {
        Self {
            gauge,
            tuner: WindowTuner::default(),
            next_look: Instant::now() + window::INTERVAL,
        }
    }

    /// Adjusts the windows once an interval. Called before the connection is polled.
    ///
    /// The windows only grow. When the caller acknowledges a smaller initial window, h2 0.4.20
    /// reduces the window of each open stream and does not check whether a WINDOW_UPDATE is due.
    /// The upload of such a stream could stall for ever. The window of the connection bounds the
    /// memory.
    pub(super) fn look<S: CallerStream>(
        &mut self,
        connection: &mut h2::server::Connection<Metered<S>, Bytes>,
        streams: usize,
    ) {
        let now = Instant::now();
        if now < self.next_look {
            return;
        }
        self.next_look = now + window::INTERVAL;
        let Ok(info) = self.gauge.read() else { return };
        let rtt = info.shortest_rtt.unwrap_or_default();
        let traffic = Traffic {
            received: info.received,
            sent: 0,
            rtt,
        };
        // The bytes held by single streams are not measured: the window of the connection bounds
        // them.
        let demand = Demand {
            streams,
            unread: &[],
        };
        let wanted = self.tuner.look(
            now,
            traffic,
            &demand,
            limits::HTTP2_CONNECTION_WINDOW as usize,
        );
        // Fails until the caller has acknowledged the last change; retried at a later interval.
        if wanted > self.tuner.window() && connection.set_initial_window_size(wanted).is_ok() {
            self.tuner.set(wanted);
        }
    }
}
