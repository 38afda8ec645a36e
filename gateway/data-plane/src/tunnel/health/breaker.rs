//! Circuit breaker of a tunnel: keeps requests away from an agent that fails them.

use std::time::{Duration, Instant};

use super::TunnelFailure;

/// Attempts in a row that reach no backend and open the breaker.
const UNREACHABLE_MAX: u32 = 3;
/// Failed attempts in a row, of both kinds, that open it.
const FAILURES_MAX: u32 = 5;
/// Time for which it opens first. Doubles with each further opening without a success in between.
pub(super) const FIRST_OPENING: Duration = Duration::from_secs(1);
const LONGEST_OPENING: Duration = Duration::from_secs(60);
/// Time after which a probe no longer holds up the next one, and after which a request that cannot
/// be repeated may probe a tunnel that breaks requests.
pub(super) const PROBE_PATIENCE: Duration = Duration::from_secs(60);

/// Mixed failures: each counts towards [`FAILURES_MAX`], those without a backend also towards
/// [`UNREACHABLE_MAX`]. Only a success ends the row.
#[derive(Debug)]
pub(super) struct Breaker {
    switch: BreakerSwitch,
    /// Time of the last change of the switch.
    pub(super) since: Instant,
    /// Number of changes. The outcome of an attempt that began before the last one says nothing
    /// about the time since.
    epoch: u32,
    unreachable: u32,
    failures: u32,
    /// Openings since the last success.
    openings: u32,
}

#[derive(Debug, Clone, Copy)]
enum BreakerSwitch {
    Closed,
    Open {
        cause: TunnelFailure,
        /// End of the opening: the breaker is half open from then on.
        half_open_at: Instant,
        /// Earliest time of the next probe.
        next_probe: Instant,
    },
}

/// Switch at some time, for the choice of a tunnel and for lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BreakerState {
    Closed,
    Open {
        cause: TunnelFailure,
    },
    HalfOpen {
        cause: TunnelFailure,
        since: Instant,
        is_due: bool,
    },
}

/// Mark of an attempt, so that its outcome counts for the time in which it began only.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mark {
    epoch: u32,
    is_probe: bool,
}

impl Breaker {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            switch: BreakerSwitch::Closed,
            since: now,
            epoch: 0,
            unreachable: 0,
            failures: 0,
            openings: 0,
        }
    }

    /// State for a request. A request that is not `is_repeatable` may be the probe if the last
    /// failures reached no backend: such a failure is repeated whatever the request is.
    pub(super) fn state(&self, is_repeatable: bool, now: Instant) -> BreakerState {
        let BreakerSwitch::Open {
            cause,
            half_open_at,
            next_probe,
        } = self.switch
        else {
            return BreakerState::Closed;
        };
        if now < half_open_at {
            return BreakerState::Open { cause };
        }
        let may_be_lost = !is_repeatable && cause != TunnelFailure::Unreachable;
        let patience = if may_be_lost {
            PROBE_PATIENCE
        } else {
            Duration::ZERO
        };
        BreakerState::HalfOpen {
            cause,
            since: half_open_at,
            is_due: now >= next_probe + patience,
        }
    }

    /// Records that an attempt begins. It is the probe if one is due.
    pub(super) fn began(&mut self, now: Instant) -> Mark {
        let mut mark = Mark {
            epoch: self.epoch,
            is_probe: false,
        };
        if let BreakerSwitch::Open { next_probe, .. } = &mut self.switch
            && now >= *next_probe
        {
            mark.is_probe = true;
            *next_probe = now + PROBE_PATIENCE;
        }
        mark
    }

    /// Whether it is closed and the last attempt did not fail.
    pub(super) fn is_in_order(&self) -> bool {
        matches!(self.switch, BreakerSwitch::Closed) && self.failures == 0
    }

    /// Records an answer, and returns whether it closed the breaker. Without an eligible tunnel
    /// requests go to open ones too: an answer to any of them counts as one to a probe.
    pub(super) fn succeeded(&mut self, mark: Mark, now: Instant) -> bool {
        if mark.epoch != self.epoch {
            return false;
        }
        (self.unreachable, self.failures, self.openings) = (0, 0, 0);
        self.close(now)
    }

    /// Closes the breaker, and returns whether it was open.
    pub(super) fn close(&mut self, now: Instant) -> bool {
        let was_open = matches!(self.switch, BreakerSwitch::Open { .. });
        if was_open {
            self.change(BreakerSwitch::Closed, now);
        }
        was_open
    }

    /// Records a failure. Failures of requests that are no probe do not prolong an opening.
    pub(super) fn failed(
        &mut self,
        mark: Mark,
        failure: TunnelFailure,
        now: Instant,
        random: &mut dyn FnMut() -> f64,
    ) {
        match (failure, self.switch) {
            _ if mark.epoch != self.epoch => {}
            (TunnelFailure::NoSlot, _) => self.without_verdict(mark, now),
            (_, BreakerSwitch::Closed) => {
                self.failures += 1;
                self.unreachable += u32::from(failure == TunnelFailure::Unreachable);
                if self.unreachable >= UNREACHABLE_MAX || self.failures >= FAILURES_MAX {
                    self.open(failure, now, random);
                }
            }
            (_, BreakerSwitch::Open { .. }) if mark.is_probe => self.open(failure, now, random),
            (_, BreakerSwitch::Open { .. }) => {}
        }
    }

    /// Records that an attempt ended and says nothing of the backend. If it was the probe, another
    /// may follow, after a pause: a backend that does not answer would otherwise get one request
    /// after the other.
    pub(super) fn without_verdict(&mut self, mark: Mark, now: Instant) {
        if let BreakerSwitch::Open { next_probe, .. } = &mut self.switch
            && mark.is_probe
            && mark.epoch == self.epoch
        {
            *next_probe = now + FIRST_OPENING;
        }
    }

    /// Opens it for 1, 2, 4 … 60 s ± 50 %, so that the breakers of one backend's tunnels do not
    /// probe it at the same time.
    fn open(&mut self, cause: TunnelFailure, now: Instant, random: &mut dyn FnMut() -> f64) {
        let doubled = FIRST_OPENING.saturating_mul(1 << self.openings.min(16));
        let half_open_at = now + doubled.min(LONGEST_OPENING).mul_f64(0.5 + random());
        self.openings = self.openings.saturating_add(1);
        self.change(
            BreakerSwitch::Open {
                cause,
                half_open_at,
                next_probe: half_open_at,
            },
            now,
        );
    }

    fn change(&mut self, switch: BreakerSwitch, now: Instant) {
        self.switch = switch;
        self.since = now;
        self.epoch = self.epoch.wrapping_add(1);
        (self.unreachable, self.failures) = (0, 0);
    }
}
