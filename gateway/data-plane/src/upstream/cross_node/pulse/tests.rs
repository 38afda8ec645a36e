use super::*;

const SECOND: Duration = Duration::from_secs(1);

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
                    self.pulse.answered();
                }
            }
            self.now += limits::PING_CHECK;
        }
        self.pulse.silence(self.now)
    }
}

#[test]
fn two_pings_a_second_are_sent_while_something_waits() {
    let mut path = Path::new();
    path.pass(10 * SECOND, false);
    assert_eq!(path.pings, 0);
    assert_eq!(path.pass(10 * SECOND, true), Duration::ZERO);
    assert_eq!(path.pings, 20);
    path.pass(10 * SECOND, false);
    assert_eq!(path.pings, 20);
}

#[test]
fn silence_counts_from_the_first_ping_that_is_not_answered() {
    let mut path = Path::new();
    path.pass(SECOND / 5, true);
    path.is_cut = true;
    // The next PING is not due yet.
    assert_eq!(path.pass(SECOND / 5, true), Duration::ZERO);
    assert_eq!(path.pass(4 * SECOND, true), 4 * SECOND - SECOND / 10);
    // It goes on when nothing waits any more, until a late answer ends it.
    assert_eq!(path.pass(SECOND, false), 5 * SECOND - SECOND / 10);
    path.pulse.answered();
    assert_eq!(path.pass(SECOND, false), Duration::ZERO);
    path.now += 3600 * SECOND;
    assert_eq!(path.pass(2 * SECOND, true), 2 * SECOND);
}

#[test]
fn a_freeze_of_four_seconds_ends_nothing_and_a_cut_is_noticed_within_five_and_a_half() {
    for phase in 0..10 {
        let mut path = Path::new();
        path.pass(SECOND + phase * limits::PING_CHECK, true);
        path.is_cut = true;
        let silence = path.pass(4 * SECOND, true);
        assert!(silence + SECOND / 2 <= limits::LINK_SILENT, "{silence:?}");
        assert!(path.pass(3 * SECOND / 2, true) >= limits::LINK_SILENT);
        let silence = path.pass(5 * SECOND / 2, true);
        let sent_again = silence + limits::NODE_RETRANSMISSION;
        assert!(
            sent_again <= limits::SPLICE_SILENT,
            "a cut of eight seconds: {silence:?}"
        );
        assert!(path.pass(3 * SECOND / 2, true) >= limits::SPLICE_SILENT);
    }
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
