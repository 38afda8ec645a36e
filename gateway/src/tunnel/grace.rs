//! Grace period after a takeover or a restart: while agents reconnect, connections for their services wait instead of being
//! refused.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use gw_shared::net::tls::ClientHello;
use gw_shared::runtime;

use super::Tunnels;
use crate::connections::ConnectionGuard;
use crate::hostname::Destination;
use crate::limits;

/// Interval between checks of a waiting connection. Applies only in the first seconds of a process.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// Tunnels that agents had with the process before this one, by service. Shared by all workers. Empty after a first start, a
/// crash or a long stop.
#[derive(Default)]
pub(crate) struct TunnelGrace {
    /// Keyed by the label of the service.
    services: HashMap<String, ServiceTunnels>,
    /// Start of the wait; `None` if no tunnels are expected.
    since: Option<Instant>,
}

struct ServiceTunnels {
    before: usize,
    missing: AtomicUsize,
}

impl TunnelGrace {
    pub(crate) fn new(tunnels: BTreeMap<String, usize>, since: Instant) -> Self {
        let tunnels = tunnels.into_iter();
        let services: HashMap<_, _> = tunnels
            .map(|(label, before)| (label, ServiceTunnels { before, missing: AtomicUsize::new(before) }))
            .collect();
        Self { since: Some(since).filter(|_| !services.is_empty()), services }
    }

    /// Counts a new tunnel.
    pub(super) fn arrived(&self, label: &str) {
        if let Some(tunnels) = self.services.get(label) {
            let one_less = |missing: usize| missing.checked_sub(1);
            // Fails if no tunnel was missing.
            let _ = tunnels.missing.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
        }
    }

    /// Whether connections and requests for a service should wait. They wait longest for the first tunnel, and less long for the
    /// others, because one tunnel in place of several could be overloaded.
    pub(crate) fn should_wait(&self, label: &str, now: Instant) -> bool {
        let Some(waited) = self.since.map(|since| now.saturating_duration_since(since)) else { return false };
        if waited >= limits::FIRST_TUNNEL_BACK {
            return false;
        }
        let Some(tunnels) = self.services.get(label) else { return false };
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

/// Waits until the tunnels of the service in the server name are back, at most [`limits::FIRST_TUNNEL_BACK`].
pub(crate) async fn wait_for_tunnels(tunnels: &Tunnels, hello: &ClientHello, guard: &ConnectionGuard) {
    if tunnels.grace.since.is_none() || tunnels.grace.is_over(Instant::now()) {
        return;
    }
    let Some(Destination::Tenant(label)) = hello.server_name.as_deref().map(|name| tunnels.region.destination(name))
    else {
        return;
    };
    while tunnels.grace.should_wait(&label, Instant::now()) {
        // This wait does not count against the deadline of the caller.
        guard.expect_by(Instant::now() + limits::HANDSHAKE);
        runtime::sleep(CHECK_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_wait_longer_for_the_first_tunnel_than_for_all() {
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
        // More tunnels than before.
        expected.arrived("a");
        assert!(!waits("a", Duration::ZERO));
        assert!(waits("b", Duration::ZERO), "each service waits for its own tunnels");
        assert!(!expected.is_over(start + some - moment) && expected.is_over(start + some));
    }

    #[test]
    fn without_expected_tunnels_connections_do_not_wait() {
        for expected in [TunnelGrace::default(), TunnelGrace::new(BTreeMap::new(), Instant::now())] {
            assert!(expected.is_over(Instant::now()) && !expected.should_wait("a", Instant::now()));
        }
    }
}
