//! The latest event of a kind for each agent and service of one worker, for administrators.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use crate::limits;
use gw_shared::id::AgentId;
use gw_store::Service;

/// Events of agents that have authenticated, for at most [`limits::LATEST_EVENT_KEPT`], with the
/// creation of their services.
pub(super) struct LatestEvents<T>(HashMap<(AgentId, Arc<str>), (T, Instant, u64)>);

impl<T> Default for LatestEvents<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T> LatestEvents<T> {
    /// Replaces the event of this agent and service, or the oldest one if there are too many.
    pub(super) fn record(&mut self, agent: &AgentId, service: &Service, event: T, now: Instant) {
        let key = (agent.clone(), Arc::clone(&service.label));
        if self.0.len() >= limits::LATEST_EVENTS && !self.0.contains_key(&key) {
            let oldest = self
                .0
                .iter()
                .min_by_key(|(_, (_, at, _))| *at)
                .map(|(key, _)| key.clone());
            oldest.map(|oldest| self.0.remove(&oldest));
        }
        self.0.insert(key, (event, now, service.created_ms));
    }

    pub(super) fn remove(&mut self, agent: &AgentId, label: &Arc<str>) {
        if !self.0.is_empty() {
            self.0.remove(&(agent.clone(), Arc::clone(label)));
        }
    }

    /// Removes the events of all agents and services but those that `exist`: agent, label of the
    /// service, and its creation.
    pub(super) fn retain(&mut self, exist: impl Fn(&AgentId, &str, u64) -> bool) {
        self.0
            .retain(|(agent, label), (.., created_ms)| exist(agent, label, *created_ms));
    }

    /// Makes a report of each event from agent, service, event and the seconds since then.
    pub(super) fn report<R>(
        &self,
        now: Instant,
        report: impl Fn(String, String, &T, u64) -> R,
    ) -> Vec<R> {
        let ago = |at: &Instant| now.saturating_duration_since(*at);
        let recent = self
            .0
            .iter()
            .filter(|(_, (_, at, _))| ago(at) < limits::LATEST_EVENT_KEPT);
        recent
            .map(|((agent, label), (event, at, _))| {
                report(
                    agent.to_string(),
                    label.to_string(),
                    event,
                    ago(at).as_secs(),
                )
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gw_base::service::hostname::Region;
    use gw_store::{Directory, Records, StoredRecord};
    use serde_json::json;

    use super::*;

    /// The service `acme--api`.
    fn service() -> Arc<Service> {
        let record = json!({ "service": {
            "account": "acme",
            "id": "api",
            "modes": { "jwt": true, "service_key": true },
            "enabled": true,
            "rate": { "burst": 1, "refill_per_minute": 1 },
            "created_ms": 1,
        } });
        let record = serde_json::from_value::<StoredRecord>(record).unwrap();
        let region = Region::new("eu1", "example.com");
        let directory = Directory::new(&Records::from_iter([record]), &region, 1);
        Arc::clone(directory.service("acme--api").unwrap())
    }

    fn agents<T>(latest: &LatestEvents<T>, now: Instant) -> Vec<String> {
        latest.report(now, |agent, _, _, _| agent)
    }

    #[test]
    fn the_latest_events_are_kept_within_a_bound() {
        let now = Instant::now();
        let service = service();
        let mut latest = LatestEvents::default();
        let first = AgentId::random();
        latest.record(&first, &service, 0, now);
        for number in 1..=limits::LATEST_EVENTS as u64 {
            latest.record(
                &AgentId::random(),
                &service,
                number,
                now + Duration::from_secs(number),
            );
        }
        assert_eq!(agents(&latest, now).len(), limits::LATEST_EVENTS);
        assert!(
            !agents(&latest, now).contains(&first.to_string()),
            "the oldest one is replaced"
        );
        // Events of one agent and service replace each other.
        let newest = Duration::from_secs(9999);
        for number in [7, 8] {
            latest.record(&first, &service, number, now + newest);
        }
        assert_eq!(agents(&latest, now).len(), limits::LATEST_EVENTS);
        let later = now + newest + Duration::from_secs(5);
        let of_first = |agent: String, label: String, event: &u64, seconds_ago| {
            (agent == first.as_str()).then_some((label, *event, seconds_ago))
        };
        let found: Vec<_> = latest
            .report(later, of_first)
            .into_iter()
            .flatten()
            .collect();
        assert_eq!(found, [("acme--api".to_owned(), 8, 5)]);
        latest.remove(&first, &service.label);
        assert_eq!(agents(&latest, now).len(), limits::LATEST_EVENTS - 1);
    }

    #[test]
    fn events_end_with_their_time_and_with_their_agent() {
        let now = Instant::now();
        let service = service();
        let mut latest = LatestEvents::default();
        let deleted = AgentId::random();
        let stays = AgentId::random();
        latest.record(&deleted, &service, (), now);
        latest.record(&stays, &service, (), now);
        let is_there = |agent: &AgentId, label: &str, created_ms| {
            (label, created_ms) == ("acme--api", 1) && *agent == stays
        };
        latest.retain(is_there);
        let end = now + limits::LATEST_EVENT_KEPT;
        assert_eq!(
            agents(&latest, end - Duration::from_millis(1)),
            [stays.to_string()]
        );
        assert!(agents(&latest, end).is_empty());
    }
}
