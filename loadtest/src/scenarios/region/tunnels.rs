//! Thousands of tunnels, of which a third are on a node that is killed.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use gw_local_region::Balancer;
use rustix::process::Signal;

use super::{NODES, owner};
use crate::agents::{Agent, Plan};
use crate::backend::Received;
use crate::callers::{CALLERS, Callers};
use crate::demo::{Demo, Node};
use crate::failure::{Failure, ensure, wait_until};
use crate::machine::procfs;
use crate::report::{millis, per_mille, say};

/// Services of one agent; the most that an enrollment token can have.
const OF_AGENT: usize = 500;
const RATE: u32 = 200;
const OPEN_WITHIN: Duration = Duration::from_secs(60);
const BACK_WITHIN: Duration = Duration::from_secs(10);
/// Length of the measurement before and after the kill.
const LENGTH: Duration = Duration::from_secs(10);
/// Largest allowed ratio of the p99 of callers of other services. Below half a millisecond the
/// scheduler decides.
const SLOWER_MAX: f64 = 2.0;
const NOISE: Duration = Duration::from_micros(500);

pub(super) fn run(gateway: &Path, region: &Demo, count: usize) -> Result<(), Failure> {
    let backend = Received::default().start()?;
    let owner = owner(region)?;
    let address = |node: &Node| SocketAddr::from((Ipv4Addr::LOCALHOST, node.port));
    let balancer = Balancer::start(region.nodes.iter().map(address).collect())?;
    let (apex, _) = region.base_url.rsplit_once(':').unwrap_or_default();
    let url = format!("{apex}:{}", balancer.address.port());
    let opening = Instant::now();
    let mut agents = Vec::new();
    for number in 0..count.div_ceil(OF_AGENT) {
        let services = OF_AGENT.min(count - number * OF_AGENT);
        agents.push(start_agent(
            gateway, region, &url, number, services, &backend,
        )?);
    }
    // The demo's own tunnel is one more.
    let are_open = || Ok(region.tunnels() > count as u64);
    let missing = || format!("{} of {count} tunnels", region.tunnels());
    wait_until(OPEN_WITHIN, missing, are_open)?;
    let opened = opening.elapsed();
    let target = region.target.at_port(balancer.address.port());
    let callers = Callers::start(&target, CALLERS, RATE);
    let began = Instant::now();
    std::thread::sleep(LENGTH);
    let killed = Instant::now();
    procfs::signal_all(&[region.nodes[(owner + 1) % NODES].pid], Signal::KILL);
    wait_until(OPEN_WITHIN, missing, || Ok(region.tunnels() < count as u64))?;
    wait_until(OPEN_WITHIN, missing, are_open)?;
    let back = killed.elapsed();
    std::thread::sleep(LENGTH.saturating_sub(back));
    let outcome = callers.stop()?;
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
    gateway: &Path,
    region: &Demo,
    url: &str,
    number: usize,
    services: usize,
    backend: &str,
) -> Result<Agent, Failure> {
    let account = format!("account{number}");
    region.api.create_account(&account)?;
    let services: Vec<String> = (0..services).map(|it| format!("service{it}")).collect();
    let created = services
        .iter()
        .try_for_each(|id| region.api.create_service(&account, id));
    created?;
    let token = region.api.enrollment_token(&account, &services, 1)?;
    Agent::start(gateway, url, &region.ca_file, &token, Plan::new(backend))
}
