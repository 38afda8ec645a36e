//! Grace period after a takeover or a restart: while agents reconnect, requests for their services
//! wait instead of being refused.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::limits;

/// Tunnels that agents had with the process before this one, by service. Shared by all workers.
/// Empty after a first start, a crash or a long stop.
#[derive(Default)]
pub struct TunnelGrace {
    /// Keyed by the label of the service.
    services: HashMap<String, AwaitedTunnels>,
    /// Start of the wait; `None` if no tunnels are expected.
    since: Option<Instant>,
}

struct AwaitedTunnels {
    before: usize,
    missing: AtomicUsize,
}

impl TunnelGrace {
    /// Expects these numbers of tunnels, keyed by the label of the service, from `since` on.
    pub fn new(tunnels: BTreeMap<String, usize>, since: Instant) -> Self {
        let tunnels = tunnels.into_iter();
        let services: HashMap<_, _> = tunnels
            .map(|(label, before)| {
                (
                    label,
                    AwaitedTunnels {
                        before,
                        missing: AtomicUsize::new(before),
                    },
                )
            })
            .collect();
        Self {
            since: Some(since).filter(|_| !services.is_empty()),
            services,
        }
    }

    /// Counts a new tunnel.
    pub(crate) fn arrived(&self, label: &str) {
        if let Some(tunnels) = self.services.get(label) {
            let one_less = |missing: usize| missing.checked_sub(1);
            // Fails if no tunnel was missing.
            let _ = tunnels
                .missing
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
        }
    }

    /// Labels of the services that wait for their first tunnel.
    pub(crate) fn awaited(&self, now: Instant) -> impl Iterator<Item = &str> {
        let is_within = |since: Instant| now < since + limits::FIRST_TUNNEL_BACK;
        let services = self.since.filter(|since| is_within(*since));
        let services = services.into_iter().flat_map(|_| &self.services);
        let awaited = services
            .filter(|(_, tunnels)| tunnels.missing.load(Ordering::Relaxed) == tunnels.before);
        awaited.map(|(label, _)| label.as_str())
    }

    /// Time until which a request for this service waits for a tunnel; `None` if it need not wait.
    /// With `others_wait`, other requests of the service wait already, and this one must not
    /// overtake them. The wait for the first tunnel is the longest. It is shorter while some are
    /// missing: these few could be overloaded.
    pub(crate) fn wait_until(
        &self,
        label: &str,
        others_wait: bool,
        now: Instant,
    ) -> Option<Instant> {
        let since = self
            .since
            .filter(|since| now < *since + limits::FIRST_TUNNEL_BACK)?;
        let tunnels = self.services.get(label)?;
        let until = match tunnels.missing.load(Ordering::Relaxed) {
            0 if !others_wait => return None,
            0 => since + limits::FIRST_TUNNEL_BACK,
            missing if missing < tunnels.before => since + limits::ALL_TUNNELS_BACK,
            _ => since + limits::FIRST_TUNNEL_BACK,
        };
        Some(until).filter(|until| now < *until)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn requests_wait_longer_for_the_first_tunnel_than_for_all() {
        let start = Instant::now();
        let expected = TunnelGrace::new(BTreeMap::from([("a".into(), 2), ("b".into(), 1)]), start);
        let waits = |label, after| expected.wait_until(label, false, start + after).is_some();
        let some = limits::FIRST_TUNNEL_BACK;
        let all = limits::ALL_TUNNELS_BACK;
        let moment = Duration::from_millis(1);
        assert!(!waits("unknown", Duration::ZERO));
        assert!(waits("a", some - moment) && !waits("a", some));
        expected.arrived("a");
        assert!(waits("a", all - moment) && !waits("a", all));
        expected.arrived("a");
        assert!(!waits("a", Duration::ZERO));
        assert!(
            expected.wait_until("a", true, start).is_some(),
            "behind others"
        );
        // More tunnels than before.
        expected.arrived("a");
        assert!(!waits("a", Duration::ZERO));
        assert!(
            waits("b", Duration::ZERO),
            "each service waits for its own tunnels"
        );
    }

    #[test]
    fn without_expected_tunnels_requests_do_not_wait() {
        for expected in [
            TunnelGrace::default(),
            TunnelGrace::new(BTreeMap::new(), Instant::now()),
        ] {
            assert!(expected.wait_until("a", false, Instant::now()).is_none());
        }
    }
}
