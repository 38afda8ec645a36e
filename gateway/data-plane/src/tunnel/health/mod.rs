//! Health of a tunnel: what the agent reports of its backends, unanswered PINGs, and outcomes of
//! requests. No I/O, no clock, no randomness of its own.

mod breaker;
mod latency;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use gw_shared::tunnel::control::BackendHealth;
use gw_telemetry::counters::TunnelState;

use self::breaker::{Breaker, BreakerState, Mark};
use self::latency::Latency;

/// Latency of a new tunnel of a service without other ones, until requests have shown another.
const FIRST_LATENCY: Duration = Duration::from_millis(10);
/// Least latency that a failure of the agent counts as: failing fast attracts no requests.
const FAILURE_LATENCY: Duration = Duration::from_secs(5);
/// Least latency that a refusal for want of a slot counts as.
const NO_SLOT_LATENCY: Duration = Duration::from_millis(20);

/// How suitable a tunnel is for a request, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum HealthTier {
    Ready,
    /// Half open, and no request probes it: the next one may.
    Probe,
    /// Used only when the service has no better tunnel: a service is never closed by its own
    /// health.
    Impaired,
}

/// Failure that is the fault of the agent or its backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TunnelFailure {
    /// No backend took a connection.
    Unreachable,
    /// A backend broke the exchange, or the agent its protocol.
    Broken,
    /// The agent has no free slot.
    NoSlot,
}

/// State of a tunnel with its reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TunnelCondition {
    pub(crate) state: TunnelState,
    pub(crate) since: Instant,
    pub(crate) why: &'static str,
}

/// An attempt that has begun on a tunnel. To be ended by [`TunnelHealth::succeeded`],
/// [`TunnelHealth::failed`] or [`TunnelHealth::abandoned`].
#[derive(Debug)]
#[must_use]
pub(crate) struct BegunAttempt(Mark);

/// Health of one tunnel. A new tunnel begins as ready: nothing of an earlier tunnel of the same
/// agent is kept.
#[derive(Debug)]
pub(crate) struct TunnelHealth {
    reported: BackendHealth,
    /// Time since which the agent reports that it is unhealthy, or that it is not.
    reported_since: Instant,
    is_suspect: bool,
    suspect_since: Instant,
    breaker: Breaker,
    latency: Latency,
    /// Latency before the first of the failures that opened the breaker. Restored when the agent
    /// reports that it is healthy again, so that it gets its share at once.
    latency_before_failures: Duration,
}

impl TunnelHealth {
    /// Health of a new tunnel. `median` is the median latency of the service's other tunnels
    /// ([`median_latency`]).
    pub(crate) fn new(median: Option<Duration>, now: Instant) -> Self {
        let latency = median.unwrap_or(FIRST_LATENCY);
        Self {
            reported: BackendHealth::Unknown,
            reported_since: now,
            is_suspect: false,
            suspect_since: now,
            breaker: Breaker::new(now),
            latency: Latency::new(latency, now),
            latency_before_failures: latency,
        }
    }

    /// Takes the agent's report. A change to healthy closes the breaker, open or half open. A
    /// repeated report says nothing new: it may come from a check that does not see why requests
    /// fail.
    pub(crate) fn reported(&mut self, health: BackendHealth, now: Instant) {
        let before = std::mem::replace(&mut self.reported, health);
        if (before == BackendHealth::Unhealthy) != (health == BackendHealth::Unhealthy) {
            self.reported_since = now;
        }
        if health != BackendHealth::Healthy || before == health {
            return;
        }
        // The report of an unhealthy backend may have come before the failures that open the
        // breaker.
        if self.breaker.close(now) || before == BackendHealth::Unhealthy {
            let latency = self.latency_before_failures.min(self.latency.get(now));
            self.latency = Latency::new(latency, now);
        }
    }

    /// Takes whether a PING is unanswered for longer than a tunnel in order needs. Returns whether
    /// that has changed.
    pub(crate) fn suspect(&mut self, is_suspect: bool, now: Instant) -> bool {
        let has_changed = self.is_suspect != is_suspect;
        if has_changed {
            (self.is_suspect, self.suspect_since) = (is_suspect, now);
        }
        has_changed
    }

    pub(crate) fn is_suspect(&self) -> bool {
        self.is_suspect
    }

    /// Records that a request is sent on the tunnel.
    pub(crate) fn began(&mut self, now: Instant) -> BegunAttempt {
        BegunAttempt(self.breaker.began(now))
    }

