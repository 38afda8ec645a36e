//! Usage of services by day: over kills of the process, and in a region over the loss of nodes.

use std::fs;

use serde_json::{Value, json};

use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::{Served, gw_gateway};
use crate::support::processes::region::Region;
use crate::support::request_log::assert_fields;

const HELLO: &str = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello";

/// Runs `gw-gateway usage`; returns its exit code and output.
fn usage(prepared: &Prepared, served: &Served, options: &str) -> (i32, String) {
    let output = gw_gateway()
        .arg("usage")
        .args(options.split_whitespace())
        .args(["--admin-url", &format!("http://{}", served.admin_address)])
        .arg("--admin-token-file")
        .arg(prepared.path("data/admin.token"))
        .output()
        .unwrap();
    let code = output.status.code().unwrap();
    let printed = match code {
        0 => output.stdout,
        _ => output.stderr,
    };
    (code, String::from_utf8(printed).unwrap())
}

/// Requests and refusals of the only service, on all days.
fn sums(usage: &Value) -> (u64, u64) {
    let items = usage["items"].as_array().unwrap();
    for item in items {
        assert_fields(item, &json!({ "account": "demo", "service": "echo" }));
    }
    let sum = |name: &str| items.iter().map(|item| item[name].as_u64().unwrap()).sum();
    (sum("requests"), sum("refusals"))
}

/// Sends requests; each is answered with this status.
fn request(prepared: &Prepared, served: &Served, count: usize, status: u16) {
    for _ in 0..count {
        let mut caller = prepared.connect(served.address);
        caller.send(prepared.get("/"));
        assert_eq!(caller.response().status, status);
    }
}

/// Waits until the requests and refusals are the expected ones, and returns them.
fn await_usage(
    prepared: &Prepared,
    served: &Served,
    is_expected: impl Fn((u64, u64)) -> bool,
) -> (u64, u64) {
    eventually("the requests are in the usage", || {
        let (code, json) = usage(prepared, served, "--json");
        assert_eq!(code, 0, "{json}");
        Some(sums(&json.parse().unwrap())).filter(|sums| is_expected(*sums))
    })
}

#[test]
fn usage_of_a_day_survives_a_kill() {
    let prepared = Prepared::new();
    let (served, agent) = prepared.start(&backend::answering(HELLO));
    // Waiting for the tunnel has made requests, too.
    let metrics = served.metrics();
    let before = metrics.count_with("gw_service_requests_total", "demo--echo");
    request(&prepared, &served, 3, 200);
    let (requests, refusals) = await_usage(&prepared, &served, |sums| sums.0 == before + 3);
    served.process.signal("KILL");
    drop(served);
    let served = prepared.serve_with(&prepared.config());
    let (code, json) = usage(&prepared, &served, "--json");
    assert_eq!(code, 0, "{json}");
    assert_eq!(sums(&json.parse().unwrap()), (requests, refusals));
    drop(agent);

    // Without an agent the gateway answers.
    request(&prepared, &served, 1, 504);
    let expected = (requests + 1, refusals + 1);
    await_usage(&prepared, &served, |sums| sums == expected);
}

#[test]
fn usage_is_printed_for_people_and_programs() {
    let prepared = Prepared::new();
    let (served, _agent) = prepared.start(&backend::answering(HELLO));
    let metrics = served.metrics();
    let before = metrics.count_with("gw_service_requests_total", "demo--echo");
    request(&prepared, &served, 3, 200);
    await_usage(&prepared, &served, |sums| sums.0 == before + 3);
    let (_, csv) = usage(&prepared, &served, "--csv --account demo --service echo");
    let lines: Vec<&str> = csv.lines().collect();
    let expected = "date,account,service,requests,refusals,bytes_in,bytes_out";
    assert_eq!(lines[0], expected);
    let columns: Vec<&str> = lines[1].split(',').collect();
    assert_eq!(columns.len(), 7, "{csv}");
    assert_eq!(columns[1..3], ["demo", "echo"]);
    // Each answer of the backend has 5 bytes.
    assert!(columns[6].parse::<u64>().unwrap() >= 5 * 3, "{csv}");
    let (_, people) = usage(&prepared, &served, "--account demo");
    assert!(people.starts_with("DATE"), "{people}");
    assert!(people.contains("echo"), "{people}");
    for (options, expected, part) in [
        ("--until 2000-01-01", 0, "No usage."),
        ("--account dema", 1, "no account dema; did you mean demo?"),
        ("--since 2026-02-30", 1, "since: must be a day"),
    ] {
        let (code, printed) = usage(&prepared, &served, options);
        assert_eq!(code, expected, "{options}: {printed}");
        assert!(printed.contains(part), "{options}: {printed}");
    }
}

#[test]
fn usage_of_a_lost_node_is_kept_and_counted_once() {
    let Some(mut region) = Region::start(2) else {
        return;
    };
    let refuse = |region: &Region, node: usize, count: usize| {
        for _ in 0..count {
            // No agent runs.
            assert_eq!(region.request(node), "504 AGENT_UNAVAILABLE");
        }
    };
    let total =
        |region: &Region, node: usize| sums(&region.get(node, "/usage?account=demo").done());
    let becomes = |region: &Region, node: usize, count: u64| {
        eventually("the usage of all nodes", || {
            (total(region, node) == (count, count)).then_some(())
        });
    };
    refuse(&region, 0, 3);
    refuse(&region, 1, 5);
    // A node that is asked writes its own counts first.
    eventually("both nodes have written their counts", || {
        (total(&region, 1).0 >= 5 && total(&region, 0).0 == 8).then_some(())
    });
    assert_eq!(total(&region, 1), (8, 8));

    // The node comes back with its file, whose counts are in PostgreSQL already.
    region.kill(1);
    assert_eq!(total(&region, 0), (8, 8));
    region.restart(1);
    region.wait_for_members(2);
    refuse(&region, 1, 1);
    becomes(&region, 1, 9);
    assert_eq!(total(&region, 0), (9, 9));

    // The node comes back without its file.
    region.kill(1);
    fs::remove_file(region.data(1).join("usage.sqlite")).unwrap();
    region.restart(1);
    region.wait_for_members(2);
    refuse(&region, 1, 1);
    becomes(&region, 1, 10);
    assert_eq!(total(&region, 0), (10, 10));
    let sources = "SELECT count(DISTINCT source), sum(requests) FROM gw.usage";
    assert_eq!(region.postgres.sql(sources), "3|10");
}
