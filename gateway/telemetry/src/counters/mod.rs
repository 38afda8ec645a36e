//! Counters of one worker. They are not shared; reports of all workers are merged on request.

pub mod services;
pub mod tunnels;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;

use gw_base::error::Error;
use gw_region::owners::ownership::WorkerId;
use gw_shared::telemetry::metrics::{Exposition, Kind};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::outcome::{AttemptFailure, Outcome};
use services::{ServiceCounters, ServiceReport};
pub use tunnels::{TunnelState, with_shares};

/// Counter used by its own worker only.
#[derive(Debug, Default)]
pub struct Counter(Cell<u64>);

impl Counter {
    /// Adds 1.
    pub fn increment(&self) {
        self.0.set(self.0.get() + 1);
    }

    /// Returns the count since the worker started.
    pub fn value(&self) -> u64 {
        self.0.get()
    }
}

/// Counters by reason, for a small fixed set of reasons.
#[derive(Debug, Default)]
pub struct Reasons(RefCell<BTreeMap<&'static str, u64>>);

impl Reasons {
    /// Adds 1 to the counter of `reason`.
    pub fn increment(&self, reason: &'static str) {
        *self.0.borrow_mut().entry(reason).or_default() += 1;
    }

    /// Returns the counts by reason; reasons that did not occur are left out.
    pub fn values(&self) -> BTreeMap<&'static str, u64> {
        self.0.borrow().clone()
    }
}

/// Counter of the panics that were contained on this thread.
#[derive(Debug, Default)]
pub struct ContainedPanics;

impl ContainedPanics {
    fn value(&self) -> u64 {
        gw_shared::runtime::contained_panics()
    }
}

