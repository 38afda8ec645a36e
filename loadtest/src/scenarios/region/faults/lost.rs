//! A machine is lost: no packet reaches it or leaves it.

use std::path::Path;
use std::time::{Duration, Instant};

use super::FaultOptions;
use super::site::{Plan, Site};
use super::table::{Row, Table};
use super::watch::{self, Seen, Watch};
use super::world::Machine;
use crate::failure::{Failure, ensure};
use crate::report::millis;
use crate::scenarios::region::nodes::NODES;

const SERVICES: usize = 5;
const RATE: u32 = 300;
/// Callers of a pair, enough for the requests of some seconds.
const CALLERS: u32 = 60;
const BEFORE: Duration = Duration::from_secs(5);
const WAIT_MAX: Duration = Duration::from_secs(9);

pub(super) fn run(
    gateway: &Path,
    options: &FaultOptions,
    table: &mut Table,
) -> Result<(), Failure> {
    let site = Site::start(
        gateway,
        &Plan {
            services: SERVICES,
            has_balanced_agent: true,
            ..Plan::default()
        },
    )?;
    let owners = site.owners()?;
    let is_spliced = |service: &usize, node| {
        owners[*service] == Some(node)
            && site.services[*service]
                .entry
                .is_some_and(|entry| entry != node)
    };
    let spliced = |node| {
        (0..owners.len())
            .filter(move |service| is_spliced(service, node))
            .count()
    };
    let lost = (0..NODES)
        .max_by_key(|node| spliced(*node))
        .unwrap_or_default();
    ensure(spliced(lost) > 0, || {
        "no tunnel passes through a node".to_owned()
    })?;
    let living: Vec<usize> = (0..NODES).filter(|node| *node != lost).collect();
    // An agent that knows no other node is lost with it.
    let services: Vec<usize> = (0..owners.len())
        .filter(|it| site.services[*it].entry != Some(lost))
        .collect();

    let watch = Watch::start(&site, &watch::pairs(&living, &services), RATE, CALLERS)?;
    std::thread::sleep(BEFORE);
    site.world.unplug(Machine::Node(lost))?;
    let cut = Instant::now();
    std::thread::sleep(Duration::from_secs(options.lost_seconds));
    let seen = watch.stop()?;
    site.world.plug_in(Machine::Node(lost))?;

    let of_lost: Vec<(usize, bool)> = services
        .iter()
        .filter(|service| owners[**service] == Some(lost))
        .map(|service| (*service, is_spliced(service, lost)))
        .collect();
    table.add(row(&seen, cut, &of_lost));
    Ok(())
}

/// Figures of the requests around the cut. `of_lost`: services of the lost machine, and whether
/// their tunnel was spliced at another one.
fn row(seen: &[Seen], cut: Instant, of_lost: &[(usize, bool)]) -> Row {
    let early = watch::failures(seen)
        .filter(|(_, failed)| failed.ended < cut)
        .count();
    let late = watch::failures(seen)
        .filter(|(_, failed)| failed.began > cut + WAIT_MAX)
        .count();
    let longest = watch::longest(seen, cut);
    let again = of_lost.iter().map(|(service, is_spliced)| {
        let answered = seen
            .iter()
            .filter(|seen| seen.pair.service == *service)
            .flat_map(|seen| &seen.outcome.answered);
        let ended = answered
            .filter(|(began, _)| *began > cut)
            .map(|(began, took)| *began + *took - cut);
        (*is_spliced, ended.min().unwrap_or(Duration::MAX))
    });
    let again: Vec<(bool, Duration)> = again.collect();
    let slowest = |spliced: bool| {
        again
            .iter()
            .filter(|(it, _)| *it == spliced)
            .map(|(_, at)| *at)
            .max()
    };
    let [through_living, balanced] = [slowest(true), slowest(false)].map(Option::unwrap_or_default);
    let figure = |at: Duration| {
        if at == Duration::MAX {
            "never".to_owned()
        } else {
            format!("{:.1} s", at.as_secs_f64())
        }
    };
    let failed = watch::failures(seen).map(|(_, failed)| failed);
    Row::new(format!("lost machine, {RATE} requests/s"))
        .check(early == 0, format!("{early} failures before"))
        .check(
            longest <= WAIT_MAX,
            format!("longest wait {:.1} s", millis(longest) / 1e3),
        )
        .check(
            through_living <= WAIT_MAX && balanced <= WAIT_MAX,
            format!(
                "its {} services served again after {} (agents through living nodes) and {} \
                     (agents through a balancer)",
                again.len(),
                figure(through_living),
                figure(balanced)
            ),
        )
        .check(
            late == 0,
            format!(
                "{late} failures of requests that began {} s after the \
                                       loss",
                WAIT_MAX.as_secs()
            ),
        )
        .note(format!(
            "{} requests; failures: {}",
            watch::requests(seen),
            watch::kinds(failed)
        ))
}
