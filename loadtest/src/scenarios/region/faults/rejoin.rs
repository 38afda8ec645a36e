//! A node is declared dead and rejoins; then PostgreSQL is away; then the node stops in order.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

use super::FaultOptions;
use super::site::{Plan, Site};
use super::table::{Row, Table};
use super::watch::{self, Watch};
use super::world::Machine;
use crate::failure::{Failure, ensure};
use crate::scenarios::region::nodes::NODES;

const SERVICES: usize = 6;
const FROZEN: Duration = Duration::from_secs(9);
/// Refusals until then are part of the return.
const RETURN: Duration = Duration::from_secs(2);
const LISTEN: Duration = Duration::from_secs(10);
const REFUSE_AFTER_SECONDS: u64 = 10;
const RATE: u32 = 150;
const CALLERS: u32 = 8;
const BURST: usize = 20;
const REFUSAL: &str = "another node refuses the messages of this one";
const REJOINED_WITHIN: Duration = Duration::from_secs(30);

pub(super) fn run(
    gateway: &Path,
    options: &FaultOptions,
    table: &mut Table,
) -> Result<(), Failure> {
    let plan = Plan {
        services: SERVICES,
        refuse_after: Some(REFUSE_AFTER_SECONDS),
        ..Plan::default()
    };
    let mut site = Site::start(gateway, &plan)?;
    let frozen = NODES - 1;
    freeze(&site, frozen)?;
    table.add(refusals(
        &site,
        format!("rejoin after {} s frozen", FROZEN.as_secs()),
    )?);
    cut_from_engine(&site, 0)?;
    table.add(refusals(
        &site,
        format!("rejoin after {} s without PostgreSQL", FROZEN.as_secs()),
    )?);
    table.add(engine_away(&site, options)?);
    table.add(levels(&mut site, frozen)?);
    Ok(())
}

/// Freezes a node until the others have declared it dead, and waits until it has rejoined.
fn freeze(site: &Site, node: usize) -> Result<(), Failure> {
    site.signal_node(node, Signal::STOP);
    std::thread::sleep(FROZEN);
    let is_dead = is_dead(site, node);
    site.signal_node(node, Signal::CONT);
    ensure(is_dead, || {
        "the frozen node was not declared dead".to_owned()
    })?;
    wait_for_return(site)
}

/// Cuts a node off from PostgreSQL until the others have declared it dead, and waits until it has
/// rejoined.
fn cut_from_engine(site: &Site, node: usize) -> Result<(), Failure> {
    let machine = Machine::Node(node);
    let engine = Machine::Engine(0);
    site.world.cut(machine, engine)?;
    std::thread::sleep(FROZEN);
    let is_dead = is_dead(site, node);
    site.world.heal(machine, engine)?;
    ensure(is_dead, || {
        "the node without PostgreSQL was not declared dead".to_owned()
    })?;
    wait_for_return(site)
}

/// Whether another node knows this one as dead.
fn is_dead(site: &Site, node: usize) -> bool {
    let rows = site.status((node + 1) % NODES)["nodes"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    rows.iter()
        .any(|row| row["slot"] == node && row["state"] == "dead")
}

fn wait_for_return(site: &Site) -> Result<(), Failure> {
    let continued = Instant::now();
    std::thread::sleep(RETURN);
    site.wait_until_well()?;
    ensure(continued.elapsed() < REJOINED_WITHIN, || {
        "the node did not rejoin in time".to_owned()
    })
}

/// Counts messages between nodes that are refused after a return.
fn refusals(site: &Site, situation: String) -> Result<Row, Failure> {
    let count = || {
        (0..NODES)
            .map(|node| Ok(site.log(node)?.matches(REFUSAL).count()))
            .sum::<Result<usize, Failure>>()
    };
    let before = count()?;
    std::thread::sleep(LISTEN);
    let after = count()? - before;
    Ok(Row::new(situation).check(
        after == 0,
        format!(
            "{after} refusals in {} s, {before} until 2 s after its return",
            LISTEN.as_secs()
        ),
    ))
}

fn engine_away(site: &Site, options: &FaultOptions) -> Result<Row, Failure> {
    let services: Vec<usize> = (0..site.services.len()).collect();
    let watch = Watch::start(site, &watch::pairs(&[0, 1, 2], &services), RATE, CALLERS)?;
    std::thread::sleep(RETURN);
    site.engines[0].signal(Signal::STOP);
    std::thread::sleep(Duration::from_secs(options.away_seconds));
    site.engines[0].signal(Signal::CONT);
    std::thread::sleep(RETURN);
    let seen = watch.stop()?;
    let failed = watch::failures(&seen).count();
    let kinds = watch::kinds(watch::failures(&seen).map(|(_, failed)| failed));
    Ok(Row::new(format!(
        "PostgreSQL away for {} s with `refuse`, after the rejoin",
        options.away_seconds
    ))
    .check(
        failed == 0,
        format!(
            "{failed} of {} requests failed ({kinds})",
            watch::requests(&seen)
        ),
    ))
}

/// Empties the buckets of the services that the node owns, and stops it in order: the next owners
/// go on with the levels.
fn levels(site: &mut Site, node: usize) -> Result<Row, Failure> {
    site.wait_until_well()?;
    let owners = site.owners()?;
    // Agents of other entries, which stay connected.
    let is_of_node =
        |it: &usize| owners[*it] == Some(node) && site.services[*it].entry != Some(node);
    let services: Vec<usize> = (0..owners.len()).filter(is_of_node).collect();
    ensure(!services.is_empty(), || {
        "the node owns no service".to_owned()
    })?;
    for service in &services {
        let path = format!("/accounts/demo/services/{}", site.services[*service].id);
        site.change(
            0,
            "PATCH",
            &path,
            &json!({ "burst": BURST, "refill_per_minute": 1 }),
        )?;
    }
    let first: Vec<usize> = services
        .iter()
        .map(|it| admitted(site, 0, *it))
        .collect::<Result<_, _>>()?;
    // Levels are handed over when the node leaves.
    site.stop_node(node)?;
    site.wait_for_members((0..NODES).filter(|other| *other != node))?;
    let second: Vec<usize> = services
        .iter()
        .map(|it| admitted(site, 0, *it))
        .collect::<Result<_, _>>()?;
    let full = first.iter().filter(|count| **count < BURST).count();
    let again = second.iter().filter(|count| **count > 2).count();
    Ok(Row::new("levels at an orderly stop, after the rejoin")
        .check(
            full == 0,
            format!("bursts of {BURST}: {first:?} admitted before"),
        )
        .check(
            again == 0,
            format!(
                "{again} of {} services admitted a second burst: {second:?}",
                services.len()
            ),
        ))
}

/// Requests that are admitted, of more than the burst.
fn admitted(site: &Site, node: usize, service: usize) -> Result<usize, Failure> {
    let target = site.target(service)?;
    let mut connection = site.world.on(Machine::Node(node), || target.connect())?;
    let mut admitted = 0;
    for _ in 0..BURST + 10 {
        let status = connection.ask("/hello")?.head.status;
        ensure(matches!(status, 200 | 429), || {
            format!("a request got {status}")
        })?;
        admitted += usize::from(status == 200);
    }
    Ok(admitted)
}
