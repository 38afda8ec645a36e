//! Size of the flow-control windows of a tunnel's streams. Time and measurements are arguments.
//!
//! All streams of a tunnel have the same window, in both directions. The window grows while it
//! limits the tunnel: while about a window of bytes is in flight (rate × round-trip time). It
//! shrinks as soon as the open streams could have more unread bytes than the budget if all of them
//! stalled. On a short path, several streams share a small number of bytes: bytes that wait in the
//! connection delay the responses of all other streams.

use std::time::{Duration, Instant};

const KIB: u32 = 1024;
const MIB: u32 = 1024 * KIB;

/// Window of the streams of a new tunnel, in bytes.
pub const FIRST: u32 = 512 * KIB;
/// Smallest window, in bytes, regardless of the number of streams.
pub const LEAST: u32 = 64 * KIB;
/// Largest window, in bytes: 100 Mbit/s over 400 ms, with the headroom that growth needs.
pub const MOST: u32 = 8 * MIB;
/// Budget for unread bytes of all streams of a tunnel in each direction, in bytes: 128 windows of
/// the first size.
pub const TUNNEL_BUDGET: usize = 64 * MIB as usize;

/// Bytes that several streams share on a short path.
const SHARED: usize = MIB as usize;
/// Smallest share of a stream, in bytes. With less, a caller that is slow to read for a moment gets
/// less than others.
const SHARE_LEAST: u32 = 2 * LEAST;
/// Round-trip time from which every stream has at least the first window, however many there are.
const LONG_PATH: Duration = Duration::from_millis(20);

/// Shortest interval between two measurements.
pub const INTERVAL: Duration = Duration::from_millis(50);
/// Time after which a window that was not needed is halved.
const QUIET: Duration = Duration::from_secs(10);

/// Bytes that a connection has carried, and its round-trip time.
#[derive(Debug, Clone, Copy)]
pub struct Traffic {
    pub received: u64,
    pub sent: u64,
    /// Round-trip time without queueing delay: a queue that a large window filled must not enlarge
    /// the window.
    pub rtt: Duration,
}

/// Open streams of one direction.
pub struct Demand<'a> {
    pub streams: usize,
    /// Unread bytes of each stream: received and not relayed. Streams without unread bytes may be
    /// left out.
    pub unread: &'a [usize],
}

impl Demand<'_> {
    /// Unread bytes once every stream has filled `window`; a stream that has more keeps them.
    pub fn committed(&self, window: u32) -> usize {
        self.streams * window as usize + self.excess(window)
    }

    /// Unread bytes of streams beyond `window`, received before it shrank.
    pub fn excess(&self, window: u32) -> usize {
        self.unread
            .iter()
            .map(|unread| unread.saturating_sub(window as usize))
            .sum()
    }

    /// Returns `wanted`, or the largest smaller window with which unread bytes stay within
    /// `budget`.
    pub fn fit(&self, wanted: u32, budget: usize) -> u32 {
        let mut window = wanted.clamp(LEAST, MOST);
        while window > LEAST && self.committed(window) > budget {
            window /= 2;
        }
        window
    }
}

/// Decides the window of a tunnel.
#[derive(Debug)]
pub struct WindowTuner {
    window: u32,
    before: Option<(Instant, Traffic)>,
    /// Bytes in flight as of the last measurement.
    in_flight: u64,
    /// Time when a window of this size was last needed.
    needed: Option<Instant>,
}

impl Default for WindowTuner {
    fn default() -> Self {
        Self {
            window: FIRST,
            before: None,
            in_flight: 0,
            needed: None,
        }
    }
}

impl WindowTuner {
    /// Window of the last [`Self::set`].
    pub fn window(&self) -> u32 {
        self.window
    }

