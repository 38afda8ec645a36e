//! Usage of services by day: over kills of the process, and in a region over the loss of nodes.

use std::fs;
use std::net::SocketAddr;

use serde_json::Value;

use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::gw_gateway;
use crate::support::processes::region::Region;

/// Runs `gw-gateway usage`; returns its exit code and output.
fn usage(admin_address: SocketAddr, token_file: &std::path::Path, options: &str) -> (i32, String) {
    let output = gw_gateway()
        .args("usage".split(' ').chain(options.split_whitespace()))
        .args(["--admin-url", &format!("http://{admin_address}")])
        .arg("--admin-token-file")
        .arg(token_file)
        .output()
        .unwrap();
    let code = output.status.code().unwrap();
    let printed = if code == 0 {
        output.stdout
    } else {
        output.stderr
    };
    (code, String::from_utf8(printed).unwrap())
}

/// Requests and refusals of the only service, on all days.
fn sums(usage: &Value) -> (u64, u64) {
    let items = usage["items"].as_array().unwrap();
    let sum = |name: &str| items.iter().map(|item| item[name].as_u64().unwrap()).sum();
    for item in items {
        assert_eq!(
            (&item["account"], &item["service"]),
            (&"demo".into(), &"echo".into())
        );
    }
    (sum("requests"), sum("refusals"))
}

#[test]
fn requests_and_bytes_of_a_day_survive_a_kill_and_are_printed_for_people_and_programs() {
    let prepared = Prepared::new();
    let backend = backend::answering("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello");
    let (served, agent) = prepared.start(&backend);
    let token = prepared.path("data/admin.token");
    let read = |served: &crate::support::processes::process::Served, options: &str| -> Value {
        let (code, json) = usage(served.admin_address, &token, &format!("{options} --json"));
        assert_eq!(code, 0, "{json}");
        json.parse().unwrap()
    };
    // Waiting for the tunnel has made requests, too.
    let metrics = served.metrics();
    let before = metrics.count_with("gw_service_requests_total", "demo--echo");
    for _ in 0..3 {
        let mut caller = prepared.connect(served.address);
        caller.send(prepared.get("/"));
        assert_eq!(caller.response().status, 200);
    }
    let counted = eventually("the requests are in the usage", || {
        Some(sums(&read(&served, ""))).filter(|(requests, _)| *requests == before + 3)
    });
    served.process.signal("KILL");
    drop(served);
    let served = prepared.serve_with(&prepared.config());
    assert_eq!(sums(&read(&served, "")), counted);
    drop(agent);

    // Without an agent the gateway answers.
    let mut caller = prepared.connect(served.address);
    caller.send(prepared.get("/"));
    assert_eq!(caller.response().status, 504);
    let refused = (counted.0 + 1, counted.1 + 1);
    eventually("the refusal is in the usage", || {
        (sums(&read(&served, "")) == refused).then_some(())
    });

    let (_, csv) = usage(
        served.admin_address,
        &token,
        "--csv --account demo --service echo",
    );
    let lines: Vec<&str> = csv.lines().collect();
    assert_eq!(
        lines[0],
        "date,account,service,requests,refusals,bytes_in,bytes_out"
    );
    let columns: Vec<&str> = lines[1].split(',').collect();
    assert_eq!((columns.len(), columns[1], columns[2]), (7, "demo", "echo"));
    // Each answer of the backend has 5 bytes.
    assert!(columns[6].parse::<u64>().unwrap() >= 5 * 3, "{csv}");
    let (_, people) = usage(served.admin_address, &token, "--account demo");
    assert!(
        people.starts_with("DATE") && people.contains("echo"),
        "{people}"
    );
    let (code, printed) = usage(served.admin_address, &token, "--until 2000-01-01");
    assert!(code == 0 && printed.contains("No usage."), "{printed}");
    let (code, refused) = usage(served.admin_address, &token, "--account dema");
    assert!(
        code == 1 && refused.contains("no account dema; did you mean demo?"),
        "{refused}"
    );
    let (code, refused) = usage(served.admin_address, &token, "--since 2026-02-30");
    assert!(
        code == 1 && refused.contains("since: must be a day"),
        "{refused}"
    );
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

    // Again with its file, whose counts are in PostgreSQL already.
    region.kill(1);
    assert_eq!(total(&region, 0), (8, 8));
    region.restart(1);
    region.wait_for_members(2);
    refuse(&region, 1, 1);
    becomes(&region, 1, 9);
    assert_eq!(total(&region, 0), (9, 9));

    // On a new disk.
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
