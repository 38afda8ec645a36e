//! Thousands of tunnels, of which a third are on a node that is killed.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::haproxy::Balancer;
use super::nodes::{NODES, Region};
use crate::backend::Received;
use crate::callers::{CALLERS, Callers};
use crate::enrolled::Enrolled;
use crate::failure::{Failure, ensure};
use crate::machine::process::Process;
use crate::report::{millis, per_mille, say};

/// Services of one agent; the most that an enrollment token can have.
const OF_AGENT: usize = 500;
const RATE: u32 = 200;
const OPEN_WITHIN: Duration = Duration::from_secs(60);
const BACK_WITHIN: Duration = Duration::from_secs(10);
/// Length of the measurement before and after the kill.
const LENGTH: Duration = Duration::from_secs(10);
const TICK: Duration = Duration::from_millis(50);
/// Largest allowed ratio of the p99 of callers of other services. Below half a millisecond the
/// scheduler decides.
const SLOWER_MAX: f64 = 2.0;
const NOISE: Duration = Duration::from_micros(500);

pub(super) fn run(gateway: &Path, count: usize) -> Result<(), Failure> {
    let backend = Received::default().start()?;
    let mut region = Region::start(gateway, None)?;
    let owner = region.owner()?;
    let balancer = Balancer::start(&region.addresses())?;
    let mut agents = Vec::new();
    for number in 0..count.div_ceil(OF_AGENT) {
        let services = OF_AGENT.min(count - number * OF_AGENT);
        agents.push(start_agent(
            &region,
            gateway,
            &format!("account{number}"),
            services,
            &backend,
            balancer.port,
        )?);
    }
    // The demo's own tunnel is one more.
    let opened = wait_for_tunnels(&region, count + 1, OPEN_WITHIN)?;
    let callers = Callers::start(&region.target_at(balancer.port), CALLERS, RATE);
    let began = Instant::now();
    std::thread::sleep(LENGTH);
    let killed = Instant::now();
    region.kill((owner + 1) % NODES)?;
    let back = wait_for_tunnels(&region, count + 1, OPEN_WITHIN)?;
    std::thread::sleep(LENGTH.saturating_sub(killed.elapsed()));
    let outcome = callers.stop()?;
    drop(balancer);
    drop(agents);
    region.stop()?;
    let [before, after] = [(began, killed), (killed, Instant::now())]
        .map(|(from, to)| per_mille(&outcome.durations(from, to), 990));
    let slower = after.max(NOISE).as_secs_f64() / before.max(NOISE).as_secs_f64();
    say(format_args!(
        "region: {count} tunnels open after {:.1} s; a node killed: all back after {:.1} s; \
         callers of a service of another node: p99 {:.2} ms before, {:.2} ms in the 10 s after \
         ({slower:.1} times)",
        opened.as_secs_f64(),
        back.as_secs_f64(),
        millis(before),
        millis(after)
    ));
    ensure(back <= BACK_WITHIN, || {
        format!("the tunnels are not back within {BACK_WITHIN:?}")
    })?;
    ensure(slower <= SLOWER_MAX, || {
        format!("p99 of other callers is {slower:.1} times the p99 before")
    })
}

/// Creates an account with services, and starts an agent for them that connects through the
/// balancer.
fn start_agent(
    region: &Region,
    gateway: &Path,
    account: &str,
    services: usize,
    backend: &str,
    port: u16,
) -> Result<Process, Failure> {
    let create = |path: &str, body: &Value| {
        let (status, answer) = region.administer(0, "POST", path, body)?;
        ensure(status == 201, || format!("POST {path}: {status} {answer}"))?;
        Ok::<Value, Failure>(answer)
    };
    create("/accounts", &json!({ "id": account }))?;
    let services: Vec<String> = (0..services)
        .map(|number| format!("service{number}"))
        .collect();
    for id in &services {
        create(
            &format!("/accounts/{account}/services"),
            &json!({ "id": id }),
        )?;
    }
    let token = create(
        &format!("/accounts/{account}/enrollment-tokens"),
        &json!({ "services": services }),
    )?;
    let token = token["token"]
        .as_str()
        .ok_or_else(|| Failure::new(format!("no token in {token}")))?;
    let url = format!("https://{}:{port}", region.apex());
    let enrolled = Enrolled::new(gateway, &url, region.ca_file(), token)?;
    let run = enrolled.command(backend, &[])?;
    enrolled.into_process(run)
}

/// Waits until the running nodes have `count` tunnels.
fn wait_for_tunnels(region: &Region, count: usize, within: Duration) -> Result<Duration, Failure> {
    let began = Instant::now();
    loop {
        let tunnels = region.tunnels();
        if tunnels >= count as u64 {
            return Ok(began.elapsed());
        }
        ensure(began.elapsed() < within, || {
            format!("{tunnels} of {count} tunnels after {within:?}")
        })?;
        std::thread::sleep(TICK);
    }
}
