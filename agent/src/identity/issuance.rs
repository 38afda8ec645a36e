//! How often an agent asks for certificates. Each costs the gateway a write to its disk and the agent a place in its
//! allowance: whatever clocks say, a new one is left to prove itself for a while.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Least time between two certificates, unless they live shorter than three times that.
const APART: Duration = Duration::from_secs(180);
const LEAST_APART: Duration = Duration::from_secs(1);

/// When this process last got a certificate.
#[derive(Default)]
pub(crate) struct Issuance {
    /// When, and how long none is asked for after that.
    last: Cell<Option<(Instant, Duration)>>,
}

impl Issuance {
    /// A certificate was issued; `lifetime` is the time until it expires by the gateway's clock, if known.
    pub(crate) fn issued(&self, lifetime: Option<Duration>) {
        let apart = lifetime.map_or(APART, |lifetime| (lifetime / 3).clamp(LEAST_APART, APART));
        self.last.set(Some((Instant::now(), apart)));
    }

    /// How long to wait before another is asked for; zero if one may be now.
    pub(crate) fn wait(&self) -> Duration {
        self.last.get().map_or(Duration::ZERO, |(at, apart)| apart.saturating_sub(at.elapsed()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_are_minutes_apart_unless_they_live_only_for_moments() {
        let issuance = Issuance::default();
        assert_eq!(issuance.wait(), Duration::ZERO);
        for (lifetime, most) in [
            (None, APART),
            (Some(Duration::from_hours(24)), APART),
            (Some(APART), APART / 3),
            (Some(Duration::ZERO), LEAST_APART),
        ] {
            issuance.issued(lifetime);
            let wait = issuance.wait();
            assert!(!wait.is_zero() && wait <= most && wait > most / 2, "{lifetime:?}: {wait:?}");
        }
    }
}
