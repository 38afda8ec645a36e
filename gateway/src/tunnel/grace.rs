//! Tunnels on their way here from the process before this one: its agents were told to come, and until they have, the
//! callers of their services wait instead of being refused.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use gw_shared::net::tls::ClientHello;
use gw_shared::runtime;

use super::Tunnels;
use crate::connections::ConnectionGuard;
use crate::hostname::Destination;
use crate::limits;

/// How often a waiting connection looks again. Only in the first seconds of a successor.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// By service, the tunnels that its agents had with the predecessor. Shared by all workers; empty without one.
#[derive(Default)]
pub(crate) struct TunnelGrace {
    /// By label.
    services: HashMap<String, ServiceTunnels>,
    /// When the predecessor sends its agents here.
    since: Option<Instant>,
}

struct ServiceTunnels {
    before: usize,
    missing: AtomicUsize,
}

impl TunnelGrace {
    pub(crate) fn new(tunnels: BTreeMap<String, usize>, since: Instant) -> Self {
        let tunnels = tunnels.into_iter();
        let services = tunnels
            .map(|(label, before)| (label, ServiceTunnels { before, missing: AtomicUsize::new(before) }))
            .collect();
        Self { services, since: Some(since) }
    }

    /// A tunnel is ready that was not there before.
    pub(super) fn arrived(&self, label: &str) {
        if let Some(tunnels) = self.services.get(label) {
            let one_less = |missing: usize| missing.checked_sub(1);
            // An error means that none was missing.
            let _ = tunnels.missing.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
        }
    }

    /// Whether callers of a service should wait. One tunnel in place of several could be more than full: for the others,
    /// too, they wait, but not as long.
    fn should_wait(&self, label: &str, now: Instant) -> bool {
        let Some((since, tunnels)) = self.since.zip(self.services.get(label)) else { return false };
        let waited = now.saturating_duration_since(since);
        match tunnels.missing.load(Ordering::Relaxed) {
            0 => false,
            missing if missing < tunnels.before => waited < limits::ALL_TUNNELS_BACK,
            _ => waited < limits::FIRST_TUNNEL_BACK,
        }
    }

    fn is_over(&self, now: Instant) -> bool {
        self.since.is_none_or(|since| now.saturating_duration_since(since) >= limits::FIRST_TUNNEL_BACK)
    }
}

/// Waits until the tunnels of the service that a caller asks for are back, or for some seconds.
pub(crate) async fn wait_for_tunnels(tunnels: &Tunnels, hello: &ClientHello, guard: &ConnectionGuard) {
    if tunnels.grace.since.is_none() || tunnels.grace.is_over(Instant::now()) {
        return;
    }
    let Some(Destination::Tenant(label)) = hello.server_name.as_deref().map(|name| tunnels.region.destination(name))
    else {
        return;
    };
    while tunnels.grace.should_wait(&label, Instant::now()) {
        // The wait is ours, and does not count as the caller's.
        guard.expect_by(Instant::now() + limits::HANDSHAKE);
        runtime::sleep(LOOK_AGAIN).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_wait_for_all_tunnels_and_for_the_first_one_longer() {
        let start = Instant::now();
        let expected = TunnelGrace::new(BTreeMap::from([("a".into(), 2), ("b".into(), 1)]), start);
        let waits = |label, after| expected.should_wait(label, start + after);
        let (some, all) = (limits::FIRST_TUNNEL_BACK, limits::ALL_TUNNELS_BACK);
        let moment = Duration::from_millis(1);
        assert!(!waits("unknown", Duration::ZERO));
        assert!(waits("a", some - moment) && !waits("a", some));
        expected.arrived("a");
        assert!(waits("a", all - moment) && !waits("a", all));
        expected.arrived("a");
        assert!(!waits("a", Duration::ZERO));
        // More than there were.
        expected.arrived("a");
        assert!(!waits("a", Duration::ZERO));
        assert!(waits("b", Duration::ZERO), "services wait for their own");
        assert!(!expected.is_over(start + some - moment) && expected.is_over(start + some));
    }

    #[test]
    fn without_a_predecessor_nobody_waits() {
        let expected = TunnelGrace::default();
        assert!(expected.is_over(Instant::now()) && !expected.should_wait("a", Instant::now()));
    }
}
