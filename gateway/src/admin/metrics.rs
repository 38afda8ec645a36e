//! The gateway's metrics as Prometheus text.

use std::collections::{BTreeMap, HashSet};

use gw_shared::telemetry::logging;
use gw_shared::telemetry::metrics::{Exposition, Kind, process};
use gw_shared::telemetry::trace::SpanCounts;
use gw_shared::version;

use crate::background;
use crate::clock::ClockDifference;
use crate::control::{Inventory, StoreStatus};
use crate::limits;
use crate::region::{NodeState, RegionStatus, Standing};
use crate::telemetry::counters::services::{CLASSES, OTHER, ServiceReport, merged};
use crate::telemetry::counters::{TunnelReport, TunnelState, WorkerReport};
use crate::telemetry::request_log::LogStats;

/// Name and help of each of a worker's totals. The metric is `gw_{name}_total`.
const TOTALS: [(&str, &str); 19] = [
    (
        "accept_errors",
        "Failed attempts to accept a connection, because descriptors or memory were exhausted.",
    ),
    (
        "apex_records_left_out",
        "Unauthenticated requests to the apex that were not recorded in the request log.",
    ),
    (
        "attempts_over_budget",
        "Requests that were not sent to another agent because the budget of their service was used up.",
    ),
    (
        "connections_abusive",
        "Connections closed because of their peer's behaviour.",
    ),
    ("connections_accepted", "Accepted connections."),
    (
        "connections_handed_over",
        "Connections handed over to the worker that owns their service.",
    ),
    (
        "connections_shed",
        "Connections closed because there were too many.",
    ),
    (
        "handshake_failures",
        "Connections that ended before their TLS handshake was complete.",
    ),
    (
        "node_retries",
        "Requests sent to another node, or again, because a node did not take them.",
    ),
    (
        "requests",
        "Received requests, including those to the apex.",
    ),
    (
        "requests_caller_gone",
        "Requests whose caller left before the response was sent.",
    ),
    (
        "requests_complete",
        "Requests whose response was sent completely, including the gateway's errors.",
    ),
    (
        "requests_crossing",
        "Requests passed to the worker that owns their service.",
    ),
    (
        "requests_crossing_nodes",
        "Requests taken by another node, which owns their service.",
    ),
    (
        "requests_cut",
        "Requests whose response was cut off after it had begun.",
    ),
    (
        "task_panics",
        "Panics contained in one connection. Each is a bug.",
    ),
    ("tokens_denied", "Refused requests for an access token."),
    ("tokens_minted", "Issued access tokens."),
    (
        "tunnels_spliced",
        "Tunnels spliced to the node that owns their service.",
    ),
];

/// Writes all metrics.
pub(crate) fn render(
    reports: &[WorkerReport],
    inventory: &Inventory,
    request_log: &LogStats,
    region: Option<&RegionStatus>,
    spans: Option<&SpanCounts>,
) -> String {
    let mut out = Exposition::default();
    out.family(
        "gw_build_info",
        Kind::Gauge,
        "Version of the program; the value is 1.",
    )
    .sample(&[("version", version::VERSION)], 1);
    totals(&mut out, reports);
    workers(&mut out, reports);
    services(
        &mut out,
        &merged(reports.iter().flat_map(|report| &report.services)),
    );
    tunnels(&mut out, reports, inventory);
    agents(&mut out, inventory);
    self::request_log(&mut out, request_log);
    store(&mut out, inventory.store);
    self::region(&mut out, region);
    if let Some(spans) = spans {
        self::spans(&mut out, spans);
    }
    log(&mut out);
    process::write(&mut out);
    out.into_text()
}

fn store(out: &mut Exposition, store: StoreStatus) {
    let help = "Revision of the records that this gateway has applied.";
    out.single("gw_store_revision", Kind::Gauge, help, store.revision.0);
    let help = "Seconds for which the database has not answered; 0 while it does. Changes are refused meanwhile.";
    out.single(
        "gw_store_away_seconds",
        Kind::Gauge,
        help,
        store.away_for.unwrap_or_default().as_secs_f64(),
    );
    let help =
        "Stored records that are not used because they are not authentic; the log names them.";
    out.single(
        "gw_store_refused_records",
        Kind::Gauge,
        help,
        store.refused_records,
    );
    let help = "Seconds by which the system's clock is ahead of PostgreSQL's, which the node follows; 0 with SQLite.";
    let seconds = ClockDifference::now().map_or(0.0, ClockDifference::seconds);
    out.single("gw_clock_difference_seconds", Kind::Gauge, help, seconds);
    let help =
        "1 while the records cannot be written to the data folder, for a start without PostgreSQL.";
    out.single(
        "gw_store_copy_failing",
        Kind::Gauge,
        help,
        u8::from(store.is_copy_failing),
    );
}

