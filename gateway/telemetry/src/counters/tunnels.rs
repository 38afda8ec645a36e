//! State of tunnels for lists and metrics.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::limits;
use gw_shared::telemetry::metrics::{Exposition, Kind};

use super::services::OTHER;
use super::{TunnelReport, WorkerReport};

/// State of the tunnels of a node that does not report it.
const UNKNOWN: &str = "unknown";

/// State of a tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TunnelState {
    /// Gets its share of requests.
    Ready,
    /// The breaker is half open: one request at a time is let through.
    Probing,
    /// The breaker is open: the tunnel failed, and gets no requests for a while.
    BreakerOpen,
    /// The agent reports that no backend takes connections.
    Unhealthy,
    /// The agent does not answer a PING.
    Suspect,
    /// Gets no new requests because it is about to end.
    Draining,
}

impl TunnelState {
    /// All states.
    pub const ALL: [Self; 6] = [
        Self::Ready,
        Self::Probing,
        Self::BreakerOpen,
        Self::Unhealthy,
        Self::Suspect,
        Self::Draining,
    ];

    /// Returns the name of the state in reports and metrics, for example `breaker_open`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Probing => "probing",
            Self::BreakerOpen => "breaker_open",
            Self::Unhealthy => "unhealthy",
            Self::Suspect => "suspect",
            Self::Draining => "draining",
        }
    }
}

impl TunnelReport {
    /// The state for people and metrics.
    pub fn shown_state(&self) -> &str {
        if self.draining {
            TunnelState::Draining.as_str()
        } else {
            &self.state
        }
    }

    /// Whether the tunnel gets its share of requests, as far as it is known.
    pub fn is_ready(&self) -> bool {
        [TunnelState::Ready.as_str(), UNKNOWN].contains(&self.shown_state())
    }

    /// Why the tunnel is not ready, and since when: `unhealthy for 5m: the agent reports …`.
    pub fn state_in_words(&self) -> String {
        let state = self.shown_state().replace('_', " ");
        if self.draining || self.state == UNKNOWN {
            return state;
        }
        let since = humantime::format_duration(std::time::Duration::from_secs(self.state_seconds));
        let reason = self
            .state_reason
            .as_ref()
            .map_or_else(String::new, |reason| format!(": {reason}"));
        format!("{state} for {since}{reason}")
    }

    pub(super) fn unknown_state() -> String {
        UNKNOWN.to_owned()
    }
}

/// Sums over the tunnels of one service.
#[derive(Default)]
struct TunnelSums {
    up: u64,
    in_flight: u64,
    window: u64,
    held: u64,
    slots: u64,
    slots_in_use: u64,
    round_trip_us: u64,
}

impl TunnelSums {
    fn add(&mut self, tunnel: &TunnelReport) {
        self.up += u64::from(!tunnel.draining);
        self.in_flight += tunnel.in_flight as u64;
        self.window = self.window.max(tunnel.window.into());
        self.held += tunnel.held_bytes as u64;
        self.slots += u64::from(tunnel.slots.unwrap_or(0));
        self.slots_in_use += u64::from(tunnel.slots_in_use.unwrap_or(0));
        self.round_trip_us = self.round_trip_us.max(tunnel.round_trip_us.unwrap_or(0));
    }
}

/// Metrics of the tunnels of each service: name, help text and value.
type TunnelMetric = (&'static str, &'static str, fn(&TunnelSums) -> f64);

const TUNNEL_METRICS: [TunnelMetric; 7] = [
    (
        "gw_service_tunnels",
        "Tunnels of the service that take requests.",
        |tunnels| tunnels.up as f64,
    ),
    (
        "gw_tunnel_in_flight",
        "Requests in progress on the service's tunnels.",
        |tunnels| tunnels.in_flight as f64,
    ),
    (
        "gw_tunnel_window_bytes",
        "Flow-control window of a stream; the largest of the service's tunnels.",
        |tunnels| tunnels.window as f64,
    ),
    (
        "gw_tunnel_held_bytes",
        "Bytes of heads and bodies that wait: for callers to read responses, and for agents to \
         read requests.",
        |tunnels| tunnels.held as f64,
    ),
    (
        "gw_tunnel_slots",
        "Concurrent requests that the service's agents accept.",
        |tunnels| tunnels.slots as f64,
    ),
    (
        "gw_tunnel_slots_in_use",
        "Requests in progress at the service's agents, as last reported by them.",
        |tunnels| tunnels.slots_in_use as f64,
    ),
    (
        "gw_tunnel_round_trip_seconds",
        "Time from the last measured PING to the agent's answer; the longest of the service's \
         tunnels.",
        |tunnels| tunnels.round_trip_us as f64 / 1e6,
    ),
];

