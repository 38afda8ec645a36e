use super::*;

const SECOND: Duration = Duration::from_secs(1);
const ROUND_TRIP: Duration = Duration::from_millis(20);

/// A link on virtual time whose PINGs are answered until it is cut.
struct Path {
    now: Instant,
    pulse: Pulse,
    pings: usize,
    is_cut: bool,
}

impl Path {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            now,
            pulse: Pulse::new(now),
            pings: 0,
            is_cut: false,
        }
    }

    /// Passes `time` with a look at each interval, and returns the time without an answer.
    fn pass(&mut self, time: Duration, is_waited_for: bool) -> Duration {
        let end = self.now + time;
        while self.now < end {
            if self.pulse.look(is_waited_for, self.now) {
                self.pings += 1;
                if !self.is_cut {
                    self.pulse.answered(self.now + ROUND_TRIP);
                }
            }
            self.now += limits::PING_CHECK;
        }
        self.pulse.silence(self.now)
    }
}

#[test]
fn a_ping_a_second_is_sent_while_something_waits() {
    let mut path = Path::new();
    path.pass(10 * SECOND, false);
    assert_eq!(path.pings, 0);
    assert_eq!(path.pass(10 * SECOND, true), Duration::ZERO);
    assert_eq!(path.pings, 10);
    path.pass(10 * SECOND, false);
    assert_eq!(path.pings, 10);
}

#[test]
fn silence_counts_from_the_last_answer() {
    let mut path = Path::new();
    path.pass(SECOND / 2, true);
    path.is_cut = true;
    // The next PING is not due yet.
    assert_eq!(path.pass(SECOND / 2, true), Duration::ZERO);
    assert_eq!(path.pass(4 * SECOND, true), 5 * SECOND - ROUND_TRIP);
    // It goes on when nothing waits any more, until a late answer ends it.
    assert_eq!(path.pass(SECOND, false), 6 * SECOND - ROUND_TRIP);
    path.pulse.answered(path.now);
    assert_eq!(path.pass(SECOND, false), Duration::ZERO);
}

#[test]
fn silence_counts_from_the_first_ping_after_a_time_without() {
    let mut path = Path::new();
    path.pass(SECOND, true);
    path.now += 3600 * SECOND;
    path.is_cut = true;
    assert_eq!(path.pass(2 * SECOND, true), 2 * SECOND);
}

#[test]
fn a_time_in_which_this_process_did_nothing_is_not_the_silence_of_the_other() {
    let mut path = Path::new();
    path.is_cut = true;
    assert_eq!(path.pass(3 * SECOND, true), 3 * SECOND);
    path.now += 4 * SECOND;
    let silence = path.pass(SECOND, true);
    assert!(silence <= SECOND, "{silence:?}");
    // Until it goes on.
    assert_eq!(path.pass(2 * SECOND, true), silence + 2 * SECOND);
}
