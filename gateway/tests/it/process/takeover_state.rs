//! State shared with a successor or a later start: levels of rate limits, and revocations while the
//! old process drains.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::{Duration, Instant};

use rusqlite::Connection;
use serde_json::{Value, json};

use crate::support::gateway::Gateway;
use crate::support::peers::held_backend::HeldBackend;
use crate::support::peers::http1_peer::Response;
use crate::support::processes::kept_connection::KeptConnection;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::{config_text, hold, send_signal};
use crate::support::processes::successor::{admin, replace};
use crate::support::stopwatch::within_a_second;
use crate::support::{eventually, turn};

/// Maximum time until a revocation is in force.
const REVOKED_WITHIN: Duration = Duration::from_secs(1);
const SERVICE: &str = "/accounts/demo/services/echo";
const KEYS: &str = "/accounts/demo/service-keys";
/// Number of services whose records exceed 64 MiB, the longest message to a predecessor;
/// `GW_TEST_SERVICES` overrides it.
const MANY_SERVICES: u32 = 25_000;

fn set_rate(prepared: &Prepared, admin_address: SocketAddr, burst: u32) {
    let rate = json!({ "burst": burst, "refill_per_minute": 1 });
    prepared.api(admin_address).patch(SERVICE, &rate);
}

/// The status of one request on a new connection.
fn ask(prepared: &Prepared, address: SocketAddr) -> u16 {
    status(&prepared.connect(address).ask(prepared.get("/")))
}

/// Sends the next request on each connection. Returns the number of admitted requests.
fn admitted_next(prepared: &Prepared, kept: &mut [KeptConnection]) -> usize {
    kept.iter_mut()
        .map(|kept| status(&kept.ask(&prepared.get("/"))))
        .filter(|status| *status == 200)
        .count()
}

fn status(response: &Response) -> u16 {
    // A request fails with 504 for want of a tunnel, and for nothing else.
    assert!(response.status != 504 || response.code() == "AGENT_UNAVAILABLE");
    response.status.as_u16()
}

/// Sends requests on new connections until one is refused, at most `most`. Returns the number of
/// admitted requests.
fn admitted(prepared: &Prepared, address: SocketAddr, most: usize) -> usize {
    for count in 0..most {
        match ask(prepared, address) {
            200 => {}
            429 => return count,
            other => panic!("{other}"),
        }
    }
    most
}

/// Connections on which one request runs each.
fn kept_connections(prepared: &Prepared, address: SocketAddr, count: usize) -> Vec<KeptConnection> {
    let begin = |_| KeptConnection::begin(prepared.connect(address), &prepared.get("/"));
    (0..count).map(begin).collect()
}

#[test]
fn a_takeover_keeps_the_levels_of_rate_limits() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let (served, _agent) = prepared.start(&backend.url);
    let begin = Instant::now();
    // A full bucket.
    set_rate(&prepared, served.admin_address, 60);
    let mut kept = kept_connections(&prepared, served.address, 20);
    // The successor has another number of workers, so buckets have other owners.
    let more_workers = prepared.config().replace("workers = 2", "workers = 3");
    fs::write(prepared.path("gateway.toml"), more_workers).unwrap();
    let successor = replace(served.process.id(), &served.log);
    // From now on, both processes admit requests.
    let (old, rest) = kept.split_at_mut(10);
    let by_old = admitted_next(&prepared, old);
    assert_eq!(by_old, 10);
    let by_new = admitted(&prepared, served.address, 100);
    let total = 20 + by_old + by_new;
    let refilled = usize::try_from(begin.elapsed().as_secs() / 60).unwrap() + 1;
    // Requests before the change of the rate count as well.
    assert!(
        (50..=60 + refilled).contains(&total),
        "{total} admitted: {by_old} by the old process, {by_new} by the new"
    );
    // The old process knows that the bucket is empty.
    let late = admitted_next(&prepared, rest);
    assert!(late <= refilled, "{late} admitted by the old process");
    successor.stop();
}