    /// Decides the window. The caller applies it and then calls [`Self::set`].
    pub fn look(
        &mut self,
        now: Instant,
        traffic: Traffic,
        demand: &Demand<'_>,
        budget: usize,
    ) -> u32 {
        let mut wanted = self.window;
        let measured = self.measure(now, traffic);
        self.in_flight = measured.unwrap_or(self.in_flight);
        match measured {
            // Two thirds, since window updates keep a window from being quite full.
            Some(in_flight) if in_flight * 3 >= u64::from(self.window) * 2 => {
                self.needed = Some(now);
                wanted *= 2;
            }
            Some(in_flight) if in_flight * 4 >= u64::from(self.window) => self.needed = Some(now),
            _ => {}
        }
        let needed = *self.needed.get_or_insert(now);
        if self.window > FIRST && now.saturating_duration_since(needed) >= QUIET {
            self.needed = Some(now);
            wanted = self.window / 2;
        }
        // Grow only with room to spare: the next stream must not shrink the window again.
        if self.window < FIRST && demand.committed(self.window * 2) <= budget / 2 {
            wanted = self.window * 2;
        }
        demand.fit(wanted.min(self.share(traffic.rtt, demand.streams)), budget)
    }

    /// Largest window with which `streams` streams do not delay each other by more than the path
    /// needs. A power of two, so that it changes rarely.
    fn share(&self, rtt: Duration, streams: usize) -> u32 {
        if streams < 2 || rtt >= LONG_PATH {
            return MOST;
        }
        let shared = (SHARED / streams) as u64;
        let of_path = u64::from(FIRST) * rtt.as_micros() as u64 / LONG_PATH.as_micros() as u64;
        // One of the streams may carry all that is in flight, and needs room to grow.
        let share = shared
            .max(of_path)
            .max(2 * self.in_flight)
            .next_power_of_two();
        share.clamp(SHARE_LEAST.into(), MOST.into()) as u32
    }

    /// Records that `window` is in force.
    pub fn set(&mut self, window: u32) {
        self.window = window;
    }

    /// Bytes in flight in the busier direction; `None` before a measurement over at least a round
    /// trip.
    fn measure(&mut self, now: Instant, traffic: Traffic) -> Option<u64> {
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
        let in_flight = u128::from(bytes) * traffic.rtt.as_micros() / elapsed.as_micros();
        Some(u64::try_from(in_flight).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tunnel on virtual time. Its one stream carries as much as window and link allow.
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
            Self {
                now: Instant::now(),
                rtt,
                bytes_per_second: mbit * 125_000,
                received: 0,
                tuner,
                changes: 0,
            }
        }

        fn run(&mut self, seconds: u64, busy: bool, demand: &Demand<'_>) -> u32 {
            let end = self.now + Duration::from_secs(seconds);
            while self.now < end {
                self.now += INTERVAL;
                if busy {
                    let bytes = u128::from(self.tuner.window()) * INTERVAL.as_micros();
                    let limited = u64::try_from(bytes / self.rtt.as_micros()).unwrap();
                    self.received += limited.min(self.bytes_per_second / 20);
                }
                let traffic = Traffic {
                    received: self.received,
                    sent: 0,
                    rtt: self.rtt,
                };
                let window = self.tuner.look(self.now, traffic, demand, TUNNEL_BUDGET);
                if window != self.tuner.window() {
                    self.tuner.set(window);
                    self.changes += 1;
                }
            }
            self.tuner.window()
        }
    }

    const ONE: Demand<'_> = among(1);