/// `None` for a gateway without other nodes, which always admits.
fn region(out: &mut Exposition, region: Option<&RegionStatus>) {
    let help = "Number of the last change of the region's members that this node knows; 0 without a region.";
    out.single(
        "gw_region_epoch",
        Kind::Gauge,
        help,
        region.map_or(0, |region| region.epoch),
    );
    let admits = region
        .is_none_or(|region| matches!(region.standing, Standing::Member | Standing::Isolated));
    let help = "Whether this node may admit requests for the services that it owns.";
    out.single("gw_region_admits", Kind::Gauge, help, u8::from(admits));
    let help = "Whether PostgreSQL has older members than this node: it was restored, or is not the primary any more.";
    let went_back = region.is_some_and(|region| region.engine_went_back);
    out.single(
        "gw_region_engine_went_back",
        Kind::Gauge,
        help,
        u8::from(went_back),
    );
    let help = "Other nodes of the region that refuse the messages of this one.";
    let refuse = region.map_or(0, |region| {
        region
            .nodes
            .iter()
            .filter(|node| node.refusal.is_some())
            .count()
    });
    out.single("gw_region_refused_by", Kind::Gauge, help, refuse);
    let mut nodes = out.family(
        "gw_region_nodes",
        Kind::Gauge,
        "Nodes of the region by state.",
    );
    for state in NodeState::ALL {
        let count = region.map_or(0, |region| {
            region
                .nodes
                .iter()
                .filter(|node| node.state == state)
                .count()
        });
        nodes.sample(&[("state", state.as_str())], count as f64);
    }
}

fn totals(out: &mut Exposition, reports: &[WorkerReport]) {
    for (name, help) in TOTALS {
        let total: u64 = reports
            .iter()
            .filter_map(|report| report.totals.get(name))
            .sum();
        out.single(&format!("gw_{name}_total"), Kind::Counter, help, total);
    }
    let by_reason = [
        (
            "gw_refusals_total",
            "code",
            "Requests that the gateway answered with an error, by code.",
            sums(reports, |report| &report.refusals),
        ),
        (
            "gw_attempts_total",
            "reason",
            "Failed attempts to send a request to an agent of a service that has several, by reason.",
            sums(reports, |report| &report.attempts_failed),
        ),
        (
            "gw_connections_turned_away_total",
            "reason",
            "Connections refused at accept, by reason.",
            sums(reports, |report| &report.turned_away),
        ),
        (
            "gw_connections_ended_early_total",
            "reason",
            "Connections that the gateway closed to protect itself or to make room, by reason.",
            sums(reports, |report| &report.ended_early),
        ),
        (
            "gw_tunnels_ended_total",
            "reason",
            "Ended tunnels, by reason.",
            sums(reports, |report| &report.tunnels_ended),
        ),
    ];
    for (name, label, help, sums) in by_reason {
        let mut family = out.family(name, Kind::Counter, help);
        sums.into_iter()
            .for_each(|(value, count)| family.sample(&[(label, value)], count));
    }
}

fn sums(
    reports: &[WorkerReport],
    of: fn(&WorkerReport) -> &BTreeMap<&'static str, u64>,
) -> BTreeMap<&'static str, u64> {
    let mut sums = BTreeMap::new();
    for (key, value) in reports.iter().flat_map(of) {
        *sums.entry(*key).or_default() += value;
    }
    sums
}