#[test]
fn a_restart_keeps_the_levels_of_rate_limits() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let (mut served, _agent) = prepared.start(&backend.url);
    set_rate(&prepared, served.admin_address, 10);
    assert!(admitted(&prepared, served.address, 20) <= 10);
    let _port = hold(served.address);
    served.process.stop();
    let levels = prepared.path("data/last-stop.json");
    let mode = fs::metadata(&levels).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    let again = config_text(&prepared.path("data"), served.address.port())
        .replace("workers = 2", "workers = 3");
    let served = prepared.serve_with(&again);
    assert!(!levels.exists(), "the levels are used once");
    let response = prepared.connect(served.address).ask(prepared.get("/"));
    assert_eq!(response.status, 429);
    let retry_after: u64 = response.header("retry-after").parse().unwrap();
    assert!((1..=60).contains(&retry_after), "{retry_after}");
}

#[test]
fn unreadable_levels_of_rate_limits_do_not_prevent_a_start() {
    let prepared = Prepared::new();
    fs::write(prepared.path("data/last-stop.json"), "{").unwrap();
    let (_process, address) = prepared.serve(0);
    // The rate limit is checked before the tunnel, which is missing.
    assert_eq!(ask(&prepared, address), 504);
}

#[test]
fn callers_wait_for_their_agent_after_a_restart() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let (mut served, _agent) = prepared.start(&backend.url);
    let _port = hold(served.address);
    // On a busy machine, the agent can take longer than callers wait.
    let answered = (0..3).any(|_| {
        served.process.stop();
        let stored = fs::read_to_string(prepared.path("data/last-stop.json")).unwrap();
        assert!(stored.contains(r#""tunnels":{"demo--echo":1}"#), "{stored}");
        served.process = prepared.serve(served.address.port()).0;
        let status = ask(&prepared, served.address);
        assert!([200, 504].contains(&status), "{status}");
        prepared.wait_for_tunnel(served.address);
        status == 200
    });
    assert!(answered);
}

/// Sends requests on one kept connection after another until one is refused with `code`, within
/// [`REVOKED_WITHIN`].
fn wait_until_refused(prepared: &Prepared, kept: Vec<KeptConnection>, code: &str) {
    let pause = REVOKED_WITHIN / u32::try_from(kept.len()).unwrap();
    within_a_second(code, || {
        for mut kept in kept {
            let response = kept.ask(&prepared.get("/"));
            if response.status != 200 && response.code() == code {
                return;
            }
            std::thread::sleep(pause);
        }
        panic!("no request is refused with {code}");
    });
}

#[test]
fn revocations_reach_replaced_processes() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let (mut served, _agent) = prepared.start(&backend.url);
    let mut running = prepared.connect(served.address);
    let mut others = kept_connections(&prepared, served.address, 30);
    running.send(prepared.get("/held"));
    let kept = others.split_off(15);
    let second = replace(served.process.id(), &served.log);
    // A chain of three processes: the first two drain.
    let third = replace(second.0, &served.log);

    let api = prepared.api(served.admin_address);
    api.delete(&format!("{KEYS}/{}", prepared.key_id()));
    wait_until_refused(&prepared, others, "GW_SERVICE_KEY_INVALID");
    api.patch(SERVICE, &json!({ "enabled": false }));
    wait_until_refused(&prepared, kept, "GW_SERVICE_DISABLED");
    // The running request is not affected, but needs its agent.
    let agents = fs::read(prepared.path("agent/agent.json")).unwrap();
    let agent: Value = serde_json::from_slice(&agents).unwrap();
    api.revoke_agent("demo", agent["agent_id"].as_str().unwrap());
    assert_eq!(running.response().code(), "GW_RELAY_ERROR");
    drop(running);
    assert_eq!(served.process.exit_code(), Some(0));
    third.stop();
    drop(second);
}

/// Adds an account with `count` services. Their records are large.
fn add_services(prepared: &Prepared, count: u32) {
    let gateway = Gateway::start(&prepared.config());
    gateway.api().create_service("many", "first");
    gateway.drain();
    // Few large records take less time than many small ones, and copies of one less than changes.
    let copies = r#"
        WITH RECURSIVE numbers (number) AS (
            SELECT 1 UNION ALL SELECT number + 1 FROM numbers WHERE number < ?1
        ), ids (id) AS (SELECT printf('%056d', number) FROM numbers)
        INSERT INTO records SELECT kind, 'many/' || ids.id, json_set(document, '$.id', ids.id,
            '$."member of a later version"', ?2)
        FROM ids, records WHERE kind = 'service' AND records.id = 'many/first'
    "#;
    let database = Connection::open(prepared.path("data/gw.sqlite")).unwrap();
    let member = "x".repeat(2700);
    let added = database.execute(copies, (count, &member)).unwrap();
    assert_eq!(added, count as usize);
    assert!(member.len() * added > 64 * 1024 * 1024);
}