/// Declares the counters of a worker with their metrics: totals as `gw_{name}_total` with a help
/// text, in the order of their names, and counts by reason with metric, label and help text.
macro_rules! counters {
    (
        totals { $($total:ident: $counter:ty = $name:literal, $help:literal;)* }
        by_reason { $($reasons:ident = $metric:literal, $label:literal, $text:literal;)* }
    ) => {
        /// Counters of one worker.
        #[derive(Debug, Default)]
        pub struct Counters {
            $(#[doc = $help] pub $total: $counter,)*
            $(#[doc = $text] pub $reasons: Reasons,)*
            /// Ended requests of each service.
            pub services: ServiceCounters,
        }

        /// Counts by reason.
        #[derive(Debug, Clone, Default)]
        pub struct ReasonCounts {
            $(#[doc = $text] pub $reasons: BTreeMap<&'static str, u64>,)*
        }

        impl Counters {
            /// Returns the totals by name, without the prefix `gw_` and the suffix `_total` of the
            /// metrics.
            pub fn totals(&self) -> BTreeMap<&'static str, u64> {
                BTreeMap::from([$(($name, self.$total.value())),*])
            }

            /// Returns the counts by reason of each metric.
            pub fn by_reason(&self) -> ReasonCounts {
                ReasonCounts { $($reasons: self.$reasons.values(),)* }
            }
        }

        fn write_totals(out: &mut Exposition, reports: &[WorkerReport]) {
            for (name, help) in [$(($name, $help)),*] {
                let totals = reports.iter().filter_map(|report| report.totals.get(name));
                let total: u64 = totals.sum();
                out.single(&format!("gw_{name}_total"), Kind::Counter, help, total);
            }
        }

        fn write_reasons(out: &mut Exposition, reports: &[WorkerReport]) {
            $(
                let mut sums: BTreeMap<&'static str, u64> = BTreeMap::new();
                for (reason, count) in
                    reports.iter().flat_map(|report| &report.by_reason.$reasons)
                {
                    *sums.entry(*reason).or_default() += count;
                }
                let mut family = out.family($metric, Kind::Counter, $text);
                for (reason, count) in sums {
                    family.sample(&[($label, reason)], count);
                }
            )*
        }
    };
}

counters! {
    totals {
        accept_errors: Counter = "accept_errors", "Failed attempts to accept a connection, because \
            descriptors or memory were exhausted.";
        apex_records_left_out: Counter = "apex_records_left_out", "Unauthenticated requests to the \
            apex that were not recorded in the request log.";
        attempts_over_budget: Counter = "attempts_over_budget", "Requests that were not sent to \
            another agent because the budget of their service was used up.";
        abusive: Counter = "connections_abusive", "Connections closed because of their peer's \
            behaviour.";
        accepted: Counter = "connections_accepted", "Accepted connections.";
        handed_over: Counter = "connections_handed_over", "Connections handed over to the worker \
            that owns their service.";
        shed: Counter = "connections_shed", "Connections closed because there were too many.";
        handshake_failures: Counter = "handshake_failures", "Connections that ended before their \
            TLS handshake was complete.";
        node_retries: Counter = "node_retries", "Requests sent to another node, or again, because \
                                                 a node did not take them.";
        requests: Counter = "requests", "Received requests, including those to the apex.";
        caller_gone: Counter = "requests_caller_gone", "Requests whose caller left before the \
            response was sent.";
        complete: Counter = "requests_complete", "Requests whose response was sent completely, \
            including the gateway's errors.";
        crossings: Counter = "requests_crossing", "Requests passed to the worker that owns their \
            service.";
        node_crossings: Counter = "requests_crossing_nodes", "Requests taken by another node, \
            which owns their service.";
        cut: Counter = "requests_cut", "Requests whose response was cut off after it had begun.";
        task_panics: ContainedPanics = "task_panics", "Panics contained in one connection. Each is \
            a bug.";
        tokens_denied: Counter = "tokens_denied", "Refused requests for an access token.";
        tokens_minted: Counter = "tokens_minted", "Issued access tokens.";
        tunnels_spliced: Counter = "tunnels_spliced", "Tunnels spliced to the node that owns their \
            service.";
    }
    by_reason {
        refusals = "gw_refusals_total", "code", "Requests that the gateway answered with an error, \
                                                 by code.";
        attempts_failed = "gw_attempts_total", "reason", "Failed attempts to send a request to an \
            agent of a service that has several, by reason.";
        turned_away = "gw_connections_turned_away_total", "reason", "Connections refused at \
            accept, by reason.";
        ended_early = "gw_connections_ended_early_total", "reason", "Connections that the gateway \
            closed to protect itself or to make room, by reason.";
        tunnels_ended = "gw_tunnels_ended_total", "reason", "Ended tunnels, by reason.";
    }
}

impl Counters {
    /// Counts a request by its outcome.
    pub fn ended(&self, outcome: Outcome) {
        match outcome {
            Outcome::Complete | Outcome::Refused => self.complete.increment(),
            Outcome::Cut => self.cut.increment(),
            Outcome::CallerGone => self.caller_gone.increment(),
        }
    }

    /// Counts a request that the gateway answered with an error.
    pub fn refused(&self, error: &Error) {
        let (_, _, code, _) = error.outcome();
        self.refusals.increment(code.as_str());
    }

    /// Counts an attempt that failed, at the owner of the service.
    pub fn attempt_failed(&self, reason: AttemptFailure) {
        self.attempts_failed.increment(reason.as_str());
    }

    /// Counts a connection closed because of its peer's behaviour.
    pub fn abused(&self, reason: &'static str) {
        self.abusive.increment();
        self.ended_early.increment(reason);
    }

    /// Counts a connection closed to make room for another.
    pub fn gave_way(&self, reason: &'static str) {
        self.ended_early.increment(reason);
    }
}

/// Request to a worker for a report.
pub struct Scrape {
    /// Channel for the report.
    pub reply: crossbeam_channel::Sender<WorkerReport>,
    /// Whether the report includes the counters of all services, which are expensive to copy.
    pub with_services: bool,
}

/// Counters and state of one worker.
#[derive(Debug, Clone, Default)]
pub struct WorkerReport {
    /// The worker that the report is of.
    pub worker: WorkerId,
    /// Result of [`Counters::totals`].
    pub totals: BTreeMap<&'static str, u64>,
    /// Counts by reason of each metric.
    pub by_reason: ReasonCounts,
    /// Open connections, not including tunnels.
    pub connections: usize,
    /// Requests in progress for callers on other workers.
    pub crossings_served: usize,
    /// Open links to other nodes.
    pub node_links: usize,
    /// Requests in progress for callers of other nodes, or of the process before this one.
    pub node_requests: usize,
    /// Bytes that are charged for relayed requests.
    pub relay_bytes: usize,
    /// Limit of these bytes.
    pub relay_limit: usize,
    /// Bytes that the kernel holds for callers' connections, at the last measurement.
    pub socket_bytes: usize,
    /// Limit of these bytes for all workers together.
    pub socket_limit: usize,
    /// Recent share of time that the worker was busy, in thousandths.
    pub busy_per_mille: u32,
    /// How often the worker has started again after a panic.
    pub restarts: u32,
    /// Live tunnels of the worker.
    pub tunnels: Vec<TunnelReport>,
    /// Tunnels, replaced ones included, whose certificate is of another authority than the one that
    /// issues now.
    pub tunnels_of_another_authority: usize,
    /// Agents that were refused because of their version.
    pub refused_versions: Vec<RefusedVersion>,
    /// The last end of a tunnel of each agent and service, for a day.
    pub ended_tunnels: Vec<EndedTunnel>,
    /// Empty unless requested.
    pub services: Vec<ServiceReport>,
}

/// Metrics of each worker: name, kind, help text and value.
type WorkerMetric = (&'static str, Kind, &'static str, fn(&WorkerReport) -> f64);

const WORKER_METRICS: [WorkerMetric; 10] = [
    (
        "gw_connections",
        Kind::Gauge,
        "Open connections, not including tunnels.",
        |report| report.connections as f64,
    ),
    (
        "gw_crossing_requests",
        Kind::Gauge,
        "Requests in progress for callers on other workers.",
        |report| report.crossings_served as f64,
    ),
    (
        "gw_node_links",
        Kind::Gauge,
        "Open links to other nodes of the region.",
        |report| report.node_links as f64,
    ),
    (
        "gw_node_requests",
        Kind::Gauge,
        "Requests in progress for callers of other nodes, or of the process before this one.",
        |report| report.node_requests as f64,
    ),
    (
        "gw_relay_memory_bytes",
        Kind::Gauge,
        "Bytes charged for relayed requests: what they hold, and what they may still receive \
         without asking.",
        |report| report.relay_bytes as f64,
    ),
    (
        "gw_relay_memory_limit_bytes",
        Kind::Gauge,
        "Limit of bytes charged for relayed requests: the worker's part of relay_memory_mib, less \
         kernel memory.",
        |report| report.relay_limit as f64,
    ),
    (
        "gw_connections_kernel_bytes",
        Kind::Gauge,
        "Bytes in the kernel's socket buffers of callers' connections.",
        |report| report.socket_bytes as f64,
    ),
    (
        "gw_connections_kernel_limit_bytes",
        Kind::Gauge,
        "Limit of bytes in the kernel's socket buffers of callers' connections, for all workers \
         together.",
        |report| report.socket_limit as f64,
    ),
    (
        "gw_worker_busy_ratio",
        Kind::Gauge,
        "Recent share of time that the worker was busy, 0 to 1.",
        |report| f64::from(report.busy_per_mille) / 1000.0,
    ),
    (
        "gw_worker_restarts_total",
        Kind::Counter,
        "Starts of the worker after a panic. Each is a bug.",
        |report| f64::from(report.restarts),
    ),
];

/// Writes the metrics of workers, without those of services and tunnels.
pub fn write(out: &mut Exposition, reports: &[WorkerReport]) {
    write_totals(out, reports);
    write_reasons(out, reports);
    for (name, kind, help, value) in WORKER_METRICS {
        let mut family = out.family(name, kind, help);
        for report in reports {
            family.sample(&[("worker", &report.worker.0.to_string())], value(report));
        }
    }
}

/// Refusal of an agent because of its version, until it gets a tunnel of the service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RefusedVersion {
    /// Id of the agent.
    pub agent_id: String,
    /// `{account}--{service}`
    pub service: String,
    /// Version of the agent's program.
    pub agent_version: String,
    /// Version of the gateway that refused it.
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
            "{service}: version {agent_version} is not served by the gateway's {gateway_version}, \
             {seconds_ago}s ago"
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
    /// Id of the agent.
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
    /// `off`: the agent does not update itself; `ready`: it does when the gateway has a newer
    /// program; `held_back`: `agent_update_percent` does not include it yet; `updating`; `failed`.
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
    /// Id of the agent.
    pub agent_id: String,
    /// Version of the agent's program.
    pub agent_version: String,
    /// Whether the agent updates itself, and how far it is; absent until it has reported that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update: Option<AgentUpdate>,
    /// When the agent's newest certificate expires.
    #[schema(format = DateTime)]
    pub certificate_not_after: Option<String>,
    /// Number of the tunnel on its worker. A later tunnel has a higher number.
    pub generation: u64,
    /// Slot of the node that has the tunnel; absent if the gateway is the only node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<u16>,
    /// Index of the worker that has the tunnel.
    pub worker: usize,
    /// Seconds since the tunnel was opened.
    pub age_seconds: u64,
    /// Seconds since anything was relayed on it; 0 while a request is under way.
    pub idle_seconds: u64,
    /// Round trip to the agent in microseconds: from a PING to its answer, as last measured; null
    /// before the first answer.
    pub round_trip_us: Option<u64>,
    /// Requests that the gateway has open on it.
    pub in_flight: usize,
    /// Flow-control window of its streams, in bytes.
    pub window: u32,
    /// Bytes of responses that arrived and that callers have not taken yet.
    pub held_bytes: usize,
    /// As the agent last reported them; `None` until it has.
    pub slots: Option<u32>,
    /// Slots in use, as the agent last reported them; null until it has.
    pub slots_in_use: Option<u32>,
    /// Seconds since all slots were in use, 0 while they are; absent if the agent has never
    /// reported that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub full_seconds_ago: Option<u64>,
    /// Whether the tunnel gets no new requests because it is about to end.
    pub draining: bool,
    /// `ready`; `probing`: it failed, and gets one request at a time; `breaker_open`: it failed,
    /// and gets none for a while; `unhealthy`: the agent reports that no backend takes connections;
    /// `suspect`: the agent left a PING unanswered; `unknown`: its node does not report it. If a
    /// service has no better tunnel, the others get its requests.
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
    /// Its part of the requests that the service's open tunnels got, in percent; null before there
    /// were any.
    #[serde(default)]
    pub share_percent: Option<u8>,
}
