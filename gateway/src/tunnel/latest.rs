//! Agents that were refused because of their version, for administrators.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use gw_shared::id::AgentId;
use gw_shared::version::VERSION;

use crate::limits;
use crate::telemetry::counters::RefusedVersion;

/// The last refusal of each agent and service of one worker, until the agent gets a tunnel.
#[derive(Default)]
pub(super) struct RefusedVersions(HashMap<(AgentId, Arc<str>), (String, Instant)>);

impl RefusedVersions {
    /// Records a refusal of an agent that has authenticated. Replaces the oldest one if there are too many.
    pub(super) fn record(&mut self, agent: AgentId, label: &Arc<str>, version: String, now: Instant) {
        let key = (agent, Arc::clone(label));
        if self.0.len() >= limits::REFUSED_VERSIONS && !self.0.contains_key(&key) {
            let oldest = self.0.iter().min_by_key(|(_, (_, at))| *at).map(|(key, _)| key.clone());
            oldest.map(|oldest| self.0.remove(&oldest));
        }
        self.0.insert(key, (version, now));
    }

    /// The agent has a tunnel of the service.
    pub(super) fn accepted(&mut self, agent: &AgentId, label: &Arc<str>) {
        if !self.0.is_empty() {
            self.0.remove(&(agent.clone(), Arc::clone(label)));
        }
    }

    pub(super) fn report(&self, now: Instant) -> Vec<RefusedVersion> {
        let report = |((agent, service), (version, at)): (&(AgentId, Arc<str>), &(String, Instant))| RefusedVersion {
            agent_id: agent.to_string(),
            service: service.to_string(),
            agent_version: version.clone(),
            gateway_version: VERSION.to_owned(),
            seconds_ago: now.saturating_duration_since(*at).as_secs(),
        };
        self.0.iter().map(report).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn refusals_are_bounded_and_end_with_a_tunnel() {
        let (now, service) = (Instant::now(), Arc::from("acme--api"));
        let mut refused = RefusedVersions::default();
        let first = AgentId::random();
        refused.record(first.clone(), &service, "0.0.1".into(), now);
        for number in 1..=limits::REFUSED_VERSIONS as u64 {
            refused.record(AgentId::random(), &service, "0.0.2".into(), now + Duration::from_secs(number));
        }
        let report = refused.report(now);
        assert_eq!(report.len(), limits::REFUSED_VERSIONS);
        assert!(report.iter().all(|it| it.agent_id != first.as_str()), "the oldest one is replaced");
        refused.record(first.clone(), &service, "0.0.3".into(), now + Duration::from_secs(9999));
        refused.accepted(&first, &service);
        assert_eq!(refused.report(now).len(), limits::REFUSED_VERSIONS - 1);
    }
}
