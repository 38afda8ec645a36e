//! How large the flow-control windows of a tunnel's streams are. Pure: takes the time and what was measured.
//!
//! All streams of a tunnel have the same window, both ways. It grows while it is what limits the tunnel, that is while
//! about a window of bytes is under way (rate x round-trip time), and shrinks as soon as all open streams, were they to
//! stall now, could hold more than the budget.

use std::time::{Duration, Instant};

const KIB: u32 = 1024;
const MIB: u32 = 1024 * KIB;

/// Window of a new tunnel's streams, in bytes.
pub const FIRST: u32 = 512 * KIB;
/// Smallest window there is: what a stalled stream may hold however many there are.
pub const LEAST: u32 = 64 * KIB;
/// Largest window: 100 Mbit/s over 400 ms, with the headroom that growing needs.
pub const MOST: u32 = 8 * MIB;
/// What the streams of one tunnel may hold together, each way, in bytes: 128 of them a window of the first size.
pub const TUNNEL_BUDGET: usize = 64 * MIB as usize;

/// How often it is worth looking while bytes flow.
pub const INTERVAL: Duration = Duration::from_millis(50);
/// A window that was not needed for so long is halved.
const QUIET: Duration = Duration::from_secs(10);

/// What a connection has carried so far, and how long its path is.
#[derive(Debug, Clone, Copy)]
pub struct Traffic {
    pub received: u64,
    pub sent: u64,
    /// Without what queues add: a queue that our own window filled must not ask for a larger window.
    pub rtt: Duration,
}

/// The open streams of one direction.
pub struct Demand<'a> {
    pub streams: usize,
    /// Bytes that streams hold now, received and not passed on. Streams that hold none need not be there.
    pub held: &'a [usize],
}

impl Demand<'_> {
    /// What the streams hold once each has filled `window`; one that holds more already keeps it.
    pub fn committed(&self, window: u32) -> usize {
        self.streams * window as usize + self.excess(window)
    }

    /// What streams hold beyond `window`: filled before it shrank.
    pub fn excess(&self, window: u32) -> usize {
        self.held.iter().map(|held| held.saturating_sub(window as usize)).sum()
    }

    /// `wanted`, or the largest smaller window whose streams cannot hold more than `budget`.
    pub fn fit(&self, wanted: u32, budget: usize) -> u32 {
        let mut window = wanted.clamp(LEAST, MOST);
        while window > LEAST && self.committed(window) > budget {
            window /= 2;
        }
        window
    }
}

/// Decides on the window of one tunnel.
#[derive(Debug)]
pub struct WindowTuner {
    window: u32,
    before: Option<(Instant, Traffic)>,
    /// When a window of this size was last needed.
    needed: Option<Instant>,
}

impl Default for WindowTuner {
    fn default() -> Self {
        Self { window: FIRST, before: None, needed: None }
    }
}

impl WindowTuner {
    /// The window as of the last [`Self::set`].
    pub fn window(&self) -> u32 {
        self.window
    }

    /// The window to have now. It is not in force until [`Self::set`] says so.
    pub fn look(&mut self, now: Instant, traffic: Traffic, demand: &Demand<'_>, budget: usize) -> u32 {
        let mut wanted = self.window;
        match self.under_way(now, traffic) {
            // Two thirds: a window is never quite full, since its updates come in pieces.
            Some(under_way) if under_way * 3 >= u64::from(self.window) * 2 => {
                self.needed = Some(now);
                wanted *= 2;
            }
            Some(under_way) if under_way * 4 >= u64::from(self.window) => self.needed = Some(now),
            _ => {}
        }
        let needed = *self.needed.get_or_insert(now);
        if self.window > FIRST && now.saturating_duration_since(needed) >= QUIET {
            self.needed = Some(now);
            wanted = self.window / 2;
        }
        // Back from pressure with room to spare, or the next stream would bring it back.
        if self.window < FIRST && demand.committed(self.window * 2) <= budget / 2 {
            wanted = self.window * 2;
        }
        demand.fit(wanted, budget)
    }

    /// `window` is in force.
    pub fn set(&mut self, window: u32) {
        self.window = window;
    }

