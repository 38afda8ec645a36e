//! Services whose last tunnel has ended a moment ago. Their agents are expected back, so requests
//! wait instead of being refused.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use crate::limits;

/// Labels of these services, and when the last tunnel ended.
#[derive(Default)]
pub(crate) struct LostServices {
    since: HashMap<Arc<str>, Instant>,
    /// Number of entries at which old ones are removed.
    removed_at: usize,
}

impl LostServices {
    pub(crate) fn note(&mut self, label: &Arc<str>, now: Instant) {
        const LEAST: usize = 64;
        if self.since.len() >= self.removed_at {
            self.since.retain(|_, since| is_recent(*since, now));
            self.removed_at = LEAST.max(2 * self.since.len());
        }
        self.since.insert(Arc::clone(label), now);
    }

    /// Forgets old entries, so that requests need not look for their service.
    pub(crate) fn forget(&mut self, now: Instant) {
        self.since.retain(|_, since| is_recent(*since, now));
    }

    pub(crate) fn labels(&self, now: Instant) -> impl Iterator<Item = &str> {
        let recent = self.since.iter();
        let recent = recent.filter(move |(_, since)| is_recent(**since, now));
        recent.map(|(label, _)| &**label)
    }

    /// Time until which a tunnel of the service is expected; `None` if none ended a moment ago.
    pub(crate) fn until(&self, label: &str, now: Instant) -> Option<Instant> {
        if self.since.is_empty() {
            return None;
        }
        let since = self
            .since
            .get(label)
            .filter(|since| is_recent(**since, now))?;
        Some(*since + limits::FIRST_TUNNEL_BACK)
    }
}

fn is_recent(since: Instant, now: Instant) -> bool {
    now.saturating_duration_since(since) < limits::FIRST_TUNNEL_BACK
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_tunnel_is_expected_for_five_seconds_and_old_entries_are_removed() {
        let mut lost = LostServices::default();
        let start = Instant::now();
        let label: Arc<str> = "acme--api".into();
        assert_eq!(lost.until(&label, start), None);
        lost.note(&label, start);
        let end = start + limits::FIRST_TUNNEL_BACK;
        assert_eq!(
            lost.until(&label, end - Duration::from_millis(1)),
            Some(end)
        );
        assert_eq!(
            (lost.until(&label, end), lost.until("acme--other", start)),
            (None, None)
        );
        for number in 0..10_000u64 {
            lost.note(
                &format!("acme--s{number}").into(),
                end + Duration::from_millis(number * 100),
            );
        }
        assert!(lost.since.len() <= 2 * 64, "{}", lost.since.len());
    }
}
