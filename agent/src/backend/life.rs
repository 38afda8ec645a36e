//! How long connections to backends live: until a greatest age, until the name of the backend has
//! other addresses, or until the backend is gone, because its machine was switched off or the
//! network drops all packets.
//!
//! A live kernel acknowledges the bytes that it receives, even while its program is suspended or
//! does not read. `TCP_USER_TIMEOUT` cannot be used: it also ends connections to a live backend
//! with a closed receive window.

use std::cell::{Cell, RefCell};
use std::net::{IpAddr, SocketAddr};
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use gw_shared::net::{Closer, Gauge, Socket, TcpInfo};

use crate::backoff::random;

/// Keep-alive probes, for connections on which nothing else shows that the peer is gone.
const PROBE_AFTER: Duration = Duration::from_secs(10);
const PROBE_INTERVAL: Duration = Duration::from_secs(5);
const PROBES: u32 = 3;

/// Time between two looks at the connections.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Number of consecutive looks without an acknowledgement after which a connection ends. Time is
/// not measured: after the agent itself was suspended, its kernel first has to send the bytes
/// again.
const SILENT_LOOKS: u32 = 15;

/// Consecutive answers to lookups of a name, one every five seconds, without the address of a
/// connection, after which the connection gets no further requests. Answers of large services
/// rotate.
const MISSED_ANSWERS: u32 = 6;

/// When a connection gets no further requests. Never, by default.
#[derive(Default)]
pub(super) struct Lifetime {
    pub(super) live: Option<Rc<LiveConnection>>,
    until: Option<Instant>,
}

impl Lifetime {
    /// The lifetime of a new connection. `max_age` is varied by a tenth, so that connections do not
    /// end together.
    pub(super) fn new(live: Option<Rc<LiveConnection>>, max_age: Duration) -> Self {
        let until = Instant::now() + max_age.mul_f64(0.9 + 0.2 * random());
        Self {
            live,
            until: Some(until),
        }
    }

    pub(super) fn is_over(&self, now: Instant) -> bool {
        let is_outdated = |live: &Rc<LiveConnection>| live.missed_answers.get() >= MISSED_ANSWERS;
        self.until.is_some_and(|until| now >= until) || self.live.as_ref().is_some_and(is_outdated)
    }
}

/// An open connection, as long as its owner keeps it.
pub(super) struct LiveConnection {
    address: IpAddr,
    /// Consecutive answers to lookups without the address.
    missed_answers: Cell<u32>,
    gauge: Gauge,
    closer: Closer,
    /// Consecutive looks at which an acknowledgement was due and none had arrived since the look
    /// before.
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
    /// Watches a new TCP connection until the result is dropped. Returns `None` for other sockets,
    /// whose peers are on this machine.
    pub(super) fn add(
        &self,
        socket: &Socket,
        peer: Option<SocketAddr>,
    ) -> Option<Rc<LiveConnection>> {
        let address = peer?.ip();
        let gauge = socket.gauge();
        gauge.read().ok()?;
        if let Err(error) = socket.keep_alive(PROBE_AFTER, PROBE_INTERVAL, PROBES) {
            tracing::warn!(%error, "cannot set TCP keep-alive on a backend connection");
        }
        let connection = Rc::new(LiveConnection {
            address,
            missed_answers: Cell::default(),
            gauge,
            closer: socket.closer(),
            silent_looks: Cell::default(),
            received: Cell::default(),
        });
        self.0.borrow_mut().push(Rc::downgrade(&connection));
        Some(connection)
    }

    /// Whether a connection is open.
    pub(super) fn any(&self) -> bool {
        let mut connections = self.0.borrow_mut();
        connections.retain(|connection| connection.strong_count() > 0);
        !connections.is_empty()
    }

    /// Compares the addresses of the connections with an answer to a lookup of the name.
    pub(super) fn answered(&self, addresses: &[SocketAddr]) {
        for connection in self.0.borrow().iter().filter_map(Weak::upgrade) {
            let is_named = addresses.iter().any(|it| it.ip() == connection.address);
            let missed = connection.missed_answers.get();
            let missed = if is_named {
                0
            } else {
                missed.saturating_add(1)
            };
            connection.missed_answers.set(missed);
        }
    }

    /// Ends connections without an acknowledgement at [`SILENT_LOOKS`] consecutive looks. Called
    /// every [`LOOK_INTERVAL`].
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
    use std::net::TcpListener;

    use super::*;
    use crate::testing::block_on;

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
    fn a_connection_is_used_until_its_age() {
        let now = Instant::now();
        let after = |seconds| now + Duration::from_secs(seconds);
        assert!(!Lifetime::default().is_over(after(1_000_000)));
        let aged = Lifetime::new(None, Duration::from_secs(100));
        assert!(!aged.is_over(after(89)));
        assert!(aged.is_over(Instant::now() + Duration::from_secs(111)));
    }

    #[test]
    fn a_connection_is_used_while_its_address_is_named() {
        block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let peer = listener.local_addr().unwrap();
            let socket = Socket::connect(peer, None).await.unwrap();
            let connections = LiveConnections::default();
            let live = connections.add(&socket, Some(peer));
            let lifetime = Lifetime::new(live, Duration::from_secs(100));
            let other = SocketAddr::from(([127, 0, 0, 2], peer.port()));
            // An answer that names the address begins the count again.
            for answer in [other, other, other, other, other, peer] {
                connections.answered(&[answer]);
                assert!(!lifetime.is_over(Instant::now()));
            }
            for _ in 0..MISSED_ANSWERS {
                assert!(!lifetime.is_over(Instant::now()));
                connections.answered(&[other]);
            }
            assert!(lifetime.is_over(Instant::now()));
            assert!(connections.any());
            drop(lifetime);
            assert!(!connections.any());
        });
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