    /// This many streams, none of which is stalled.
    const fn among(streams: usize) -> Demand<'static> {
        let unread = &[];
        Demand { streams, unread }
    }

    #[test]
    fn the_window_grows_to_fill_the_path_and_no_further() {
        for (rtt, mbit) in [(1, 100), (20, 100), (100, 100), (100, 400), (300, 100)] {
            let mut path = Path::new(rtt, mbit);
            let window = u64::from(path.run(5, true, &ONE));
            let product = mbit * 125 * rtt;
            let case = format!("{rtt} ms, {mbit} Mbit/s: {window} of {product}");
            assert!(window >= product, "{case}");
            let is_least = window == u64::from(FIRST);
            assert!(window <= product * 3 || is_least, "{case}");
            let changes = path.changes;
            path.run(600, true, &ONE);
            assert_eq!(path.changes, changes, "a steady flow keeps its window");
        }
    }

    #[test]
    fn the_window_of_the_longest_path_is_the_largest() {
        assert_eq!(Path::new(600, 10_000).run(30, true, &ONE), MOST);
    }

    #[test]
    fn a_window_that_is_no_longer_needed_shrinks() {
        let mut path = Path::new(100, 400);
        let grown = path.run(5, true, &ONE);
        assert!(grown > 4 * FIRST);
        assert_eq!(path.run(9, false, &ONE), grown);
        assert_eq!(path.run(60, false, &ONE), FIRST);
        assert_eq!(path.run(5, true, &ONE), grown);
    }

    #[test]
    fn the_window_shrinks_with_more_streams_and_grows_with_fewer() {
        let mut path = Path::new(300, 1000);
        for (streams, window) in [
            (8, MOST),
            (9, MOST / 2),
            (128, FIRST),
            (129, FIRST / 2),
            (5000, LEAST),
        ] {
            assert_eq!(path.run(5, true, &among(streams)), window, "{streams}");
        }
        assert_eq!(path.run(5, false, &ONE), FIRST);
    }

    #[test]
    fn streams_share_the_bytes_of_a_short_path() {
        let mut path = Path::new(1, 100);
        for (streams, window) in [
            (1, FIRST),
            (2, FIRST),
            (4, FIRST / 2),
            (8, FIRST / 4),
            (9, FIRST / 4),
            (100, FIRST / 4),
            (1, FIRST),
        ] {
            assert_eq!(path.run(5, true, &among(streams)), window, "{streams}");
        }
        let mut long = Path::new(20, 100);
        for streams in [1, 8, 100] {
            assert_eq!(long.run(5, true, &among(streams)), FIRST, "{streams}");
        }
    }

    #[test]
    fn one_busy_stream_among_many_fills_a_short_path() {
        for (rtt, mbit) in [(1, 10_000), (5, 10_000), (10, 1_000), (19, 100)] {
            let window = u64::from(Path::new(rtt, mbit).run(5, true, &among(50)));
            let product = mbit * 125 * rtt;
            let least = product.min(TUNNEL_BUDGET as u64 / 64);
            assert!(
                window >= least,
                "{rtt} ms, {mbit} Mbit/s: {window} of {product}"
            );
        }
    }

    #[test]
    fn streams_that_come_and_go_at_a_limit_change_nothing() {
        let mut path = Path::new(20, 1);
        path.run(1, false, &among(129));
        let changes = path.changes;
        for streams in (0..100).map(|turn| 120 + turn % 16) {
            path.run(1, false, &among(streams));
        }
        assert_eq!((path.changes, path.tuner.window()), (changes, FIRST / 2));
    }

    #[test]
    fn unread_bytes_of_stalled_streams_count() {
        let stalled = [MOST as usize; 7];
        let demand = Demand {
            streams: 7 + 16,
            unread: &stalled,
        };
        let window = demand.fit(MOST, TUNNEL_BUDGET);
        assert_eq!(window, FIRST);
        assert!(demand.committed(window) <= TUNNEL_BUDGET);
        assert!(demand.committed(window * 2) > TUNNEL_BUDGET);
    }

    #[test]
    fn unread_bytes_of_stalled_streams_stay_within_budget_and_smallest_windows() {
        let mut unread = Vec::new();
        let mut window = MOST;
        for streams in 1..=2000 {
            let demand = Demand {
                streams,
                unread: &unread,
            };
            window = demand.fit(window, TUNNEL_BUDGET);
            unread.push(window as usize);
            let most = TUNNEL_BUDGET + streams * LEAST as usize;
            assert!(unread.iter().sum::<usize>() <= most, "{streams}");
        }
    }
}