fn workers(out: &mut Exposition, reports: &[WorkerReport]) {
    let mut gauge = |name, help, value: fn(&WorkerReport) -> f64| {
        let mut family = out.family(name, Kind::Gauge, help);
        for report in reports {
            family.sample(&[("worker", &report.worker.0.to_string())], value(report));
        }
    };
    gauge(
        "gw_connections",
        "Open connections, not including tunnels.",
        |report| report.connections as f64,
    );
    gauge(
        "gw_crossing_requests",
        "Requests in progress for callers on other workers.",
        |report| report.crossings_served as f64,
    );
    gauge(
        "gw_node_links",
        "Open links to other nodes of the region.",
        |report| report.node_links as f64,
    );
    gauge(
        "gw_node_requests",
        "Requests in progress for callers of other nodes.",
        |report| report.node_requests as f64,
    );
    let help = "Bytes charged for relayed requests: what they hold, and what they may still receive without asking.";
    gauge("gw_relay_memory_bytes", help, |report| {
        report.relay_bytes as f64
    });
    let help = "Limit of bytes charged for relayed requests: the worker's part of relay_memory_mib, less kernel memory.";
    gauge("gw_relay_memory_limit_bytes", help, |report| {
        report.relay_limit as f64
    });
    let help = "Bytes in the kernel's socket buffers of callers' connections.";
    gauge("gw_connections_kernel_bytes", help, |report| {
        report.socket_bytes as f64
    });
    let help = "Limit of bytes in the kernel's socket buffers of callers' connections, for all workers together.";
    gauge("gw_connections_kernel_limit_bytes", help, |report| {
        report.socket_limit as f64
    });
    gauge(
        "gw_worker_busy_ratio",
        "Recent share of time that the worker was busy, 0 to 1.",
        |report| f64::from(report.busy_per_mille) / 1000.0,
    );
    let help = "Starts of the worker after a panic. Each is a bug.";
    let mut family = out.family("gw_worker_restarts_total", Kind::Counter, help);
    for report in reports {
        family.sample(
            &[("worker", &report.worker.0.to_string())],
            f64::from(report.restarts),
        );
    }
}

