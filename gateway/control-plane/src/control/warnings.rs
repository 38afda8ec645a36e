//! What of the services needs attention although they answer requests.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use gw_base::clock::Timestamp;
use gw_base::service::hostname::tenant_label;
use gw_shared::id::{AccountId, ServiceId};
use gw_shared::identity::enrollment::EnrollmentStatus;
use gw_store::{AgentRecord, Records, ServicePath};
use gw_telemetry::counters::TunnelReport;
use humantime::format_duration;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Control;
use super::records::domain::attention;

/// Most warnings that are listed.
const LISTED: usize = 100;
/// Most agents that one warning names as not ready.
const NAMED: usize = 5;

/// Time for which a service is listed after one of its tunnels was full, in seconds.
const FULL_WITHIN_SECONDS: u64 = 24 * 60 * 60;

const FULL_REMEDY: &str = "set GW_AGENT_MAX_CONCURRENT_BACKEND_REQUESTS of the agent to the \
                           clients at a time, times the streams, WebSockets and requests that each \
                           of them has open, or run a second agent";

const REMEDY: &str = "the service fails with its last ready agent: look at the logs of the others \
                      and run `gw-agent doctor` beside them; delete agents that are gone for good";

/// Services that need attention.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[schema(as = Warnings)]
pub struct WarningsView {
    /// The warnings, at most 100.
    pub items: Vec<WarningView>,
    /// Slots of nodes that do not answer, so that warnings of services that they own are missing;
    /// absent if all answer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing_nodes: Vec<u16>,
    /// Servers of PostgreSQL that take changes although there may be one only, and what to do;
    /// absent if all is well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<String>,
}

/// A service with several agents of which at most one is ready, with a tunnel that was full, or
/// with an own domain that lost its proof or whose certificate ends soon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Warning)]
pub struct WarningView {
    /// Account of the service.
    #[schema(value_type = String)]
    pub account: AccountId,
    /// Id of the service.
    #[schema(value_type = String)]
    pub service: ServiceId,
    /// The ready agent with the reasons of the others, the agent without a free slot, or the domain
    /// with its finding.
    pub found: String,
    /// What to do about it.
    pub remedy: String,
}

impl WarningView {
    pub(crate) fn is_of(&self, account: &AccountId, service: &ServiceId) -> bool {
        (&self.account, &self.service) == (account, service)
    }
}

/// Warnings of the enabled services. `tunnels` are those of all nodes. A service without a tunnel
/// has no warning: lists of services show it.
pub(crate) fn list<'a>(
    control: &Control,
    tunnels: impl IntoIterator<Item = &'a TunnelReport>,
) -> Vec<WarningView> {
    let mut by_service: HashMap<&str, Vec<&TunnelReport>> = HashMap::new();
    for tunnel in tunnels {
        by_service.entry(&tunnel.service).or_default().push(tunnel);
    }
    let now = Timestamp::now();
    control.look_at(|records| {
        let of_services = warnings(records, &by_service);
        let of_domains = of_domains(records, now);
        of_services.chain(of_domains).take(LISTED).collect()
    })
}

/// Warnings of the domains of enabled services.
fn of_domains(records: &Records, now: Timestamp) -> impl Iterator<Item = WarningView> {
    records.domains.values().filter_map(move |record| {
        let path = ServicePath(record.account.clone(), record.service.clone());
        let service = records.services.get(&path)?;
        let (found, remedy) = attention(record, now).filter(|_| service.settings.enabled)?;
        Some(WarningView {
            account: record.account.clone(),
            service: record.service.clone(),
            found,
            remedy,
        })
    })
}

