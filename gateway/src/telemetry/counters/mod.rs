//! Counters of one worker. They are not shared; reports of all workers are merged on request.

pub mod services;
mod tunnel_state;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::Error;
use crate::http_message::{AttemptFailure, Outcome};
use crate::ownership::WorkerId;
use services::{ServiceCounters, ServiceReport};
pub use tunnel_state::TunnelState;
pub(crate) use tunnel_state::with_shares;

/// Counter used by its own worker only.
#[derive(Debug, Default)]
pub(crate) struct Counter(Cell<u64>);

impl Counter {
    pub(crate) fn increment(&self) {
        self.0.set(self.0.get() + 1);
    }

    pub(crate) fn value(&self) -> u64 {
        self.0.get()
    }
}

/// Counters by reason, for a small fixed set of reasons.
#[derive(Debug, Default)]
pub(crate) struct Reasons(RefCell<BTreeMap<&'static str, u64>>);

impl Reasons {
    pub(crate) fn increment(&self, reason: &'static str) {
        *self.0.borrow_mut().entry(reason).or_default() += 1;
    }

    pub(crate) fn values(&self) -> BTreeMap<&'static str, u64> {
        self.0.borrow().clone()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) requests: Counter,
    pub(crate) crossings: Counter,
    /// Requests that another node has taken.
    pub(crate) node_crossings: Counter,
    pub(crate) node_retries: Counter,
    pub(crate) accepted: Counter,
    pub(crate) handed_over: Counter,
    pub(crate) tunnels_spliced: Counter,
    pub(crate) shed: Counter,
    pub(crate) accept_errors: Counter,
    pub(crate) handshake_failures: Counter,
    abusive: Counter,
    pub(crate) apex_records_left_out: Counter,
    pub(crate) tokens_minted: Counter,
    pub(crate) tokens_denied: Counter,
    complete: Counter,
    cut: Counter,
    caller_gone: Counter,
    refused: Reasons,
    attempts_failed: Reasons,
    /// Further attempts that the budget of their service did not allow.
    pub(crate) attempts_over_budget: Counter,
    /// Connections refused at accept, by reason.
    pub(crate) turned_away: Reasons,
    /// Connections that the gateway closed to protect itself or to make room, by reason.
    ended_early: Reasons,
    /// Ended tunnels, by [reason](gw_shared::tunnel::cut_reason::CutReason).
    pub(crate) tunnels_ended: Reasons,
    /// Ended requests of each service.
    pub(crate) services: ServiceCounters,
}

impl Counters {
    /// Counts a request by its outcome.
    pub(crate) fn ended(&self, outcome: Outcome) {
        match outcome {
            Outcome::Complete | Outcome::Refused => self.complete.increment(),
            Outcome::Cut => self.cut.increment(),
            Outcome::CallerGone => self.caller_gone.increment(),
        }
    }

    /// Counts a request that the gateway answered with an error.
    pub(crate) fn refused(&self, error: &Error) {
        let (_, _, code, _) = error.outcome();
        self.refused.increment(code.as_str());
    }

    /// Counts an attempt that failed, at the owner of the service.
    pub(crate) fn attempt_failed(&self, reason: AttemptFailure) {
        self.attempts_failed.increment(reason.as_str());
    }

