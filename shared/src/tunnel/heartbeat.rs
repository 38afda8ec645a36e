//! Pings on a silent tunnel, and detection of a dead one. The decision takes the time as an
//! argument.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::connection::Tunnel;
use crate::runtime;

/// Silence after which each end sends a PING, and interval of further ones.
pub const PING_INTERVAL: Duration = Duration::from_secs(10);
/// Silence after which a tunnel is dead: two PINGs or their answers were lost.
pub const DEAD_AFTER: Duration = Duration::from_secs(25);
/// Time limit of TCP keep-alive and `TCP_USER_TIMEOUT`, which also detect unacknowledged data.
pub const TCP_DEAD_AFTER: Duration = Duration::from_secs(20);

/// Payload of the PINGs of a heartbeat. Tells their answers apart from others.
pub const PAYLOAD: u64 = 0;

/// Next action of a heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beat {
    /// Bytes arrived recently: check again after this time.
    Alive(Duration),
    /// Send a PING, and check again after this time.
    Ping(Duration),
    Dead,
}

/// Decides by the time since bytes last arrived.
pub fn beat(now: Instant, last_received: Instant) -> Beat {
    let silent = now.saturating_duration_since(last_received);
    if silent >= DEAD_AFTER {
        return Beat::Dead;
    }
    if silent < PING_INTERVAL {
        return Beat::Alive(PING_INTERVAL - silent);
    }
    Beat::Ping(PING_INTERVAL.min(DEAD_AFTER - silent))
}

/// Sends PINGs on a silent tunnel. Returns once it is dead.
pub async fn until_dead(tunnel: &Tunnel, last_received: &Cell<Instant>) {
    pinging_until_dead(last_received, || {
        tunnel.with(|endpoint| endpoint.ping(PAYLOAD));
    })
    .await;
}

/// As [`until_dead`], with a `ping` that sends a PING of any payload.
pub async fn pinging_until_dead(last_received: &Cell<Instant>, ping: impl Fn()) {
    loop {
        let next = match beat(Instant::now(), last_received.get()) {
            Beat::Dead => {
                return tracing::warn!(silent_for = ?DEAD_AFTER, "the tunnel is dead: closing it");
            }
            Beat::Alive(next) => next,
            Beat::Ping(next) => {
                // The payload does not matter: any received byte updates `last_received`.
                ping();
                next
            }
        };
        runtime::sleep(next).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_tunnel_is_dead_after_25_seconds() {
        let start = Instant::now();
        let mut now = start;
        let mut pings = Vec::new();
        loop {
            match beat(now, start) {
                Beat::Alive(next) => now += next,
                Beat::Ping(next) => {
                    pings.push((now - start).as_secs());
                    now += next;
                }
                Beat::Dead => break,
            }
        }
        assert_eq!((pings, now - start), (vec![10, 20], DEAD_AFTER));
    }

    #[test]
    fn received_bytes_delay_pings() {
        let start = Instant::now();
        let now = start + Duration::from_secs(3600);
        let second = Duration::from_secs(1);
        assert_eq!(beat(now, now - 9 * second), Beat::Alive(second));
        assert_eq!(beat(now, now - 24 * second), Beat::Ping(second));
        // `last_received` may be later than `now`.
        assert_eq!(beat(start, now), Beat::Alive(PING_INTERVAL));
    }
}
