//! Pings on a silent tunnel, and detection of a dead one. The decision takes the time as an argument.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::net::Closer;
use crate::runtime;

/// Silence after which each end sends an HTTP/2 PING, and interval of further ones.
///
/// Only on a silent tunnel: h2 reads nothing while a PING or its acknowledgement waits to be written, so two ends with
/// full buffers that both ping would block each other.
pub const PING_INTERVAL: Duration = Duration::from_secs(10);
/// Silence after which a tunnel is dead: two PINGs or their acknowledgements were lost.
pub const DEAD_AFTER: Duration = Duration::from_secs(25);
/// Time limit of TCP keep-alive and `TCP_USER_TIMEOUT`, which also detect unacknowledged data.
pub const TCP_DEAD_AFTER: Duration = Duration::from_secs(20);

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

/// Sends PINGs on a silent connection and aborts a dead one. Returns then, or when the connection has ended.
pub async fn keep(mut ping_pong: h2::PingPong, last_received: Rc<Cell<Instant>>, closer: Closer) {
    loop {
        match beat(Instant::now(), last_received.get()) {
            Beat::Dead => {
                tracing::warn!(silent_for = ?DEAD_AFTER, "the tunnel is dead: closing it");
                closer.abort();
                return;
            }
            Beat::Alive(next) => runtime::sleep(next).await,
            Beat::Ping(next) => {
                // Any other error means that a PING is already under way.
                if let Err(error) = ping_pong.send_ping(h2::Ping::opaque())
                    && error.is_io()
                {
                    return;
                }
                // The acknowledgement is ignored: any received byte updates `last_received`.
                let pong = std::future::poll_fn(|cx| ping_pong.poll_pong(cx));
                match runtime::timeout(next, pong).await {
                    Ok(Err(_)) => return,
                    Ok(Ok(_)) => runtime::sleep(next).await,
                    Err(_) => {}
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_tunnel_is_dead_after_25_seconds() {
        let start = Instant::now();
        let (mut now, mut pings) = (start, Vec::new());
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
        assert_eq!(beat(now, now - Duration::from_secs(9)), Beat::Alive(Duration::from_secs(1)));
        assert_eq!(beat(now, now - Duration::from_secs(24)), Beat::Ping(Duration::from_secs(1)));
        // `last_received` may be later than `now`.
        assert_eq!(beat(start, now), Beat::Alive(PING_INTERVAL));
    }
}