#[test]
fn a_revocation_reaches_a_replaced_process_with_more_records_than_fit_into_a_message() {
    let _turn = turn();
    let prepared = Prepared::new();
    // For measurements by hand.
    let count = std::env::var("GW_TEST_SERVICES")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(MANY_SERVICES);
    add_services(&prepared, count);
    let backend = HeldBackend::start();
    let (served, _agent) = prepared.start(&backend.url);
    let mut running = prepared.connect(served.address);
    let kept = kept_connections(&prepared, served.address, 30);
    running.send(prepared.get("/held"));
    let successor = replace(served.process.id(), &served.log);
    let api = prepared.api(served.admin_address);
    api.delete(&format!("{KEYS}/{}", prepared.key_id()));
    let asked = Instant::now();
    wait_until_refused(&prepared, kept, "GW_SERVICE_KEY_INVALID");
    eprintln!(
        "a key refused by a replaced process after {:?}, with {count} services",
        asked.elapsed()
    );
    backend.release();
    assert_eq!(running.response().status, 200);
    drop(successor);
}

#[test]
fn a_process_without_its_successor_serves_its_connections_on() {
    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let (mut served, _agent) = prepared.start(&backend.url);
    let mut running = prepared.connect(served.address);
    let mut kept = kept_connections(&prepared, served.address, 4);
    running.send(prepared.get("/held"));
    let second = replace(served.process.id(), &served.log);
    // Changes are passed from one process to the next, so the second successor matters as well.
    let third = replace(second.0, &served.log);
    assert!(send_signal(third.0, "KILL"));
    served.log.line_with("no more changes from the successor");
    assert_eq!(admitted_next(&prepared, &mut kept), 4);
    backend.release();
    assert_eq!(running.response().status, 200);
    drop((running, kept));
    assert_eq!(served.process.exit_code(), Some(0));
    eventually("the second process has ended", || {
        second.has_ended().then_some(())
    });
    assert!(admin_is_gone(served.admin_address));
}

#[test]
fn a_process_that_lacks_a_change_serves_its_connections_on_and_is_named_as_pending() {
    let prepared = Prepared::new();
    let copied = Command::new("cp")
        .arg("--archive")
        .args([prepared.path("data"), prepared.path("earlier")])
        .status();
    assert!(copied.unwrap().success());
    let backend = HeldBackend::start();
    let (mut served, _agent) = prepared.start(&backend.url);
    set_rate(&prepared, served.admin_address, 60);
    let mut running = prepared.connect(served.address);
    let mut kept = kept_connections(&prepared, served.address, 4);
    running.send(prepared.get("/held"));
    backend.wait_for_held();
    // The successor has the records from before the change.
    let earlier = prepared.config().replace("/data\"", "/earlier\"");
    fs::write(prepared.path("gateway.toml"), earlier).unwrap();
    let successor = replace(served.process.id(), &served.log);
    served.log.line_with("no more changes from the successor");
    assert_eq!(admitted_next(&prepared, &mut kept), 4);
    let pending = |enabled: bool| {
        let api = prepared.api(served.admin_address);
        let reply = api.ask("PATCH", SERVICE, &json!({ "enabled": enabled }));
        assert_eq!(reply.status, 200, "{reply:?}");
        !reply.pending_nodes.is_empty()
    };
    assert!(pending(false));
    backend.release();
    assert_eq!(running.response().status, 200);
    drop((running, kept));
    assert_eq!(served.process.exit_code(), Some(0));
    eventually("no process is behind", || {
        let is_in_use = |enabled| !pending(enabled);
        [true, false].into_iter().any(is_in_use).then_some(())
    });
    successor.stop();
}

fn admin_is_gone(address: SocketAddr) -> bool {
    std::net::TcpStream::connect(address).is_err() || admin(address, "/healthz").0 != 200
}
