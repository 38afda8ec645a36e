//! A region whose clocks differ: nodes run on machines with clocks of their own.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Value, json};

use super::{OK, assert_says};
use crate::support::apex::APEX;
use crate::support::doctor::{Findings, examine};
use crate::support::peers::backend;
use crate::support::peers::caller::{HOST, connect_to};
use crate::support::processes::machine::Machine;
use crate::support::processes::process;
use crate::support::processes::process::{Served, gw_gateway, start_logged};
use crate::support::processes::region::Region;
use crate::support::scene::About;
use crate::support::{eventually, programs};

const STEPS: [&str; 4] = ["+1h", "-1h", "+1d", "-1d"];
const SERVICE_SCOPE: &str = "account:demo service:echo";

impl Machine {
    /// As [`Self::restart`], for a node that does not join. Returns the line of the log that says
    /// so.
    fn restart_refused(&self, region: &mut Region, node: usize) -> String {
        let command = &mut process::serve_command(&region.config(node));
        let (process, log) = start_logged(self.run(command));
        let mut addresses = None;
        let mut refused = None;
        // The two lines are of different threads.
        let ((address, admin_address), refused) = log.find(|line| {
            let address = |name: &str| line[name].as_str()?.parse().ok();
            addresses =
                addresses.or_else(|| Some((address("address")?, address("admin_address")?)));
            if line
                .to_string()
                .contains("this node does not join the region")
            {
                refused = Some(line.to_string());
            }
            addresses.zip(refused.clone())
        });
        region.nodes[node] = Some(Served {
            process,
            address,
            admin_address,
            log,
        });
        refused
    }

    /// What `doctor` finds on this machine.
    fn examine(&self, config: &Path) -> Findings {
        let mut doctor = gw_gateway();
        doctor.args(["doctor", "--config"]).arg(config);
        examine(self.run(&mut doctor))
    }

    /// Exit code and standard output of `region join` on this machine.
    fn join(&self, config: &Path) -> (i32, String) {
        let mut join = gw_gateway();
        join.args(["region", "join", "--config"]).arg(config);
        let output = self.run(&mut join).output().unwrap();
        (
            output.status.code().unwrap(),
            String::from_utf8(output.stdout).unwrap(),
        )
    }
}

/// A new access token of a gateway for the scene's service.
pub(super) fn token(about: &About, (id, secret): &(String, String)) -> String {
    let body = json!({
        "client_id": id,
        "client_secret": secret,
        "scope": SERVICE_SCOPE,
    })
    .to_string();
    let mut caller = connect_to(about, APEX, &[b"http/1.1"], None);
    let head =
        format!("POST /oauth/token HTTP/1.1\r\nHost: {APEX}\r\nContent-Type: application/json\r\n");
    caller.send(format!(
        "{head}Content-Length: {}\r\n\r\n{body}",
        body.len()
    ));
    let response = caller.response();
    assert_eq!(response.status, 200, "{}", response.json());
    response.json()["access_token"].as_str().unwrap().to_owned()
}

fn issued_at(token: &str) -> u64 {
    let claims = URL_SAFE_NO_PAD
        .decode(token.split('.').nth(1).unwrap())
        .unwrap();
    serde_json::from_slice::<Value>(&claims).unwrap()["iat"]
        .as_u64()
        .unwrap()
}

/// Asserts that a node measures the difference of its clock from that of PostgreSQL, of an hour at
/// least.
#[track_caller]
fn assert_differs(region: &Region, node: usize, step: &str) {
    let difference = region.metric(node, "gw_clock_difference_seconds");
    let is_ahead = step.starts_with('+');
    assert_eq!(difference > 0.0, is_ahead, "{step}: {difference}");
    assert!(difference.abs() > 3590.0, "{step}: {difference}");
}

fn is_recent(unix_seconds: u64) -> bool {
    let now = UNIX_EPOCH.elapsed().unwrap().as_secs();
    unix_seconds.abs_diff(now) < 60
}

/// Asserts that a node relays a request with this token, and dates its answer rightly.
fn assert_relayed(region: &Region, node: usize, token: &str) {
    let mut caller = region.connect(node);
    caller.send(format!(
        "GET / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Authorization: Bearer {token}\r\n\r\n"
    ));
    let response = caller.response();
    assert_eq!(response.status, 200);
    let date = httpdate::parse_http_date(response.header("date")).unwrap();
    let unix_seconds = date.duration_since(UNIX_EPOCH).unwrap().as_secs();
    assert!(is_recent(unix_seconds), "{date:?}");
}

