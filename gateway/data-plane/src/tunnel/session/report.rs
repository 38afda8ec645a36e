//! What a tunnel tells about itself.

use std::time::Instant;

use gw_base::agent_releases::AgentReleases;
use gw_region::owners::ownership::WorkerId;
use gw_store::Directory;
use gw_telemetry::counters::TunnelReport;

use super::Session;
use crate::tunnel::health::TunnelCondition;

impl Session {
    pub(crate) fn report(
        &self,
        worker: WorkerId,
        directory: &Directory,
        releases: &AgentReleases,
        now: Instant,
    ) -> TunnelReport {
        let certificate = directory
            .agent(self.agent.as_str())
            .and_then(|agent| agent.certificate_not_after);
        let TunnelCondition { state, since, why } = self.condition(now);
        TunnelReport {
            service: self.service.label.to_string(),
            agent_id: self.agent.to_string(),
            agent_version: self.version.to_string(),
            update: self.update_view(releases),
            certificate_not_after: certificate.map(|not_after| not_after.to_string()),
            generation: self.generation,
            node: None,
            worker: worker.0,
            age_seconds: now.saturating_duration_since(self.opened).as_secs(),
            idle_seconds: self.flow.quiet_for(now).as_secs(),
            round_trip_us: self
                .flow
                .round_trip()
                .and_then(|took| took.as_micros().try_into().ok()),
            in_flight: self.flow.streams(),
            window: self.flow.window(),
            held_bytes: self.flow.held_bytes(),
            slots: self.reported_slots().map(|(slots, _)| slots),
            slots_in_use: self.reported_slots().map(|(_, in_use)| in_use),
            full_seconds_ago: self.full_for(now).map(|time| time.as_secs()),
            draining: self.closed_to_requests.get(),
            state: state.as_str().to_owned(),
            state_seconds: now.saturating_duration_since(since).as_secs(),
            state_reason: (!why.is_empty()).then(|| why.to_owned()),
            standby: self.gets_requests_last(),
            requests: self.requests(),
            share_percent: None,
        }
    }
}