fn warnings<'a>(
    records: &'a Records,
    tunnels: &'a HashMap<&str, Vec<&TunnelReport>>,
) -> impl Iterator<Item = WarningView> + 'a {
    let mut agents: BTreeMap<(&AccountId, &ServiceId), Vec<&AgentRecord>> = BTreeMap::new();
    for agent in records
        .agents
        .values()
        .filter(|agent| agent.status == EnrollmentStatus::Approved)
    {
        for service in &agent.services {
            agents
                .entry((&agent.account, service))
                .or_default()
                .push(agent);
        }
    }
    let enabled = records
        .services
        .values()
        .filter(|service| service.settings.enabled);
    enabled.flat_map(move |service| {
        let agents = agents.get(&(&service.account, &service.id));
        let label = tenant_label(&service.account, &service.id);
        let tunnels = label.and_then(|label| tunnels.get(&*label));
        let of_service = agents.zip(tunnels).map(|(agents, tunnels)| {
            [
                found(agents, tunnels).map(|found| (found, REMEDY)),
                full(tunnels).map(|found| (found, FULL_REMEDY)),
            ]
        });
        let view = move |(found, remedy): (String, &str)| WarningView {
            account: service.account.clone(),
            service: service.id.clone(),
            found,
            remedy: remedy.to_owned(),
        };
        of_service.into_iter().flatten().flatten().map(view)
    })
}

/// The tunnel that was full last; `None` if none was.
fn full(tunnels: &[&TunnelReport]) -> Option<String> {
    let full = tunnels.iter().filter_map(|tunnel| {
        let ago = tunnel.full_seconds_ago?;
        (ago <= FULL_WITHIN_SECONDS).then_some((ago, tunnel))
    });
    let (ago, tunnel) = full.min_by_key(|(ago, _)| *ago)?;
    let when = match ago {
        0 => "is full now".to_owned(),
        ago => format!("was full {} ago", format_duration(Duration::from_secs(ago))),
    };
    Some(format!(
        "the tunnel of {} {when}: all {} slots are in use then, and further requests fail with \
         GW_AGENT_CONCURRENCY_LIMIT unless another agent has free ones",
        tunnel.agent_id,
        tunnel.slots.unwrap_or_default()
    ))
}

/// `None` if the service has one agent, or several ready ones.
fn found(agents: &[&AgentRecord], tunnels: &[&TunnelReport]) -> Option<String> {
    let tunnels_of = |agent: &AgentRecord| {
        let id = agent.id.clone();
        tunnels
            .iter()
            .filter(move |tunnel| tunnel.agent_id == id.as_str())
    };
    let (ready, others): (Vec<&AgentRecord>, Vec<&AgentRecord>) = agents
        .iter()
        .partition(|agent| tunnels_of(agent).any(|tunnel| tunnel.is_ready()));
    if agents.len() < 2 || ready.len() > 1 {
        return None;
    }
    let why = |agent: &&AgentRecord| {
        let newest = tunnels_of(agent).min_by_key(|tunnel| tunnel.age_seconds);
        let why = newest.map_or_else(|| "no tunnel".to_owned(), |tunnel| tunnel.state_in_words());
        format!("{}: {why}", named(agent))
    };
    let mut reasons: Vec<String> = others.iter().take(NAMED).map(why).collect();
    if others.len() > NAMED {
        reasons.push(format!("and {} more", others.len() - NAMED));
    }
    let count = agents.len();
    let ready = match ready.first() {
        Some(ready) => format!("1 of {count} agents is ready, {}", named(ready)),
        None => format!("none of {count} agents is ready"),
    };
    Some(format!("{ready}; {}", reasons.join("; ")))
}

fn named(agent: &AgentRecord) -> String {
    format!("{} ({})", agent.id, agent.name)
}

#[cfg(test)]
mod tests {
    use gw_shared::id::AgentId;
    use serde_json::json;

    use super::*;

    fn agent(number: usize) -> AgentRecord {
        let record = json!({
            "id": id(number),
            "account": "acme",
            "name": format!("edge {number}"),
            "services": ["api"],
            "status": "approved",
        });
        serde_json::from_value(record).unwrap()
    }

    fn id(number: usize) -> AgentId {
        AgentId::new(&format!("ag_{number:020}")).unwrap()
    }

    fn tunnel(number: usize, state: &str) -> TunnelReport {
        TunnelReport {
            state: state.to_owned(),
            ..TunnelReport::example("acme--api", id(number).as_str())
        }
    }

    fn warning(agents: usize, tunnels: &[TunnelReport]) -> Option<String> {
        let agents: Vec<AgentRecord> = (1..=agents).map(agent).collect();
        found(
            &agents.iter().collect::<Vec<_>>(),
            &tunnels.iter().collect::<Vec<_>>(),
        )
    }