#[test]
fn a_node_with_a_wrong_clock_joins_once_it_is_right() {
    if !programs::usable(&["faketime", "postgresql"]) {
        return;
    }
    let Some(mut region) = Region::start(2) else {
        return;
    };
    let _agent = region.run_agent(&backend::answering(OK));
    region.owner();
    let machine = Machine::new();
    for step in STEPS {
        region.kill(1);
        machine.set(step);
        let refused = machine.restart_refused(&mut region, 1);
        let side = if step.starts_with('+') {
            "ahead of that of PostgreSQL (20"
        } else {
            "behind that of PostgreSQL (20"
        };
        assert_says(&refused, &["the clock of this machine (20", side]);
        assert_ne!(region.status(1)["standing"], "member");
        assert_differs(&region, 1, step);
        let looked = machine.examine(&region.config(1));
        let finding = looked.of("store: clock");
        assert_eq!(finding.verdict, "failed", "{finding:?}");
        assert_says(&finding.found, &[side]);
        let (code, found) = machine.join(&region.config(1));
        assert_eq!(code, 1, "{found}");
        assert_says(&found, &[side, "synchronise both with NTP"]);

        machine.set("+0");
        region.wait_for_members(2);
        // Requests cross in both directions, whichever node owns the service.
        eventually("requests are relayed", || {
            let answers = [0, 1].map(|node| region.request(node));
            (answers == ["200", "200"]).then_some(())
        });
        let looked = machine.examine(&region.config(1));
        assert_eq!(looked.of("store: clock").verdict, "ok");
    }
}

#[test]
fn steps_of_the_clock_of_running_nodes_have_no_effect() {
    if !programs::usable(&["faketime", "postgresql"]) {
        return;
    }
    let Some(mut region) = Region::start(2) else {
        return;
    };
    let machine = Machine::new();
    for node in 0..2 {
        region.kill(node);
        machine.restart(&mut region, node);
    }
    region.wait_for_members(2);
    let _agent = region.run_agent(&backend::answering(OK));
    let owner = region.owner();
    let credential = region.api(0).create_credential("demo", &["echo"]);
    let old = token(&region.about(0), &credential);
    let folder = tempfile::tempdir().unwrap();
    for step in STEPS {
        machine.set(step);
        for node in 0..2 {
            let log = &region.node(node).log;
            log.line_with("which this node follows for tokens, certificates and expiry");
            assert_differs(&region, node, step);
        }
        let new = token(&region.about(0), &credential);
        assert!(is_recent(issued_at(&new)), "{step}");
        for node in 0..2 {
            assert_relayed(&region, node, &old);
            assert_relayed(&region, node, &new);
            assert_eq!(region.status(node)["standing"], "member");
        }
        // The certificate of a new agent is valid now.
        let enrolled = region.api(1).create_enrollment_token("demo", &["echo"]);
        region.enroll(enrolled, &folder.path().join(step));
        assert_eq!(region.metric(owner, "gw_tunnels"), 1.0, "{step}");
        let ended = [0, 1].map(|node| region.metric(node, "gw_tunnels_ended_total"));
        assert_eq!(ended, [0.0, 0.0], "{step}");
        machine.set("+0");
        for node in 0..2 {
            let log = &region.node(node).log;
            log.line_with("agrees with that of PostgreSQL again");
        }
    }
    certificates_end_in_a_day(&region);
}

fn certificates_end_in_a_day(region: &Region) {
    let agents = region.api(0).agents("demo");
    assert_eq!(agents.len(), 1 + STEPS.len());
    let now = SystemTime::now();
    for agent in agents {
        let not_after = agent["certificate_not_after"]
            .as_str()
            .unwrap_or_else(|| panic!("{agent}"));
        let end = humantime::parse_rfc3339(not_after).unwrap();
        let [least, most] =
            [23 * 60, 24 * 60 + 1].map(|minutes| now + Duration::from_mins(minutes));
        assert!(least < end && end < most, "{not_after}");
    }
}