/// Writes the metrics of tunnels. `services` are the labels of all enabled services.
pub fn write(out: &mut Exposition, reports: &[WorkerReport], services: &[String]) {
    let tunnels: Vec<&TunnelReport> = reports.iter().flat_map(|report| &report.tunnels).collect();
    let up = tunnels.iter().filter(|tunnel| !tunnel.draining);
    let up: HashSet<&str> = up.map(|tunnel| tunnel.service.as_str()).collect();
    let without = services.iter().filter(|label| !up.contains(label.as_str()));
    let help = "Enabled services without a tunnel that takes requests. Counts all services.";
    out.single(
        "gw_services_without_tunnel",
        Kind::Gauge,
        help,
        without.count(),
    );
    out.single("gw_tunnels", Kind::Gauge, "Open tunnels.", tunnels.len());
    let mut states = BTreeMap::from(TunnelState::ALL.map(|state| (state.as_str(), 0)));
    for tunnel in &tunnels {
        *states.entry(tunnel.shown_state()).or_default() += 1;
    }
    let mut family = out.family("gw_tunnel_state", Kind::Gauge, "Open tunnels by state.");
    for (state, count) in states {
        family.sample(&[("state", state)], f64::from(count));
    }
    let by_service = by_service(&tunnels, services);
    for (name, help, value) in TUNNEL_METRICS {
        let mut family = out.family(name, Kind::Gauge, help);
        for (service, tunnels) in &by_service {
            family.sample(&[("service", service)], value(tunnels));
        }
    }
}

/// Sums of each service. Services without a tunnel have zeros: alerts need them.
fn by_service<'a>(
    tunnels: &[&'a TunnelReport],
    services: &'a [String],
) -> BTreeMap<&'a str, TunnelSums> {
    let mut by_service: BTreeMap<&str, TunnelSums> = BTreeMap::new();
    for label in services.iter().take(limits::SERVICES_COUNTED) {
        by_service.entry(label).or_default();
    }
    for tunnel in tunnels {
        let is_counted = by_service.len() < limits::SERVICES_COUNTED
            || by_service.contains_key(tunnel.service.as_str());
        let service = if is_counted { &tunnel.service } else { OTHER };
        by_service.entry(service).or_default().add(tunnel);
    }
    by_service
}

/// Sets the share of each tunnel of the requests of its service. `tunnels` has all tunnels of each
/// service in it.
pub fn with_shares(mut tunnels: Vec<TunnelReport>) -> Vec<TunnelReport> {
    let mut totals: HashMap<String, u64> = HashMap::new();
    for tunnel in &tunnels {
        *totals.entry(tunnel.service.clone()).or_default() += tunnel.requests;
    }
    for tunnel in &mut tunnels {
        let total = totals.get(&tunnel.service).copied().unwrap_or_default();
        tunnel.share_percent = percent(tunnel.requests, total);
    }
    tunnels
}

/// Rounded to the nearest; `None` of nothing.
fn percent(part: u64, total: u64) -> Option<u8> {
    let part = u128::from(part);
    let total = u128::from(total);
    (part * 100 + total / 2)
        .checked_div(total)
        .and_then(|percent| u8::try_from(percent).ok())
}

impl TunnelReport {
    /// Report of a tunnel of `service` that is ready and idle. For tests, also of other crates.
    #[doc(hidden)]
    pub fn example(service: &str, agent_id: &str) -> Self {
        Self {
            service: service.to_owned(),
            agent_id: agent_id.to_owned(),
            agent_version: "1".to_owned(),
            update: None,
            certificate_not_after: None,
            generation: 1,
            node: None,
            worker: 0,
            age_seconds: 1,
            idle_seconds: 0,
            round_trip_us: None,
            in_flight: 0,
            window: 9,
            held_bytes: 0,
            slots: None,
            slots_in_use: None,
            full_seconds_ago: None,
            draining: false,
            state: TunnelState::Ready.as_str().to_owned(),
            state_seconds: 1,
            state_reason: None,
            standby: false,
            requests: 0,
            share_percent: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_the_requests_of_one_service() {
        let tunnel = |service, requests| TunnelReport {
            requests,
            ..TunnelReport::example(service, "ag")
        };
        let tunnels = [
            ("a--a", 1),
            ("a--b", 5),
            ("a--a", 2),
            ("a--c", 0),
            ("a--d", u64::MAX / 2),
            ("a--d", 1),
        ];
        let shares = with_shares(
            tunnels
                .map(|(service, requests)| tunnel(service, requests))
                .to_vec(),
        );
        let shares: Vec<Option<u8>> = shares.iter().map(|tunnel| tunnel.share_percent).collect();
        assert_eq!(
            shares,
            [Some(33), Some(100), Some(67), None, Some(100), Some(0)]
        );
    }

    #[test]
    fn reports_of_earlier_versions_have_an_unknown_state() {
        let mut report = serde_json::to_value(TunnelReport::example("a--a", "ag")).unwrap();
        for field in [
            "state",
            "state_seconds",
            "state_reason",
            "standby",
            "requests",
            "share_percent",
        ] {
            report.as_object_mut().unwrap().remove(field).unwrap();
        }
        let report: TunnelReport = serde_json::from_value(report).unwrap();
        assert_eq!(
            (report.shown_state(), report.is_ready(), report.standby),
            ("unknown", true, false)
        );
        assert_eq!(report.state_in_words(), "unknown");
    }

    #[test]
    fn a_state_is_told_with_time_and_reason() {
        let report = TunnelReport {
            state: "breaker_open".to_owned(),
            state_seconds: 61,
            state_reason: Some("no backend takes a connection".to_owned()),
            ..TunnelReport::example("a--a", "ag")
        };
        assert_eq!(
            report.state_in_words(),
            "breaker open for 1m 1s: no backend takes a connection"
        );
        let draining = TunnelReport {
            draining: true,
            ..report
        };
        assert_eq!(
            (draining.state_in_words().as_str(), draining.is_ready()),
            ("draining", false)
        );
    }
}
