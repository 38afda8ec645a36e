//! Metrics: the exposition format, the Grafana dashboard, and the agent's listener.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::peers::backend;
use crate::support::processes::successor::admin;
use crate::support::scene::Scene;
use crate::support::{eventually, programs};

/// Metrics of a gateway that has served one request and refused another.
fn scrape() -> (Scene, String) {
    // Export to a collector that does not exist: its metrics appear nevertheless.
    let scene = Scene::service()
        .agent()
        .traces("http://127.0.0.1:9".to_owned(), 0.0)
        .start();
    let mut caller = scene.connect();
    caller.send(scene.get("/bytes/1000"));
    assert_eq!(caller.response().status, 200);
    caller.send(scene.request("GET /", "X-Gw-Authorization: Bearer x\r\n\r\n"));
    assert_eq!(caller.response().code(), "GW_AUTH_AMBIGUOUS");
    let mut response = ureq::get(format!("{}/metrics", scene.about.admin_url))
        .call()
        .unwrap();
    assert_eq!(
        response.headers()["content-type"],
        "text/plain; version=0.0.4; charset=utf-8"
    );
    let text = response.body_mut().read_to_string().unwrap();
    (scene, text)
}

/// Names and types of the metrics, in order.
fn families(text: &str) -> Vec<(&str, &str)> {
    text.lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '))
        .collect()
}

/// Asserts that `promtool check metrics` reports no problem, if there is a promtool.
fn assert_promtool_agrees(text: &str) {
    if !programs::usable(&["promtool"]) {
        return;
    }
    let mut promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    promtool
        .stdin
        .take()
        .unwrap()
        .write_all(text.as_bytes())
        .unwrap();
    let said = promtool.wait_with_output().unwrap();
    let complaints = String::from_utf8_lossy(&[said.stdout, said.stderr].concat()).into_owned();
    assert!(
        said.status.success() && complaints.is_empty(),
        "{complaints}"
    );
}

#[test]
fn promtool_accepts_the_metrics() {
    let (scene, text) = scrape();
    assert_promtool_agrees(&text);
    let families = families(&text);
    let names: BTreeSet<_> = families.iter().map(|(name, _)| name).collect();
    assert_eq!(names.len(), families.len(), "metric names are unique");
    scene.stop();
}

#[test]
fn the_metrics_of_a_gateway_have_the_values_of_its_state() {
    let (scene, text) = scrape();
    let value = |sample: &str| -> f64 {
        let mut lines = text.lines();
        let value = lines.find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
        let value = value.unwrap_or_else(|| panic!("no {sample}\n{text}"));
        value.parse().unwrap()
    };
    for (sample, expected) in [
        // Three connections for the enrollment of the agent, two of the caller.
        ("gw_requests_total", 5),
        ("gw_refusals_total{code=\"GW_AUTH_AMBIGUOUS\"}", 1),
        ("gw_service_tunnels{service=\"demo--echo\"}", 1),
        ("gw_agents{state=\"approved\"}", 1),
    ] {
        assert_eq!(value(sample) as u64, expected, "{sample}");
    }
    assert!(value("gw_tunnel_round_trip_seconds{service=\"demo--echo\"}") > 0.0);
    assert!(value("process_resident_memory_bytes") > 1e6);
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_secs_f64();
    let days = |name: &str| ((value(name) - now) / 86_400.0).round() as i64;
    assert_eq!(days("gw_server_certificate_expiry_timestamp_seconds"), 365);
    let of_agents = days("gw_agent_certificate_first_expiry_timestamp_seconds");
    assert_eq!(of_agents, 1);
    scene.stop();
}