    #[test]
    fn a_service_needs_several_agents_of_which_two_are_ready() {
        let ready = |number| tunnel(number, "ready");
        assert_eq!(warning(1, &[ready(1)]), None);
        assert_eq!(warning(1, &[tunnel(1, "suspect")]), None);
        assert_eq!(warning(3, &[ready(1), ready(3)]), None);
        // Nodes of an earlier version do not report the state.
        assert_eq!(warning(2, &[ready(1), tunnel(2, "unknown")]), None);
        // Two tunnels of one agent.
        let drained = TunnelReport {
            draining: true,
            ..ready(1)
        };
        assert!(warning(2, &[ready(1), drained]).is_some());
    }

    #[test]
    fn a_warning_names_the_agents_and_why_they_are_not_ready() {
        let unhealthy = TunnelReport {
            state_seconds: 61,
            state_reason: Some("the agent reports that no backend takes connections".to_owned()),
            ..tunnel(2, "unhealthy")
        };
        let [first, second, third] =
            [1, 2, 3].map(|number| format!("{} (edge {number})", id(number)));
        let expected = format!(
            "1 of 3 agents is ready, {first}; {second}: unhealthy for 1m 1s: the agent reports \
             that no backend takes connections; {third}: no tunnel"
        );
        assert_eq!(warning(3, &[tunnel(1, "ready"), unhealthy]), Some(expected));
        let none = warning(9, &[tunnel(1, "suspect")]).unwrap();
        assert!(
            none.starts_with(&format!(
                "none of 9 agents is ready; {first}: suspect for 1s; {second}: no "
            )),
            "{none}"
        );
        assert!(none.ends_with(": no tunnel; and 4 more"), "{none}");
    }

    #[test]
    fn a_tunnel_that_was_full_is_named_for_a_day() {
        let was_full = |number: usize, ago: Option<u64>| TunnelReport {
            slots: Some(128),
            full_seconds_ago: ago,
            ..tunnel(number, "ready")
        };
        let found = |tunnels: &[TunnelReport]| full(&tunnels.iter().collect::<Vec<_>>());
        assert_eq!(found(&[was_full(1, None), was_full(2, Some(86_401))]), None);
        let text = found(&[
            was_full(1, Some(900)),
            was_full(2, Some(61)),
            was_full(3, None),
        ]);
        let expected = format!("the tunnel of {} was full 1m 1s ago: all 128 slots", id(2));
        assert!(text.as_ref().unwrap().starts_with(&expected), "{text:?}");
        let text = found(&[was_full(1, Some(0))]).unwrap();
        assert!(text.contains(" is full now: "), "{text}");
    }

    #[test]
    fn disabled_services_revoked_agents_and_services_without_tunnels_have_no_warning() {
        let service = |enabled| {
            let record = json!({
                "account": "acme",
                "id": "api",
                "modes": { "jwt": true, "service_key": true },
                "enabled": enabled,
                "rate": { "burst": 1, "refill_per_minute": 1 },
            });
            serde_json::from_value(record).unwrap()
        };
        let suspect = tunnel(1, "suspect");
        let key: ServicePath = "acme/api".parse().unwrap();
        let count = |enabled, revoked: bool, tunnels: &[&TunnelReport]| {
            let mut records = Records::default();
            records.services.insert(key.clone(), service(enabled));
            let second = AgentRecord {
                status: if revoked {
                    EnrollmentStatus::Revoked
                } else {
                    EnrollmentStatus::Approved
                },
                ..agent(2)
            };
            records
                .agents
                .extend([agent(1), second].map(|agent| (agent.id.clone(), agent)));
            let by_service = HashMap::from([("acme--api", tunnels.to_vec())]);
            let by_service = by_service
                .into_iter()
                .filter(|(_, tunnels)| !tunnels.is_empty())
                .collect();
            warnings(&records, &by_service).count()
        };
        assert_eq!(count(true, false, &[&suspect]), 1);
        assert_eq!(
            [
                count(false, false, &[&suspect]),
                count(true, true, &[&suspect]),
                count(true, false, &[])
            ],
            [0, 0, 0]
        );
    }
}
