//! The gateway's metrics as Prometheus text.

use gw_base::clock::ClockDifference;
use gw_base::process::background;
use gw_region::{NodeState, RegionStatus, Standing};
use gw_shared::telemetry::logging;
use gw_shared::telemetry::metrics::{Exposition, Kind, process};
use gw_shared::telemetry::trace::SpanCounts;
use gw_shared::version;
use gw_telemetry::counters::services::{self, merged};
use gw_telemetry::counters::{self, WorkerReport, tunnels};
use gw_telemetry::request_log::LogStats;

use crate::control::{Inventory, StoreStatus};

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
    counters::write(&mut out, reports);
    services::write(
        &mut out,
        &merged(reports.iter().flat_map(|report| &report.services)),
    );
    tunnels::write(&mut out, reports, &inventory.services);
    agents(&mut out, inventory);
    request_log.write(&mut out);
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
    let help = "Seconds for which the database has not answered; 0 while it does. Changes are \
                refused meanwhile.";
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
    let help = "Seconds by which the system's clock is ahead of PostgreSQL's, which the node \
                follows; 0 with SQLite.";
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
    let help = "Number of the last change of the region's members that this node knows; 0 without \
                a region.";
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
    let help = "Whether PostgreSQL has older members than this node: it was restored, or is not \
                the primary any more.";
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
        let help = "First expiry of the server certificate, of the admin listener's, or of an \
                    authority in their chains, since the Unix epoch.";
        out.single(
            "gw_server_certificate_expiry_timestamp_seconds",
            Kind::Gauge,
            help,
            expiry.0,
        );
    }
    let help = "Failed attempts in a row to get the certificate of the ACME authority; 0 after a \
                success, and without one.";
    out.single(
        "gw_certificate_order_failures",
        Kind::Gauge,
        help,
        inventory.certificate_failures,
    );
    let mut family = out.family("gw_own_domains", Kind::Gauge, "Own domains by status.");
    inventory
        .domains
        .iter()
        .for_each(|(status, count)| family.sample(&[("status", status)], count));
    let mut family = out.family(
        "gw_own_domain_certificates",
        Kind::Gauge,
        "Certificates of own domains that are served, by state.",
    );
    inventory
        .domain_certificates
        .iter()
        .for_each(|(state, count)| family.sample(&[("state", state)], count));
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
    let help = "Panics outside of the workers: of the control plane, the membership or a log. Each \
                is a bug.";
    out.single(
        "gw_background_panics_total",
        Kind::Counter,
        help,
        background::panics(),
    );
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use gw_base::clock::Timestamp;
    use gw_region::owners::ownership::WorkerId;
    use gw_store::Revision;
    use gw_telemetry::counters::services::Sample;
    use gw_telemetry::counters::{Counters, ReasonCounts, TunnelReport};
    use gw_telemetry::limits;
    use gw_telemetry::outcome::AttemptFailure;

    use super::*;

    fn report(worker: usize) -> WorkerReport {
        let counters = Counters::default();
        let sample = Sample {
            status: Some(504),
            code: Some("AGENT_UNAVAILABLE"),
            bytes_in: 5,
            bytes_out: 7,
            total: Duration::from_millis(4),
            response_head: None,
            is_left_out: true,
        };
        counters.services.ended(&"acme--api".into(), 1, sample);
        counters.requests.increment();
        counters.attempts_over_budget.increment();
        counters.attempt_failed(AttemptFailure::BackendTls);
        counters.attempt_failed(AttemptFailure::NoSlot);
        counters.attempt_failed(AttemptFailure::NoSlot);
        WorkerReport {
            worker: WorkerId(worker),
            totals: counters.totals(),
            by_reason: ReasonCounts {
                refusals: BTreeMap::from([("AGENT_UNAVAILABLE", 1)]),
                turned_away: BTreeMap::from([("address_rate", 4)]),
                ended_early: BTreeMap::from([("frames", 1)]),
                tunnels_ended: BTreeMap::from([("silent", 1)]),
                ..counters.by_reason()
            },
            connections: 3,
            busy_per_mille: 10,
            services: counters.services.report(),
            ..WorkerReport::default()
        }
    }

    #[test]
    fn reports_of_workers_are_merged() {
        let inventory = Inventory {
            services: vec!["acme--api".into()],
            agents: BTreeMap::from([("approved", 2)]),
            first_agent_expiry: Some(Timestamp(1_800_000_000)),
            server_certificate_expiry: Some(Timestamp(1_900_000_000)),
            certificate_failures: 3,
            domains: BTreeMap::from([("active", 4)]),
            domain_certificates: BTreeMap::from([("expiring", 5)]),
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
            "gw_certificate_order_failures 3",
            "gw_own_domains{status=\"active\"} 4",
            "gw_own_domain_certificates{state=\"expiring\"} 5",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
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