    /// Records an answer of a backend, whatever its status, with the time to its head. Time in
    /// which the caller sent the body is no part of it.
    pub(crate) fn succeeded(
        &mut self,
        BegunAttempt(mark): BegunAttempt,
        latency: Duration,
        now: Instant,
    ) {
        if self.breaker.succeeded(mark, now) {
            // The latency is that of the failures until here.
            self.latency = Latency::new(latency, now);
        } else {
            self.latency.observe(latency, now);
        }
    }

    /// Records a failure, with the time that it took.
    pub(crate) fn failed(
        &mut self,
        BegunAttempt(mark): BegunAttempt,
        failure: TunnelFailure,
        took: Duration,
        now: Instant,
        random: &mut dyn FnMut() -> f64,
    ) {
        let sample = match failure {
            // Doubled, so that a full agent gets fewer requests with each refusal, and its share
            // soon after.
            TunnelFailure::NoSlot => self
                .latency
                .get(now)
                .saturating_mul(2)
                .clamp(NO_SLOT_LATENCY, FAILURE_LATENCY),
            TunnelFailure::Unreachable | TunnelFailure::Broken => {
                if self.breaker.is_in_order() {
                    self.latency_before_failures = self.latency.get(now);
                }
                took.max(FAILURE_LATENCY)
            }
        };
        self.latency.observe(sample, now);
        self.breaker.failed(mark, failure, now, random);
    }

    /// Records that the caller left after this time without an answer. No verdict, but the latency
    /// is at least that: otherwise an agent that never answers would look idle.
    pub(crate) fn abandoned(
        &mut self,
        BegunAttempt(mark): BegunAttempt,
        after: Duration,
        now: Instant,
    ) {
        self.latency.observe(after, now);
        self.breaker.without_verdict(mark, now);
    }

    /// Time to the response head that a request can expect. Unaffected by reports, so that tunnels
    /// compare by their answers.
    pub(crate) fn latency(&self, now: Instant) -> Duration {
        self.latency.get(now)
    }

    /// HealthTier for a request, which `is_repeatable` if it goes to another agent even after a
    /// backend may have received it.
    pub(crate) fn tier(&self, is_repeatable: bool, now: Instant) -> HealthTier {
        if self.is_suspect || self.reported == BackendHealth::Unhealthy {
            return HealthTier::Impaired;
        }
        match self.breaker.state(is_repeatable, now) {
            BreakerState::Closed => HealthTier::Ready,
            BreakerState::HalfOpen { is_due: true, .. } => HealthTier::Probe,
            BreakerState::Open { .. } | BreakerState::HalfOpen { .. } => HealthTier::Impaired,
        }
    }

    /// State of the tunnel, since when, and why.
    pub(crate) fn condition(&self, now: Instant) -> TunnelCondition {
        let (state, since, why) = match self.breaker.state(true, now) {
            _ if self.is_suspect => (
                TunnelState::Suspect,
                self.suspect_since,
                "the agent does not answer a PING",
            ),
            _ if self.reported == BackendHealth::Unhealthy => (
                TunnelState::Unhealthy,
                self.reported_since,
                "the agent reports that no backend takes connections",
            ),
            BreakerState::Open { cause } => {
                (TunnelState::BreakerOpen, self.breaker.since, cause.why())
            }
            BreakerState::HalfOpen { cause, since, .. } => {
                (TunnelState::Probing, since, cause.why())
            }
            BreakerState::Closed => {
                let since = self
                    .reported_since
                    .max(self.suspect_since)
                    .max(self.breaker.since);
                (TunnelState::Ready, since, "")
            }
        };
        TunnelCondition { state, since, why }
    }
}

impl TunnelFailure {
    fn why(self) -> &'static str {
        match self {
            Self::Unreachable => "requests in a row reached no backend",
            Self::Broken => "requests in a row were broken off by the backend or the agent",
            Self::NoSlot => "the agent has no free slot",
        }
    }
}

/// Median of the latencies of a service's tunnels, with which a further one begins; the lower of
/// the two in the middle.
pub(crate) fn median_latency(latencies: impl Iterator<Item = Duration>) -> Option<Duration> {
    let mut sorted: Vec<Duration> = latencies.collect();
    sorted.sort_unstable();
    sorted.get(sorted.len().checked_sub(1)? / 2).copied()
}
