//! The workers' reports as Prometheus text (exposition format 0.0.4).

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::counters::{TunnelReport, WorkerReport};

pub(crate) fn render(reports: &[WorkerReport]) -> String {
    let mut text = String::new();
    let mut totals: BTreeMap<&str, u64> = BTreeMap::new();
    let mut refusals: BTreeMap<&str, u64> = BTreeMap::new();
    for report in reports {
        report.totals.iter().for_each(|(name, value)| *totals.entry(name).or_default() += value);
        report.refusals.iter().for_each(|(code, value)| *refusals.entry(code).or_default() += value);
    }
    for (name, value) in totals {
        family(&mut text, &format!("gw_{name}_total"), "counter", [(String::new(), value)]);
    }
    let by_code = refusals.into_iter().map(|(code, value)| (format!("{{code=\"{code}\"}}"), value));
    family(&mut text, "gw_refusals_total", "counter", by_code);
    for (name, reasons) in [
        ("gw_connections_turned_away_total", by_reason(reports, |report| &report.turned_away)),
        ("gw_connections_ended_early_total", by_reason(reports, |report| &report.ended_early)),
    ] {
        let samples = reasons.into_iter().map(|(reason, value)| (format!("{{reason=\"{reason}\"}}"), value));
        family(&mut text, name, "counter", samples);
    }
    let per_worker = |value: fn(&WorkerReport) -> u64| {
        reports.iter().map(move |report| (format!("{{worker=\"{}\"}}", report.worker.0), value(report)))
    };
    family(&mut text, "gw_connections", "gauge", per_worker(|report| report.connections as u64));
    family(&mut text, "gw_crossings_served", "gauge", per_worker(|report| report.crossings_served as u64));
    family(&mut text, "gw_worker_busy_permille", "gauge", per_worker(|report| report.busy_per_mille.into()));
    let tunnels = || reports.iter().flat_map(|report| &report.tunnels);
    let per_tunnel = |value: fn(&TunnelReport) -> u64| {
        tunnels().map(move |tunnel| {
            let labels = format!("{{service=\"{}\",agent=\"{}\"}}", tunnel.service, tunnel.agent_id);
            (labels, value(tunnel))
        })
    };
    family(&mut text, "gw_tunnel_in_flight", "gauge", per_tunnel(|tunnel| tunnel.in_flight as u64));
    family(&mut text, "gw_tunnel_window_bytes", "gauge", per_tunnel(|tunnel| tunnel.window.into()));
    family(&mut text, "gw_tunnel_held_bytes", "gauge", per_tunnel(|tunnel| tunnel.held_bytes as u64));
    family(&mut text, "gw_tunnel_slots", "gauge", per_tunnel(|tunnel| tunnel.slots.unwrap_or(0).into()));
    family(&mut text, "gw_tunnel_slots_in_use", "gauge", per_tunnel(|tunnel| tunnel.slots_in_use.unwrap_or(0).into()));
    text
}

fn by_reason(
    reports: &[WorkerReport],
    of: fn(&WorkerReport) -> &BTreeMap<&'static str, u64>,
) -> BTreeMap<&'static str, u64> {
    let mut sums = BTreeMap::new();
    for (reason, value) in reports.iter().flat_map(of) {
        *sums.entry(*reason).or_default() += value;
    }
    sums
}

fn family(text: &mut String, name: &str, kind: &str, samples: impl IntoIterator<Item = (String, u64)>) {
    // Writing to a String cannot fail.
    let _ = writeln!(text, "# TYPE {name} {kind}");
    for (labels, value) in samples {
        let _ = writeln!(text, "{name}{labels} {value}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ownership::WorkerId;

    #[test]
    fn workers_are_merged() {
        let report = |worker| WorkerReport {
            worker: WorkerId(worker),
            totals: BTreeMap::from([("requests", 2)]),
            refusals: BTreeMap::from([("AGENT_UNAVAILABLE", 1)]),
            turned_away: BTreeMap::from([("address_rate", 4)]),
            ended_early: BTreeMap::from([("frames", 1)]),
            connections: 3,
            crossings_served: 0,
            busy_per_mille: 10,
            tunnels: Vec::new(),
        };
        let text = render(&[report(0), report(1)]);
        assert!(text.contains("# TYPE gw_requests_total counter\ngw_requests_total 4\n"), "{text}");
        assert!(text.contains("gw_refusals_total{code=\"AGENT_UNAVAILABLE\"} 2\n"), "{text}");
        assert!(text.contains("gw_connections_turned_away_total{reason=\"address_rate\"} 8\n"), "{text}");
        assert!(text.contains("gw_connections_ended_early_total{reason=\"frames\"} 2\n"), "{text}");
        assert!(text.contains("gw_connections{worker=\"1\"} 3\n"), "{text}");
    }
}