    pub(crate) fn attempts_failed(&self) -> BTreeMap<&'static str, u64> {
        self.attempts_failed.values()
    }

    /// Counts a connection closed because of its peer's behaviour.
    pub(crate) fn abused(&self, reason: &'static str) {
        self.abusive.increment();
        self.ended_early.increment(reason);
    }

    /// Counts a connection closed to make room for another.
    pub(crate) fn gave_way(&self, reason: &'static str) {
        self.ended_early.increment(reason);
    }

    pub(crate) fn ended_early(&self) -> BTreeMap<&'static str, u64> {
        self.ended_early.values()
    }

    pub(crate) fn totals(&self) -> BTreeMap<&'static str, u64> {
        BTreeMap::from([
            ("requests", self.requests.value()),
            ("requests_complete", self.complete.value()),
            ("requests_cut", self.cut.value()),
            ("requests_caller_gone", self.caller_gone.value()),
            ("requests_crossing", self.crossings.value()),
            ("requests_crossing_nodes", self.node_crossings.value()),
            ("node_retries", self.node_retries.value()),
            ("connections_accepted", self.accepted.value()),
            ("connections_handed_over", self.handed_over.value()),
            ("connections_shed", self.shed.value()),
            ("accept_errors", self.accept_errors.value()),
            ("handshake_failures", self.handshake_failures.value()),
            ("connections_abusive", self.abusive.value()),
            ("apex_records_left_out", self.apex_records_left_out.value()),
            ("attempts_over_budget", self.attempts_over_budget.value()),
            ("tunnels_spliced", self.tunnels_spliced.value()),
            ("tokens_minted", self.tokens_minted.value()),
            ("tokens_denied", self.tokens_denied.value()),
            ("task_panics", gw_shared::runtime::contained_panics()),
        ])
    }

    pub(crate) fn refusals(&self) -> BTreeMap<&'static str, u64> {
        self.refused.values()
    }
}

/// Request to a worker for a report.
pub(crate) struct Scrape {
    /// Channel for the report.
    pub(crate) reply: crossbeam_channel::Sender<WorkerReport>,
    /// Whether the report includes the counters of all services, which are expensive to copy.
    pub(crate) with_services: bool,
}

/// Counters and state of one worker.
#[derive(Debug, Clone)]
pub struct WorkerReport {
    pub worker: WorkerId,
    pub totals: BTreeMap<&'static str, u64>,
    pub refusals: BTreeMap<&'static str, u64>,
    /// Failed attempts, by reason.
    pub attempts_failed: BTreeMap<&'static str, u64>,
    /// Connections refused at accept, by reason.
    pub turned_away: BTreeMap<&'static str, u64>,
    /// Connections that the gateway closed to protect itself or to make room, by reason.
    pub ended_early: BTreeMap<&'static str, u64>,
    /// Ended tunnels, by reason.
    pub tunnels_ended: BTreeMap<&'static str, u64>,
    pub connections: usize,
    pub crossings_served: usize,
    /// Open links to other nodes.
    pub node_links: usize,
    /// Requests in progress for callers of other nodes.
    pub node_requests: usize,
    /// Bytes that are charged for relayed requests.
    pub relay_bytes: usize,
    /// Limit of these bytes.
    pub relay_limit: usize,
    /// Bytes that the kernel holds for callers' connections, at the last measurement.
    pub socket_bytes: usize,
    /// Limit of these bytes for all workers together.
    pub socket_limit: usize,
    pub busy_per_mille: u32,
    /// How often the worker has started again after a panic.
    pub restarts: u32,
    pub tunnels: Vec<TunnelReport>,
    /// Tunnels, replaced ones included, whose certificate is of another authority than the one that issues now.
    pub tunnels_of_another_authority: usize,
    /// Agents that were refused because of their version.
    pub refused_versions: Vec<RefusedVersion>,
    pub ended_tunnels: Vec<EndedTunnel>,
    /// Empty unless requested.
    pub services: Vec<ServiceReport>,
}

/// Refusal of an agent because of its version, until it gets a tunnel of the service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RefusedVersion {
    pub agent_id: String,
    /// `{account}--{service}`
    pub service: String,
    pub agent_version: String,
    pub gateway_version: String,
    /// Time since the last refusal.
    pub seconds_ago: u64,
}

impl fmt::Display for RefusedVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            agent_version,
            gateway_version,
            service,
            seconds_ago,
            ..
        } = self;
        write!(
            f,
            "{service}: version {agent_version} is not served by the gateway's {gateway_version}, {seconds_ago}s ago"
        )
    }
}