fn services(out: &mut Exposition, services: &[ServiceReport]) {
    let mut family = out.family(
        "gw_service_requests_total",
        Kind::Counter,
        "Ended requests, by class of their status.",
    );
    for ServiceReport { label, stats } in services {
        for (class, count) in CLASSES
            .into_iter()
            .zip(stats.classes)
            .filter(|(_, count)| *count > 0)
        {
            family.sample(&[("service", label), ("class", class)], count);
        }
    }
    let mut family = out.family(
        "gw_service_errors_total",
        Kind::Counter,
        "Requests that the gateway answered with an error.",
    );
    for ServiceReport { label, stats } in services {
        stats
            .codes
            .iter()
            .for_each(|(code, count)| family.sample(&[("service", label), ("code", code)], count));
    }
    let mut bytes = |name, help, value: fn(&ServiceReport) -> u64| {
        let mut family = out.family(name, Kind::Counter, help);
        services
            .iter()
            .for_each(|service| family.sample(&[("service", &service.label)], value(service)));
    };
    bytes(
        "gw_service_request_bytes_total",
        "Bytes of request bodies.",
        |service| service.stats.bytes_in,
    );
    bytes(
        "gw_service_response_bytes_total",
        "Bytes of response bodies.",
        |service| service.stats.bytes_out,
    );
    let help = "Time from a request's head to the end of its response.";
    let mut family = out.family("gw_service_request_duration_seconds", Kind::Histogram, help);
    services
        .iter()
        .for_each(|service| family.histogram(&[("service", &service.label)], &service.stats.total));
    let help = "Time from a request's head to the head of its response.";
    let mut family = out.family(
        "gw_service_time_to_first_byte_seconds",
        Kind::Histogram,
        help,
    );
    services.iter().for_each(|service| {
        family.histogram(&[("service", &service.label)], &service.stats.response_head)
    });
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

fn tunnels(out: &mut Exposition, reports: &[WorkerReport], inventory: &Inventory) {
    // Services without a tunnel are listed with zeros: alerts need them.
    let mut by_service: BTreeMap<&str, TunnelSums> = BTreeMap::new();
    for label in inventory.services.iter().take(limits::SERVICES_COUNTED) {
        by_service.entry(label).or_default();
    }
    let up: HashSet<&str> = reports
        .iter()
        .flat_map(|report| &report.tunnels)
        .filter(|tunnel| !tunnel.draining)
        .map(|tunnel| tunnel.service.as_str())
        .collect();
    let without = inventory
        .services
        .iter()
        .filter(|label| !up.contains(label.as_str()))
        .count();
    let help = "Enabled services without a tunnel that takes requests. Counts all services.";
    out.single("gw_services_without_tunnel", Kind::Gauge, help, without);
    let mut all = 0;
    let mut states = BTreeMap::from(TunnelState::ALL.map(|state| (state.as_str(), 0)));
    for tunnel in reports.iter().flat_map(|report| &report.tunnels) {
        all += 1;
        *states.entry(tunnel.shown_state()).or_default() += 1;
        let is_counted = by_service.len() < limits::SERVICES_COUNTED
            || by_service.contains_key(tunnel.service.as_str());
        by_service
            .entry(if is_counted { &tunnel.service } else { OTHER })
            .or_default()
            .add(tunnel);
    }
    out.single("gw_tunnels", Kind::Gauge, "Open tunnels.", all);
    let mut family = out.family("gw_tunnel_state", Kind::Gauge, "Open tunnels by state.");
    states
        .into_iter()
        .for_each(|(state, count)| family.sample(&[("state", state)], f64::from(count)));
    let mut gauge = |name, help, value: fn(&TunnelSums) -> f64| {
        let mut family = out.family(name, Kind::Gauge, help);
        by_service
            .iter()
            .for_each(|(service, tunnels)| family.sample(&[("service", service)], value(tunnels)));
    };
    gauge(
        "gw_service_tunnels",
        "Tunnels of the service that take requests.",
        |tunnels| tunnels.up as f64,
    );
    gauge(
        "gw_tunnel_in_flight",
        "Requests in progress on the service's tunnels.",
        |tunnels| tunnels.in_flight as f64,
    );
    gauge(
        "gw_tunnel_window_bytes",
        "Flow-control window of a stream; the largest of the service's tunnels.",
        |tunnels| tunnels.window as f64,
    );
    gauge(
        "gw_tunnel_held_bytes",
        "Bytes of heads and bodies that wait: for callers to read responses, and for agents to read requests.",
        |tunnels| tunnels.held as f64,
    );
    gauge(
        "gw_tunnel_slots",
        "Concurrent requests that the service's agents accept.",
        |tunnels| tunnels.slots as f64,
    );
    gauge(
        "gw_tunnel_slots_in_use",
        "Requests in progress at the service's agents, as last reported by them.",
        |tunnels| tunnels.slots_in_use as f64,
    );
    gauge(
        "gw_tunnel_round_trip_seconds",
        "Smoothed round-trip time to the agent; the longest of the service's tunnels.",
        |tunnels| tunnels.round_trip_us as f64 / 1e6,
    );
}

fn agents(out: &mut Exposition, inventory: &Inventory) {
    let mut family = out.family("gw_agents", Kind::Gauge, "Agents by enrollment state.");
    inventory
        .agents
        .iter()
        .for_each(|(state, count)| family.sample(&[("state", state)], count));
    if let Some(expiry) = inventory.first_agent_expiry {
        let help = "Earliest expiry of a connected agent's certificate, since the Unix epoch.";
        out.single(
            "gw_agent_certificate_first_expiry_timestamp_seconds",
            Kind::Gauge,
            help,
            expiry.0,
        );
    }
    if let Some(expiry) = inventory.server_certificate_expiry {
        let help = "First expiry of the server certificate, of the admin listener's, or of an authority in their chains, since the Unix epoch.";
        out.single(
            "gw_server_certificate_expiry_timestamp_seconds",
            Kind::Gauge,
            help,
            expiry.0,
        );
    }
}

fn request_log(out: &mut Exposition, stats: &LogStats) {
    for (name, help, count) in [
        (
            "gw_request_log_written_total",
            "Records written to the request log.",
            stats.written,
        ),
        (
            "gw_request_log_dropped_total",
            "Records lost because the queue was full or a write failed.",
            stats.dropped,
        ),
        (
            "gw_request_log_captures_dropped_total",
            "Requests recorded without their captured messages, because the queue was full.",
            stats.captures_dropped,
        ),
        (
            "gw_request_log_out_of_range_total",
            "Records not written because their day has expired or is in the future.",
            stats.out_of_range,
        ),
        (
            "gw_request_log_damaged_total",
            "Damaged blocks or files of the request log that readers skipped.",
            stats.damaged,
        ),
    ] {
        out.single(name, Kind::Counter, help, count);
    }
    let failing = "1 while the request log cannot be written, else 0. Alert on 1.";
    out.single(
        "gw_request_log_failing",
        Kind::Gauge,
        failing,
        u64::from(stats.failing),
    );
    let records = "Records in the queue of the request log.";
    out.single(
        "gw_request_log_queued_records",
        Kind::Gauge,
        records,
        stats.queued_records,
    );
    let bytes = "Memory of the records in the queue of the request log.";
    out.single(
        "gw_request_log_queued_bytes",
        Kind::Gauge,
        bytes,
        stats.queued_bytes,
    );
    stats.archive.write(out);
    stats.access_log.write(out);
}

fn spans(out: &mut Exposition, counts: &SpanCounts) {
    out.single(
        "gw_spans_exported_total",
        Kind::Counter,
        "Spans accepted by the collector.",
        counts.exported(),
    );
    let dropped = "Spans lost because the queue was full or the collector did not accept them.";
    out.single(
        "gw_spans_dropped_total",
        Kind::Counter,
        dropped,
        counts.dropped(),
    );
}

fn log(out: &mut Exposition) {
    let help = "Log lines suppressed because similar lines were too frequent.";
    out.single(
        "gw_log_lines_suppressed_total",
        Kind::Counter,
        help,
        logging::suppressed(),
    );
    let help = "Panics outside of the workers: of the control plane, the membership or a log. Each is a bug.";
    out.single(
        "gw_background_panics_total",
        Kind::Counter,
        help,
        background::panics(),
    );
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::clock::Timestamp;
    use crate::http_message::AttemptFailure;
    use crate::ownership::WorkerId;
    use crate::store::Revision;
    use crate::telemetry::counters::Counters;
    use crate::telemetry::counters::services::Sample;

    fn report(worker: usize) -> WorkerReport {
        let counters = Counters::default();
        let sample = Sample {
            status: Some(504),
            code: Some("AGENT_UNAVAILABLE"),
            bytes_in: 5,
            bytes_out: 7,
            total: Duration::from_millis(4),
            response_head: None,
        };
        counters.services.ended(&"acme--api".into(), sample);
        counters.requests.increment();
        counters.attempts_over_budget.increment();
        counters.attempt_failed(AttemptFailure::BackendTls);
        counters.attempt_failed(AttemptFailure::NoSlot);
        counters.attempt_failed(AttemptFailure::NoSlot);
        WorkerReport {
            worker: WorkerId(worker),
            totals: counters.totals(),
            refusals: BTreeMap::from([("AGENT_UNAVAILABLE", 1)]),
            attempts_failed: counters.attempts_failed(),
            turned_away: BTreeMap::from([("address_rate", 4)]),
            ended_early: BTreeMap::from([("frames", 1)]),
            tunnels_ended: BTreeMap::from([("silent", 1)]),
            connections: 3,
            crossings_served: 0,
            node_links: 0,
            node_requests: 0,
            relay_bytes: 0,
            relay_limit: 0,
            socket_bytes: 0,
            socket_limit: 0,
            busy_per_mille: 10,
            restarts: 0,
            tunnels: Vec::new(),
            tunnels_of_another_authority: 0,
            refused_versions: Vec::new(),
            ended_tunnels: Vec::new(),
            services: counters.services.report(),
        }
    }

    #[test]
    fn reports_of_workers_are_merged() {
        let inventory = Inventory {
            services: vec!["acme--api".into()],
            agents: BTreeMap::from([("approved", 2)]),
            first_agent_expiry: Some(Timestamp(1_800_000_000)),
            server_certificate_expiry: Some(Timestamp(1_900_000_000)),
            store: StoreStatus {
                revision: Revision(7),
                away_for: Some(Duration::from_millis(1500)),
                refused_records: 2,
                is_copy_failing: true,
            },
        };
        let text = render(
            &[report(0), report(1)],
            &inventory,
            &LogStats {
                dropped: 3,
                ..LogStats::default()
            },
            None,
            None,
        );
        for line in [
            "# TYPE gw_requests_total counter",
            "gw_requests_total 2",
            "gw_store_revision 7",
            "gw_store_away_seconds 1.5",
            "gw_store_refused_records 2",
            "gw_clock_difference_seconds 0",
            "gw_store_copy_failing 1",
            "gw_region_admits 1",
            "gw_region_engine_went_back 0",
            "gw_region_refused_by 0",
            "gw_region_nodes{state=\"live\"} 0",
            "gw_refusals_total{code=\"AGENT_UNAVAILABLE\"} 2",
            "gw_attempts_total{reason=\"backend_tls\"} 2",
            "gw_attempts_total{reason=\"no_slot\"} 4",
            "gw_attempts_over_budget_total 2",
            "gw_connections_turned_away_total{reason=\"address_rate\"} 8",
            "gw_connections_ended_early_total{reason=\"frames\"} 2",
            "gw_tunnels_ended_total{reason=\"silent\"} 2",
            "gw_connections{worker=\"1\"} 3",
            "gw_worker_busy_ratio{worker=\"0\"} 0.01",
            "gw_service_requests_total{service=\"acme--api\",class=\"5xx\"} 2",
            "gw_service_errors_total{service=\"acme--api\",code=\"AGENT_UNAVAILABLE\"} 2",
            "gw_service_request_bytes_total{service=\"acme--api\"} 10",
            "gw_service_request_duration_seconds_bucket{service=\"acme--api\",le=\"0.005\"} 2",
            "gw_service_request_duration_seconds_bucket{service=\"acme--api\",le=\"0.0025\"} 0",
            "gw_service_request_duration_seconds_sum{service=\"acme--api\"} 0.008",
            "gw_service_time_to_first_byte_seconds_count{service=\"acme--api\"} 0",
            "gw_service_tunnels{service=\"acme--api\"} 0",
            "gw_services_without_tunnel 1",
            "gw_request_log_dropped_total 3",
            "gw_request_log_failing 0",
            "gw_agents{state=\"approved\"} 2",
            "gw_agent_certificate_first_expiry_timestamp_seconds 1800000000",
            "gw_server_certificate_expiry_timestamp_seconds 1900000000",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }

    #[test]
    fn every_total_has_a_help_text() {
        let known: Vec<&str> = TOTALS.iter().map(|(name, _)| *name).collect();
        assert_eq!(
            Counters::default().totals().into_keys().collect::<Vec<_>>(),
            known
        );
    }

    #[test]
    fn tunnels_are_counted_by_state() {
        let ready = TunnelReport::example("a--a", "ag");
        let suspect = TunnelReport {
            state: "suspect".to_owned(),
            ..ready.clone()
        };
        let draining = TunnelReport {
            draining: true,
            ..suspect.clone()
        };
        let of = |tunnels| WorkerReport {
            tunnels,
            ..report(0)
        };
        let reports = [of(vec![ready.clone(), suspect]), of(vec![draining, ready])];
        let text = render(
            &reports,
            &Inventory::default(),
            &LogStats::default(),
            None,
            None,
        );
        let found: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with("gw_tunnel_state{"))
            .collect();
        let expected = [
            "gw_tunnel_state{state=\"breaker_open\"} 0",
            "gw_tunnel_state{state=\"draining\"} 1",
            "gw_tunnel_state{state=\"probing\"} 0",
            "gw_tunnel_state{state=\"ready\"} 2",
            "gw_tunnel_state{state=\"suspect\"} 1",
            "gw_tunnel_state{state=\"unhealthy\"} 0",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn tunnels_of_many_services_have_bounded_labels() {
        let tunnel = |service: String| TunnelReport {
            round_trip_us: Some(250),
            in_flight: 2,
            ..TunnelReport::example(&service, "ag")
        };
        let tunnels = (0..limits::SERVICES_COUNTED + 5)
            .map(|number| tunnel(format!("a--{number}")))
            .collect();
        let text = render(
            &[WorkerReport {
                tunnels,
                ..report(0)
            }],
            &Inventory::default(),
            &LogStats::default(),
            None,
            None,
        );
        let services = text
            .lines()
            .filter(|line| line.starts_with("gw_service_tunnels{"))
            .count();
        assert_eq!(services, limits::SERVICES_COUNTED + 1);
        for line in [
            "gw_tunnels 1005",
            "gw_service_tunnels{service=\"other\"} 5",
            "gw_tunnel_in_flight{service=\"other\"} 10",
            "gw_tunnel_round_trip_seconds{service=\"a--7\"} 0.00025",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}");
        }
    }
}