/// Collects the metrics that queries of the dashboard name, each with its query.
fn asked_for(dashboard: &Value, into: &mut BTreeMap<String, String>) {
    match dashboard {
        Value::Array(items) => items.iter().for_each(|item| asked_for(item, into)),
        Value::Object(fields) => {
            for query in ["expr", "query"]
                .iter()
                .filter_map(|key| fields.get(*key)?.as_str())
            {
                let words = query.split(|character: char| {
                    !character.is_ascii_alphanumeric() && character != '_'
                });
                let metrics =
                    words.filter(|word| word.starts_with("gw_") || word.starts_with("process_"));
                metrics.for_each(|metric| drop(into.insert(metric.to_owned(), query.to_owned())));
            }
            fields.values().for_each(|field| asked_for(field, into));
        }
        _ => {}
    }
}

#[test]
fn the_dashboard_uses_every_metric_and_only_existing_ones() {
    let (scene, text) = scrape();
    let there = families(&text);
    let dashboard = include_str!("../../../grafana/gateway.json");
    let mut asked = BTreeMap::new();
    asked_for(&serde_json::from_str(dashboard).unwrap(), &mut asked);
    for (metric, query) in &asked {
        let is_there = there.iter().any(|(name, kind)| match *kind {
            "histogram" => metric
                .strip_prefix(name)
                .is_some_and(|rest| ["_bucket", "_sum", "_count"].contains(&rest)),
            _ => metric == name,
        });
        assert!(is_there, "no metric {metric}, used by the query {query}");
    }
    for (name, _) in there.iter().filter(|(name, _)| name.starts_with("gw_")) {
        let is_asked = |metric: &String| {
            let rest = metric.strip_prefix(&**name);
            rest.is_some_and(|rest| ["", "_bucket", "_sum", "_count"].contains(&rest))
        };
        assert!(asked.keys().any(is_asked), "{name} is not on the dashboard");
    }
    scene.stop();
}

/// Status and body of a response from the agent's metrics listener.
fn ask_agent(scene: &Scene, path: &str) -> (u16, String) {
    admin(scene.agent_metrics_address().unwrap(), path)
}

#[test]
fn an_agent_serves_metrics_and_another_one_runs_without_its_port() {
    let folder = tempfile::tempdir().unwrap();
    let backend = backend::answering("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello");
    let start = |name: &str, listen: &str| {
        let file = folder.path().join(name);
        let text = format!("backend = \"{backend}\"\nmetrics_listen = \"{listen}\"\n");
        std::fs::write(&file, text).unwrap();
        Scene::service().agent_with(file).start()
    };
    let scene = start("one.toml", "127.0.0.1:0");
    eventually("the agent is ready", || {
        (ask_agent(&scene, "/readyz") == (200, "ready\n".to_owned())).then_some(())
    });
    let mut caller = scene.connect();
    caller.send(scene.request("POST /", "Content-Length: 3\r\n\r\nabc"));
    assert_eq!(caller.response().body, b"hello");
    let (status, text) = ask_agent(&scene, "/metrics");
    assert_eq!(status, 200);
    assert_promtool_agrees(&text);
    for line in [
        "gw_agent_tunnel_up{service=\"demo--echo.eu1.gw.localhost\"} 1",
        "gw_agent_tunnels_opened_total{service=\"demo--echo.eu1.gw.localhost\"} 1",
        "gw_agent_slots{service=\"demo--echo.eu1.gw.localhost\"} 128",
        "gw_agent_requests_total{service=\"demo--echo.eu1.gw.localhost\"} 1",
        "gw_agent_request_bytes_total{service=\"demo--echo.eu1.gw.localhost\"} 3",
        "gw_agent_response_bytes_total{service=\"demo--echo.eu1.gw.localhost\"} 5",
        "gw_agent_backend_first_byte_seconds_count{service=\"demo--echo.eu1.gw.localhost\"} 1",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
    // An agent whose metrics port is in use serves without metrics.
    let used = scene.agent_metrics_address().unwrap().to_string();
    let other = start("two.toml", &used);
    assert_eq!(other.agent_metrics_address(), None);
    other.stop();
    scene.stop();
}
