//! One-way cuts of each pair of machines, and links that are cut again and again.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;

use super::FaultOptions;
use super::site::{Plan, Site};
use super::table::{Row, Table};
use super::watch::{self, Pair, Seen, Watch};
use super::world::Machine;
use crate::callers::{Failed, What};
use crate::failure::Failure;
use crate::scenarios::region::nodes::NODES;

const SERVICES: usize = 4;
const RATE: u32 = 120;
const CALLERS: u32 = 8;
/// The service whose bucket is small, its limits, and the rate of its callers.
const LIMITED: usize = 0;
const BURST: usize = 100;
const REFILL_PER_SECOND: usize = 5;
const LIMITED_RATE: u32 = 45;
const FLAP_CUT: Duration = Duration::from_millis(400);
const FLAP_HEALED: Duration = Duration::from_millis(600);
const POLL: Duration = Duration::from_millis(250);
/// A tunnel that was cut is noticed by its agent.
const WELL_WITHIN: Duration = Duration::from_secs(60);

/// Packets from one machine to another are lost.
#[derive(Clone, Copy)]
struct Cut {
    from: Machine,
    to: Machine,
    began: Instant,
    /// All pairs of nodes and services are served again.
    well: Instant,
}

/// Nodes that were declared dead.
#[derive(Default)]
struct Deaths {
    dead: [bool; NODES],
    count: usize,
}

pub(super) fn run(
    gateway: &Path,
    options: &FaultOptions,
    table: &mut Table,
) -> Result<(), Failure> {
    let site = Site::start(
        gateway,
        &Plan {
            services: SERVICES,
            ..Plan::default()
        },
    )?;
    let limits = json!({ "burst": BURST, "refill_per_minute": 60 * REFILL_PER_SECOND });
    site.change(
        0,
        "PATCH",
        &format!("/accounts/demo/services/{}", site.services[LIMITED].id),
        &limits,
    )?;
    each_pair(&site, Duration::from_secs(options.cut_seconds), table)?;
    site.wait_until_well()?;
    flapping(&site, Duration::from_secs(options.flap_seconds), table)
}

fn each_pair(site: &Site, length: Duration, table: &mut Table) -> Result<(), Failure> {
    let owners = site.owners()?;
    let load = Load::start(site)?;
    let mut deaths = Deaths::default();
    let mut cuts = Vec::new();
    for (from, to) in links() {
        let began = Instant::now();
        site.world.cut_one_way(from, to)?;
        deaths.observe(site, length);
        site.world.heal_one_way(from, to)?;
        wait_until_served(site, &mut deaths)?;
        cuts.push(Cut {
            from,
            to,
            began,
            well: Instant::now(),
        });
    }
    let (seen, bucket) = load.stop(&deaths)?;
    let is_own = |pair: Pair, failed: &Failed| {
        let during = cuts
            .iter()
            .filter(|cut| failed.began <= cut.well && failed.ended >= cut.began);
        during.into_iter().any(|cut| {
            cut.is_passed(
                pair,
                owners[pair.service],
                site.services[pair.service].entry,
            )
        })
    };
    let (own, beyond): (Vec<_>, Vec<_>) =
        watch::failures(&seen).partition(|(pair, failed)| is_own(*pair, failed));
    let kinds =
        |failed: Vec<(Pair, &Failed)>| watch::kinds(failed.into_iter().map(|(_, failed)| failed));
    let slowest = cuts
        .iter()
        .map(|cut| (cut.well - cut.began).saturating_sub(length))
        .max()
        .unwrap_or_default();
    let row = Row::new(format!(
        "one-way cuts of {} pairs, {} s each",
        cuts.len(),
        length.as_secs()
    ))
    .check(
        beyond.is_empty(),
        format!(
            "{} failures beyond the cut machines ({})",
            beyond.len(),
            kinds(beyond)
        ),
    )
    .note(format!(
        "{} of their own ({}) in {} requests",
        own.len(),
        kinds(own),
        watch::requests(&seen)
    ))
    .note(format!("{} deaths", deaths.count))
    .note(format!(
        "all served again at most {:.1} s after a cut",
        slowest.as_secs_f64()
    ));
    table.add(row);
    table.add(bucket.row("bucket during one-way cuts"));
    Ok(())
}

fn flapping(site: &Site, length: Duration, table: &mut Table) -> Result<(), Failure> {
    let load = Load::start(site)?;
    let mut deaths = Deaths::default();
    let deadline = Instant::now() + length;
    let mut cuts = 0;
    for (from, to) in links().into_iter().cycle() {
        if Instant::now() >= deadline {
            break;
        }
        site.world.cut_one_way(from, to)?;
        std::thread::sleep(FLAP_CUT);
        site.world.heal_one_way(from, to)?;
        deaths.observe(site, FLAP_HEALED);
        cuts += 1;
    }
    let (seen, bucket) = load.stop(&deaths)?;
    let failed: Vec<&Failed> = watch::failures(&seen).map(|(_, failed)| failed).collect();
    let row = Row::new(format!("flapping for {} s, {cuts} cuts", length.as_secs()))
        .check(
            failed.is_empty(),
            format!(
                "{} of {} requests failed ({})",
                failed.len(),
                watch::requests(&seen),
                watch::kinds(failed.into_iter())
            ),
        )
        .note(format!("{} deaths", deaths.count));
    table.add(row);
    table.add(bucket.row("bucket while links flap"));
    Ok(())
}

/// Requests to all services at all nodes, and more than its rate to the limited one.
struct Load {
    services: Watch,
    limited: Watch,
    began: Instant,
}

/// Requests that the limited service has admitted, and how many it may.
struct Bucket {
    admitted: usize,
    most: usize,
}