impl fmt::Display for AgentUpdate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.state.replace('_', " "))?;
        self.version
            .iter()
            .try_for_each(|version| write!(f, " {version}"))?;
        self.error
            .iter()
            .try_for_each(|error| write!(f, ": {error}"))
    }
}

/// The last end of a tunnel of an agent and service, for a day.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EndedTunnel {
    pub agent_id: String,
    /// `{account}--{service}`
    pub service: String,
    /// Why it ended, as in the log and in `gw_tunnels_ended_total`.
    #[schema(example = "agent_revoked")]
    pub reason: String,
    /// What to do; absent if there is nothing to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
    /// Time since the end.
    pub seconds_ago: u64,
}

impl EndedTunnel {
    /// `ended 5m 2s ago: connection_lost`
    pub fn in_short(&self) -> String {
        let ago = humantime::format_duration(std::time::Duration::from_secs(self.seconds_ago));
        format!("ended {ago} ago: {}", self.reason)
    }
}

impl fmt::Display for EndedTunnel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.service, self.in_short())?;
        self.advice
            .iter()
            .try_for_each(|advice| write!(f, "; {advice}"))
    }
}

/// Progress of an agent's update.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AgentUpdate {
    /// `off`: the agent does not update itself; `ready`: it does when the gateway has a newer program; `held_back`:
    /// `agent_update_percent` does not include it yet; `updating`; `failed`.
    #[schema(example = "ready")]
    pub state: String,
    /// Version that it updates to, or failed to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Why the update failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Public halves of the release keys whose programs the agent accepts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub release_keys: Vec<String>,
}

impl AgentUpdate {
    /// The first characters of each release key, for people.
    pub fn short_keys(&self) -> impl Iterator<Item = &str> {
        self.release_keys.iter().filter_map(|key| key.get(..8))
    }
}

/// A live tunnel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Tunnel)]
pub struct TunnelReport {
    /// `{account}--{service}`
    pub service: String,
    pub agent_id: String,
    pub agent_version: String,
    /// Whether the agent updates itself, and how far it is; absent until it has reported that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update: Option<AgentUpdate>,
    /// When the agent's newest certificate expires.
    #[schema(format = DateTime)]
    pub certificate_not_after: Option<String>,
    pub generation: u64,
    /// Slot of the node that has the tunnel; absent if the gateway is the only node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<u16>,
    pub worker: usize,
    pub age_seconds: u64,
    /// Seconds since anything was relayed on it; 0 while a request is under way.
    pub idle_seconds: u64,
    /// Round trip to the agent in microseconds, smoothed, as TCP measures it; null before it has.
    pub round_trip_us: Option<u64>,
    /// Requests that the gateway has open on it.
    pub in_flight: usize,
    /// Flow-control window of its streams, in bytes.
    pub window: u32,
    /// Bytes of responses that arrived and that callers have not taken yet.
    pub held_bytes: usize,
    /// As the agent last reported them; `None` until it has.
    pub slots: Option<u32>,
    pub slots_in_use: Option<u32>,
    pub draining: bool,
    /// `ready`; `probing`: it failed, and gets one request at a time; `breaker_open`: it failed, and gets none for a while;
    /// `unhealthy`: the agent reports that no backend takes connections; `suspect`: the agent left a PING unanswered;
    /// `unknown`: its node does not report it. If a service has no better tunnel, the others get its requests.
    #[serde(default = "TunnelReport::unknown_state")]
    #[schema(example = "ready")]
    pub state: String,
    /// Seconds since the state began.
    #[serde(default)]
    pub state_seconds: u64,
    /// Why the tunnel is in this state; null of a ready one.
    #[serde(default)]
    pub state_reason: Option<String>,
    /// It gets requests only if no other tunnel of the service can take them.
    #[serde(default)]
    pub standby: bool,
    /// Requests that it got since it was opened.
    #[serde(default)]
    pub requests: u64,
    /// Its part of the requests that the service's open tunnels got, in percent; null before there were any.
    #[serde(default)]
    pub share_percent: Option<u8>,
}
