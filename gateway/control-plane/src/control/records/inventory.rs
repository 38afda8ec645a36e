//! Counts of records and the next expiries, for monitoring.

use std::collections::{BTreeMap, BTreeSet};

use gw_base::clock::Timestamp;
use gw_base::service::hostname::tenant_label;
use gw_region::Owner;
use gw_shared::identity::enrollment::EnrollmentStatus;
use gw_store::{DomainState, Records};
use gw_telemetry::counters::WorkerReport;

use crate::control::{Control, StoreStatus};

/// Counts of the records, and the next expiries.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inventory {
    /// Labels of the enabled services, sorted.
    pub services: Vec<String>,
    /// Number of agents by status: `pending`, `approved`, `expired` (its certificate has expired)
    /// or `revoked`.
    pub agents: BTreeMap<&'static str, u64>,
    /// The first expiry among the certificates of agents with a tunnel.
    pub first_agent_expiry: Option<Timestamp>,
    /// First expiry among the server certificate, that of the admin listener, and the authorities
    /// in their chains.
    pub server_certificate_expiry: Option<Timestamp>,
    /// Failed attempts in a row to get the certificate of an ACME authority.
    pub certificate_failures: u32,
    /// Number of own domains by status: `pending`, `active`, `lost` or `disabled`.
    pub domains: BTreeMap<&'static str, u64>,
    /// Number of own domains that are served by the state of their certificate: `missing`, `valid`,
    /// or `expiring` (in the last sixth of its lifetime).
    pub domain_certificates: BTreeMap<&'static str, u64>,
    /// State of the store.
    pub store: StoreStatus,
}

impl Control {
    /// First expiry among the server certificate in use and the authorities in its chain.
    pub(crate) fn server_certificate_end(&self) -> Option<Timestamp> {
        self.tls.not_after()
    }

    /// Computes the inventory at `now`; `reports` lists the tunnels of the agents.
    pub fn inventory(&self, reports: &[WorkerReport], now: Timestamp) -> Inventory {
        let connected: BTreeSet<&str> = reports
            .iter()
            .flat_map(|report| &report.tunnels)
            .map(|tunnel| tunnel.agent_id.as_str())
            .collect();
        let store = self.store_status();
        let certificate_failures = self.certificate_failures();
        // Another node reports the services that it owns.
        let placement = self.local_node().placement();
        let is_ours = |label: &String| {
            let hostname = format!("{label}.{}", self.region.apex());
            placement
                .as_ref()
                .is_none_or(|placement| placement.owner(&hostname) == Owner::Here)
        };
        let records = &self.state().records;
        let mut agents =
            BTreeMap::from(["pending", "approved", "expired", "revoked"].map(|state| (state, 0)));
        for agent in records.agents.values() {
            let state = match agent.status {
                EnrollmentStatus::Pending => "pending",
                EnrollmentStatus::Revoked => "revoked",
                EnrollmentStatus::Approved
                    if agent.certificate_not_after.is_some_and(|it| it <= now) =>
                {
                    "expired"
                }
                EnrollmentStatus::Approved => "approved",
            };
            *agents.entry(state).or_default() += 1;
        }
        let (domains, domain_certificates) = domains(records, now);
        let connected = records
            .agents
            .values()
            .filter(|agent| connected.contains(agent.id.as_str()));
        let enabled = records
            .services
            .values()
            .filter(|service| service.settings.enabled);
        let mut services: Vec<String> = enabled
            .filter_map(|service| tenant_label(&service.account, &service.id))
            .filter(is_ours)
            .collect();
        services.sort_unstable();
        Inventory {
            services,
            agents,
            first_agent_expiry: connected
                .filter_map(|agent| agent.certificate_not_after)
                .min(),
            server_certificate_expiry: [
                self.server_certificate_end(),
                self.admin_tls().and_then(|tls| tls.not_after()),
            ]
            .into_iter()
            .flatten()
            .min(),
            certificate_failures,
            domains,
            domain_certificates,
            store,
        }
    }
}

type Counts = BTreeMap<&'static str, u64>;

/// Counts own domains by status, and those that are served by the state of their certificate.
fn domains(records: &Records, now: Timestamp) -> (Counts, Counts) {
    let mut domains =
        BTreeMap::from(["pending", "active", "lost", "disabled"].map(|state| (state, 0)));
    for domain in records.domains.values() {
        let state = match domain.state {
            DomainState::Pending => "pending",
            DomainState::Active => "active",
            DomainState::Lost => "lost",
            DomainState::Disabled => "disabled",
        };
        *domains.entry(state).or_default() += 1;
    }
    let mut domain_certificates =
        BTreeMap::from(["missing", "valid", "expiring"].map(|state| (state, 0)));
    for domain in records.domains.values().filter(|it| it.state.is_served()) {
        let state = match domain.certificate {
            None => "missing",
            Some(it) if it.not_after.since(now) < it.not_after.since(it.not_before) / 6 => {
                "expiring"
            }
            Some(_) => "valid",
        };
        *domain_certificates.entry(state).or_default() += 1;
    }
    (domains, domain_certificates)
}
