//! When to ping and when a silent tunnel is dead. Pure: takes the time.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::net::Closer;
use crate::runtime;

/// Silence after which each end sends an HTTP/2 PING, and again after each further one.
///
/// Only into silence: h2 reads nothing while a PING or its answer waits for room to be written, so two ends that are
/// both full and both ping would wait for each other.
pub const PING_INTERVAL: Duration = Duration::from_secs(10);
/// Silence after which a tunnel is dead: two pings and their answers lost.
pub const DEAD_AFTER: Duration = Duration::from_secs(25);
/// Given to TCP keep-alive and `TCP_USER_TIMEOUT`, which see what pings cannot: unacknowledged data.
pub const TCP_DEAD_AFTER: Duration = Duration::from_secs(20);

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beat {
    /// Bytes arrived lately: look again after this long.
    Alive(Duration),
    /// Send a ping, look again after this long.
    Ping(Duration),
    Dead,
}

/// Decides from the time since anything arrived. Any byte counts as life.
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

/// Pings through `ping_pong` until the connection is silent for too long, which it then aborts, or its driver is gone.
pub async fn keep(mut ping_pong: h2::PingPong, last_received: Rc<Cell<Instant>>, closer: Closer) {
    loop {
        match beat(Instant::now(), last_received.get()) {
            Beat::Dead => {
                tracing::warn!(silent_for = ?DEAD_AFTER, "tunnel is dead: nothing arrived");
                closer.abort();
                return;
            }
            Beat::Alive(next) => runtime::sleep(next).await,
            Beat::Ping(next) => {
                // Anything but an I/O error says that a ping is under way already.
                if let Err(error) = ping_pong.send_ping(h2::Ping::opaque())
                    && error.is_io()
                {
                    return;
                }
                // The pong itself matters to nobody: whatever arrives renews `last_received`.
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
    fn a_silent_tunnel_is_declared_dead_within_25_seconds_and_not_before() {
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
    fn any_byte_is_life() {
        let start = Instant::now();
        let now = start + Duration::from_secs(3600);
        assert_eq!(beat(now, now - Duration::from_secs(9)), Beat::Alive(Duration::from_secs(1)));
        assert_eq!(beat(now, now - Duration::from_secs(24)), Beat::Ping(Duration::from_secs(1)));
        // A reading taken a moment later than `now` is no reason to panic.
        assert_eq!(beat(start, now), Beat::Alive(PING_INTERVAL));
    }
}