    /// Bytes under way in the busier direction, once there is a measurement over at least a round trip.
    fn under_way(&mut self, now: Instant, traffic: Traffic) -> Option<u64> {
        let Some((at, before)) = self.before else {
            self.before = Some((now, traffic));
            return None;
        };
        let elapsed = now.saturating_duration_since(at);
        if elapsed < INTERVAL.max(traffic.rtt) {
            return None;
        }
        self.before = Some((now, traffic));
        let bytes = (traffic.received - before.received).max(traffic.sent - before.sent);
        let under_way = u128::from(bytes) * traffic.rtt.as_micros() / elapsed.as_micros();
        Some(u64::try_from(under_way).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tunnel on virtual time whose bulk stream gets through what window and link allow.
    struct Path {
        now: Instant,
        rtt: Duration,
        bytes_per_second: u64,
        received: u64,
        tuner: WindowTuner,
        changes: usize,
    }

    impl Path {
        fn new(rtt_ms: u64, mbit: u64) -> Self {
            let rtt = Duration::from_millis(rtt_ms);
            let tuner = WindowTuner::default();
            Self { now: Instant::now(), rtt, bytes_per_second: mbit * 125_000, received: 0, tuner, changes: 0 }
        }

        fn run(&mut self, seconds: u64, busy: bool, demand: &Demand<'_>) -> u32 {
            let end = self.now + Duration::from_secs(seconds);
            while self.now < end {
                self.now += INTERVAL;
                if busy {
                    let limited = u128::from(self.tuner.window()) * INTERVAL.as_micros() / self.rtt.as_micros();
                    self.received += u64::try_from(limited).unwrap().min(self.bytes_per_second / 20);
                }
                let traffic = Traffic { received: self.received, sent: 0, rtt: self.rtt };
                let window = self.tuner.look(self.now, traffic, demand, TUNNEL_BUDGET);
                if window != self.tuner.window() {
                    self.tuner.set(window);
                    self.changes += 1;
                }
            }
            self.tuner.window()
        }
    }

    const ONE: Demand<'_> = Demand { streams: 1, held: &[] };

    #[test]
    fn one_stream_comes_to_fill_a_long_path_and_no_more() {
        for (rtt, mbit) in [(1, 100), (20, 100), (100, 100), (100, 400), (300, 100)] {
            let mut path = Path::new(rtt, mbit);
            let window = u64::from(path.run(5, true, &ONE));
            let product = mbit * 125 * rtt;
            assert!(window >= product, "{rtt} ms, {mbit} Mbit/s: {window} of {product}");
            assert!(window <= product * 3 || window == u64::from(FIRST), "{rtt} ms, {mbit} Mbit/s: {window}");
            let changes = path.changes;
            path.run(600, true, &ONE);
            assert_eq!(path.changes, changes, "a steady flow keeps its window");
        }
    }

    #[test]
    fn no_path_is_too_long_for_the_largest_window() {
        assert_eq!(Path::new(600, 10_000).run(30, true, &ONE), MOST);
    }

    #[test]
    fn a_window_that_is_not_needed_any_more_goes_back() {
        let mut path = Path::new(100, 400);
        let grown = path.run(5, true, &ONE);
        assert!(grown > 4 * FIRST);
        assert_eq!(path.run(9, false, &ONE), grown);
        assert_eq!(path.run(60, false, &ONE), FIRST);
        assert_eq!(path.run(5, true, &ONE), grown);
    }

    #[test]
    fn more_streams_have_smaller_windows_and_fewer_get_them_back() {
        let mut path = Path::new(300, 1000);
        for (streams, window) in [(8, MOST), (9, MOST / 2), (128, FIRST), (129, FIRST / 2), (5000, LEAST)] {
            assert_eq!(path.run(5, true, &Demand { streams, held: &[] }), window, "{streams}");
        }
        assert_eq!(path.run(5, false, &ONE), FIRST);
    }

    #[test]
    fn streams_that_come_and_go_about_a_limit_change_nothing() {
        let mut path = Path::new(1, 1);
        path.run(1, false, &Demand { streams: 129, held: &[] });
        let changes = path.changes;
        for streams in (0..100).map(|turn| 120 + turn % 16) {
            path.run(1, false, &Demand { streams, held: &[] });
        }
        assert_eq!((path.changes, path.tuner.window()), (changes, FIRST / 2));
    }

    #[test]
    fn what_stalled_streams_hold_already_counts() {
        let stalled = [MOST as usize; 7];
        let demand = Demand { streams: 7 + 16, held: &stalled };
        let window = demand.fit(MOST, TUNNEL_BUDGET);
        assert_eq!(window, FIRST);
        assert!(demand.committed(window) <= TUNNEL_BUDGET && demand.committed(window * 2) > TUNNEL_BUDGET);
    }

    /// Whatever order streams come in, and all stall at once: budget and least windows bound what they hold.
    #[test]
    fn streams_that_all_stall_cannot_hold_more_than_budget_and_least_windows() {
        let (mut held, mut window) = (Vec::new(), MOST);
        for streams in 1..=2000 {
            window = Demand { streams, held: &held }.fit(window, TUNNEL_BUDGET);
            held.push(window as usize);
            assert!(held.iter().sum::<usize>() <= TUNNEL_BUDGET + streams * LEAST as usize, "{streams}");
        }
    }
}
