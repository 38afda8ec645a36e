//! Ends connections to backends that are gone: the machine was switched off, or the network drops all packets.
//!
//! A live kernel acknowledges the bytes that it receives, even while its program is suspended or does not read. `TCP_USER_TIMEOUT`
//! cannot be used: it also ends connections to a live backend with a closed receive window.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::time::Duration;

use gw_shared::net::{Closer, Gauge, Socket, TcpInfo};

/// Keep-alive probes, for connections on which nothing else shows that the peer is gone.
const PROBE_AFTER: Duration = Duration::from_secs(10);
const PROBE_INTERVAL: Duration = Duration::from_secs(5);
const PROBES: u32 = 3;

/// Time between two looks at the connections.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Number of consecutive looks without an acknowledgement after which a connection ends. Time is not measured: after the agent
/// itself was suspended, its kernel first has to send the bytes again.
const SILENT_LOOKS: u32 = 15;

/// An open connection, as long as its owner keeps it.
pub(super) struct LiveConnection {
    gauge: Gauge,
    closer: Closer,
    /// Consecutive looks at which an acknowledgement was due and none had arrived since the look before.
    silent_looks: Cell<u32>,
    /// Bytes that had arrived at the last look.
    received: Cell<u64>,
}

impl LiveConnection {
    /// Bytes that had arrived at the last look.
    pub(super) fn received(&self) -> u64 {
        self.received.get()
    }
}

/// Number of consecutive looks without an acknowledgement, after a look that has read `info`.
fn silent_looks(before: u32, info: &TcpInfo) -> u32 {
    if info.awaits_acknowledgement && info.since_acknowledgement >= LOOK_INTERVAL {
        before + 1
    } else {
        0
    }
}

/// The open connections to one backend.
#[derive(Default)]
pub(super) struct LiveConnections(RefCell<Vec<Weak<LiveConnection>>>);

impl LiveConnections {
    /// Watches a new TCP connection until the result is dropped. Returns `None` for other sockets, whose peers are on this machine.
    pub(super) fn add(&self, socket: &Socket) -> Option<Rc<LiveConnection>> {
        let gauge = socket.gauge();
        gauge.read().ok()?;
        if let Err(error) = socket.keep_alive(PROBE_AFTER, PROBE_INTERVAL, PROBES) {
            tracing::warn!(%error, "cannot set TCP keep-alive on a backend connection");
        }
        let connection = Rc::new(LiveConnection {
            gauge,
            closer: socket.closer(),
            silent_looks: Cell::default(),
            received: Cell::default(),
        });
        self.0.borrow_mut().push(Rc::downgrade(&connection));
        Some(connection)
    }

    /// Ends connections without an acknowledgement at [`SILENT_LOOKS`] consecutive looks. Called every [`LOOK_INTERVAL`].
    pub(super) fn look(&self) {
        self.0.borrow_mut().retain(|connection| {
            let Some(connection) = connection.upgrade() else {
                return false;
            };
            let looks = connection.gauge.read().map_or(0, |info| {
                connection.received.set(info.received);
                silent_looks(connection.silent_looks.get(), &info)
            });
            connection.silent_looks.set(looks);
            if looks == SILENT_LOOKS {
                connection.closer.time_out();
            }
            looks < SILENT_LOOKS
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn looks_at(infos: impl IntoIterator<Item = (bool, u64)>) -> u32 {
        let infos = infos.into_iter().map(|(awaits, seconds)| TcpInfo {
            acknowledged: 0,
            all_acknowledged: !awaits,
            awaits_acknowledgement: awaits,
            since_acknowledgement: Duration::from_secs(seconds),
            received: 0,
            shortest_rtt: None,
            smoothed_rtt: None,
        });
        infos.fold(0, |looks, info| silent_looks(looks, &info))
    }

    #[test]
    fn only_looks_in_a_row_without_an_acknowledgement_count() {
        // Bytes are sent after an hour without any.
        let unacknowledged = |looks| (0..looks).map(|look| (true, 3600 + look));
        assert_eq!(looks_at(unacknowledged(15)), SILENT_LOOKS);
        // Nothing waits.
        assert_eq!(looks_at([(false, 3600), (false, 3601)]), 0);
        // Some of the bytes are acknowledged, or a probe of a closed window is.
        assert_eq!(looks_at(unacknowledged(14).chain([(true, 0)])), 0);
        assert_eq!(looks_at(unacknowledged(14).chain([(false, 0)])), 0);
        assert_eq!(looks_at([(true, 0), (true, 1), (true, 2)]), 2);
    }
}
