//! What there is of everything, for those who watch the gateway as a whole.

use std::collections::{BTreeMap, BTreeSet};

use gw_shared::identity::enrollment::EnrollmentStatus;

use super::Control;
use crate::clock::Timestamp;
use crate::hostname::tenant_label;
use crate::telemetry::counters::WorkerReport;

/// Numbers of the records, and what is about to expire.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inventory {
    /// Labels of the services that are enabled, in order.
    pub services: Vec<String>,
    /// Agents by what is the matter with them: `pending`, `approved`, `expired` (its certificate is) or `revoked`.
    pub agents: BTreeMap<&'static str, u64>,
    /// The first expiry among the certificates of agents that have a tunnel.
    pub first_agent_expiry: Option<Timestamp>,
    /// When the server certificate expires, or an authority in its chain.
    pub server_certificate_expiry: Option<Timestamp>,
}

impl Control {
    /// Takes stock at `now`; `reports` say which agents have tunnels.
    pub fn inventory(&self, reports: &[WorkerReport], now: Timestamp) -> Inventory {
        let connected: BTreeSet<&str> =
            reports.iter().flat_map(|report| &report.tunnels).map(|tunnel| tunnel.agent_id.as_str()).collect();
        let records = &self.state().records;
        let mut agents = BTreeMap::from(["pending", "approved", "expired", "revoked"].map(|state| (state, 0)));
        for agent in records.agents.values() {
            let state = match agent.status {
                EnrollmentStatus::Pending => "pending",
                EnrollmentStatus::Revoked => "revoked",
                EnrollmentStatus::Approved if agent.certificate_not_after.is_some_and(|it| it <= now) => "expired",
                EnrollmentStatus::Approved => "approved",
            };
            *agents.entry(state).or_default() += 1;
        }
        let connected = records.agents.values().filter(|agent| connected.contains(agent.id.as_str()));
        let enabled = records.services.values().filter(|service| service.enabled);
        let mut services: Vec<String> =
            enabled.filter_map(|service| tenant_label(&service.account, &service.id)).collect();
        services.sort_unstable();
        Inventory {
            services,
            agents,
            first_agent_expiry: connected.filter_map(|agent| agent.certificate_not_after).min(),
            server_certificate_expiry: self.tls.not_after(),
        }
    }
}
