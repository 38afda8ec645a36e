//! Revocations of service keys under load: all nodes refuse the key when the change is answered.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::nodes::{NODES, Region};
use crate::callers::{CALLERS, Callers};
use crate::client::Target;
use crate::failure::{Failure, ensure};
use crate::report::{millis, per_mille, say};

const RATE: u32 = 100;
const KEYS: &str = "/accounts/demo/service-keys";
const ADDRESSES: usize = 100;
const P99_MAX: Duration = Duration::from_millis(300);
const MAX: Duration = Duration::from_secs(1);

pub(super) fn run(gateway: &Path, revocations: usize) -> Result<(), Failure> {
    let region = Region::start(gateway, None)?;
    region.owner()?;
    let callers = Callers::start(&region.target(0), CALLERS, RATE);
    let mut took = Vec::with_capacity(revocations);
    for number in 0..revocations {
        let node = number % NODES;
        let new = json!({ "name": format!("key {number}"), "allowed_services": ["echo"] });
        let (status, key) = region.administer(node, "POST", KEYS, &new)?;
        ensure(status == 201, || format!("creating a key: {status} {key}"))?;
        let text = |field: &str| key[field].as_str().unwrap_or_default().to_owned();
        let target = |node| region.target(node).with_key(text("service_key"));
        // The creation was answered, so every node accepts the key.
        let other = (node + 1) % NODES;
        ensure(status_from(number, &target(other))? == 200, || {
            format!("node {other} refuses a new key")
        })?;
        let path = format!("{KEYS}/{}", text("key_id"));
        let asked = Instant::now();
        let (status, answer): (u16, Value) =
            region.administer(node, "PATCH", &path, &json!({ "enabled": false }))?;
        took.push(asked.elapsed());
        ensure(status == 200, || {
            format!("revoking a key: {status} {answer}")
        })?;
        for node in 0..NODES {
            let status = status_from(number, &target(node))?;
            ensure(status == 502, || {
                format!("node {node} answers {status} after a key was revoked")
            })?;
        }
    }
    let outcome = callers.stop()?;
    region.stop()?;
    took.sort_unstable();
    let [p50, p99, max] = [500, 990, 1000].map(|share| per_mille(&took, share));
    say(format_args!(
        "region: {revocations} revocations, in use at {NODES} nodes after p50 {:.1} ms, p99 {:.1} \
         ms, at most {:.0} ms; of {} other requests {} failed",
        millis(p50),
        millis(p99),
        millis(max),
        outcome.answered.len(),
        outcome.failed.len()
    ));
    ensure(outcome.failed.is_empty(), || "requests failed".to_owned())?;
    ensure(p99 < P99_MAX && max < MAX, || {
        "a revocation took too long".to_owned()
    })
}

/// The status of a request, from one of many addresses: failed authentications of an address are
/// limited.
fn status_from(number: usize, target: &Target) -> Result<u16, Failure> {
    Ok(target
        .connect_from(1 + number % ADDRESSES)?
        .ask("/hello")?
        .head
        .status)
}
