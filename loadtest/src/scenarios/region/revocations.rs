//! Revocations of service keys under load: all nodes refuse the key when the change is answered.

use std::time::{Duration, Instant};

use serde_json::json;

use super::NODES;
use crate::admin_api::AdminApi;
use crate::callers::{CALLERS, Callers};
use crate::client::Target;
use crate::demo::Demo;
use crate::failure::{Failure, ensure};
use crate::report::{millis, per_mille, say};

const RATE: u32 = 100;
const ADDRESSES: usize = 100;
const P99_MAX: Duration = Duration::from_millis(300);
const MAX: Duration = Duration::from_secs(1);

pub(super) fn run(region: &Demo, revocations: usize) -> Result<(), Failure> {
    let apis: Vec<AdminApi> = region
        .nodes
        .iter()
        .map(|node| region.api.at(&node.admin_url))
        .collect();
    let callers = Callers::start(&region.target, CALLERS, RATE);
    let mut took = Vec::with_capacity(revocations);
    for number in 0..revocations {
        let api = &apis[number % NODES];
        let key = api.create_key("demo", &format!("key {number}"), &["echo".to_owned()])?;
        let status_at = |node: usize| {
            let target = region.target.at_port(region.nodes[node].port);
            status_from(number, &target.with_key(key.secret.clone()))
        };
        // The creation was answered, so every node accepts the key.
        let other = (number + 1) % NODES;
        ensure(status_at(other)? == 200, || {
            format!("node {other} refuses a new key")
        })?;
        let path = format!("/accounts/demo/service-keys/{}", key.id);
        let asked = Instant::now();
        api.change("PATCH", &path, &json!({ "enabled": false }))?;
        took.push(asked.elapsed());
        for node in 0..NODES {
            let status = status_at(node)?;
            ensure(status == 502, || {
                format!("node {node} answers {status} after a key was revoked")
            })?;
        }
    }
    let outcome = callers.stop()?;
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