impl Load {
    fn start(site: &Site) -> Result<Self, Failure> {
        let services: Vec<usize> = (0..site.services.len())
            .filter(|service| *service != LIMITED)
            .collect();
        let services = Watch::start(site, &watch::pairs(&[0, 1, 2], &services), RATE, CALLERS)?;
        let limited = Watch::start(
            site,
            &watch::pairs(&[0, 1, 2], &[LIMITED]),
            LIMITED_RATE,
            CALLERS,
        )?;
        Ok(Self {
            services,
            limited,
            began: Instant::now(),
        })
    }

    fn stop(self, deaths: &Deaths) -> Result<(Vec<Seen>, Bucket), Failure> {
        let limited = self.limited.stop()?;
        let refilled = self.began.elapsed().as_secs_f64() * REFILL_PER_SECOND as f64;
        let admitted = limited.iter().map(|seen| seen.outcome.answered.len()).sum();
        let mut seen = self.services.stop()?;
        for mut one in limited {
            let is_limited =
                |failed: &Failed| matches!(&failed.what, What::Status(it) if it.starts_with("429"));
            one.outcome.failed.retain(|failed| !is_limited(failed));
            seen.push(one);
        }
        Ok((
            seen,
            Bucket {
                admitted,
                most: BURST * (1 + deaths.count) + refilled.ceil() as usize,
            },
        ))
    }
}

impl Bucket {
    fn row(&self, name: &str) -> Row {
        let Self { admitted, most } = self;
        Row::new(name).check(
            admitted <= most,
            format!("{admitted} admitted, at most {most} may be"),
        )
    }
}

impl Deaths {
    /// Counts nodes that are declared dead in this time.
    fn observe(&mut self, site: &Site, length: Duration) {
        let deadline = Instant::now() + length;
        while Instant::now() < deadline {
            self.look(site);
            std::thread::sleep(POLL.min(deadline.saturating_duration_since(Instant::now())));
        }
    }

    fn look(&mut self, site: &Site) {
        // The view of the latest epoch.
        let views = (0..NODES).map(|node| site.status(node));
        let Some(view) = views.max_by_key(|view| view["epoch"].as_u64()) else {
            return;
        };
        for row in view["nodes"].as_array().into_iter().flatten() {
            let slot = row["slot"]
                .as_u64()
                .and_then(|slot| usize::try_from(slot).ok());
            if let Some(dead) = slot.and_then(|slot| self.dead.get_mut(slot)) {
                let is_dead = row["state"] == "dead";
                self.count += usize::from(is_dead && !*dead);
                *dead = is_dead;
            }
        }
    }
}

impl Cut {
    /// Whether a request of the pair, or the tunnel of its service, passes the machines that are
    /// cut.
    fn is_passed(&self, pair: Pair, owner: Option<usize>, entry: Option<usize>) -> bool {
        let ends = |one: usize, other: Option<usize>| {
            other.is_some_and(|other| {
                [self.from, self.to] == [Machine::Node(one), Machine::Node(other)]
            }) || other.is_some_and(|other| {
                [self.to, self.from] == [Machine::Node(one), Machine::Node(other)]
            })
        };
        let is_cut = |node: usize| [self.from, self.to].contains(&Machine::Node(node));
        if [self.from, self.to]
            .iter()
            .any(|machine| matches!(machine, Machine::Engine(_)))
        {
            return is_cut(pair.node) || owner.is_some_and(is_cut) || entry.is_some_and(is_cut);
        }
        ends(pair.node, owner) || entry.is_some_and(|entry| ends(entry, owner))
    }
}

/// Each direction between two nodes, and between a node and PostgreSQL.
fn links() -> Vec<(Machine, Machine)> {
    let nodes = (0..NODES).flat_map(|from| {
        (0..NODES)
            .filter(move |to| *to != from)
            .map(move |to| (from, to))
    });
    let nodes = nodes.map(|(from, to)| (Machine::Node(from), Machine::Node(to)));
    let engine = Machine::Engine(0);
    nodes
        .chain(
            (0..NODES)
                .flat_map(|node| [(Machine::Node(node), engine), (engine, Machine::Node(node))]),
        )
        .collect()
}

/// Waits until every service is served at every node.
fn wait_until_served(site: &Site, deaths: &mut Deaths) -> Result<(), Failure> {
    let deadline = Instant::now() + WELL_WITHIN;
    site.wait_until_well()?;
    for pair in watch::pairs(&[0, 1, 2], &(0..site.services.len()).collect::<Vec<_>>()) {
        let target = site.target(pair.service)?;
        while Instant::now() < deadline {
            let asked = site
                .world
                .on(Machine::Node(pair.node), || target.connect()?.ask("/hello"));
            if asked.is_ok_and(|answer| matches!(answer.head.status, 200 | 429)) {
                break;
            }
            deaths.look(site);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_concerns_requests_and_tunnels_that_pass_it() {
        let now = Instant::now();
        let cut = |from, to| Cut {
            from,
            to,
            began: now,
            well: now,
        };
        let at = |node| Pair { node, service: 0 };
        let nodes = cut(Machine::Node(0), Machine::Node(1));
        assert!(nodes.is_passed(at(0), Some(1), Some(1)));
        assert!(nodes.is_passed(at(1), Some(0), Some(0)));
        // The tunnel of a service that is called at a third node.
        assert!(nodes.is_passed(at(2), Some(1), Some(0)));
        assert!(!nodes.is_passed(at(0), Some(0), Some(0)));
        assert!(!nodes.is_passed(at(0), Some(2), Some(2)));
        let engine = cut(Machine::Engine(0), Machine::Node(1));
        assert!(engine.is_passed(at(1), Some(0), Some(0)));
        assert!(!engine.is_passed(at(2), Some(0), Some(0)));
    }
}
