//! One fault under load: which requests notice it, and when all is well again.

use std::time::{Duration, Instant};

use super::NODES;
use super::acts::Act;
use super::callers::{Callers, Pair, Seen, is_limited, kinds};
use super::faults::{Fault, Way};
use super::revocations::Revocations;
use super::site::{BURST, REFILL_PER_SECOND, Site};
use crate::callers::Failed;
use crate::failure::{Failure, ensure};
use crate::report::Row;

/// Load before a fault and after its end.
const AROUND: Duration = Duration::from_secs(2);
const REVOKED_EVERY: Duration = Duration::from_millis(500);
/// Keys that are revoked right before a fault: a node that crashes then must still refuse them.
const REVOKED_BEFORE: usize = 5;
/// The node that counts an address is asked for half a second at most.
const TOKEN_WITHIN: Duration = Duration::from_secs(1);
/// The longest that a GET may take that does not pass the node with the fault.
const WAIT_MAX: Duration = Duration::from_secs(9);

/// Nodes that were declared dead.
#[derive(Default)]
struct Deaths {
    dead: [bool; NODES],
    count: usize,
}

/// What is tried while a fault lasts.
struct Meanwhile<'a> {
    fault: &'a Fault,
    revocations: Revocations,
    deaths: Deaths,
    tokens: usize,
    tokens_failed: Vec<String>,
    slowest_token: Duration,
}

/// Applies a fault under load. Fails if the region cannot be brought to its end.
pub(super) fn run(site: &mut Site, fault: &Fault, rate: u32) -> Result<Row, Failure> {
    let owners = site.owners()?;
    let local = local_services(site, &owners)?;
    let called = [&local[..], &[site.limited() - 1, site.limited()]].concat();
    let keys = fault.lasts().div_duration_f64(REVOKED_EVERY) as usize + REVOKED_BEFORE;
    let mut meanwhile = Meanwhile {
        fault,
        revocations: Revocations::new(site, local, keys)?,
        deaths: Deaths::default(),
        tokens: 0,
        tokens_failed: Vec::new(),
        slowest_token: Duration::ZERO,
    };
    let already_twice = site.received.posts().1;
    let started = Instant::now();
    let callers = Callers::start(site, &called, rate)?;
    std::thread::sleep(AROUND);
    for _ in 0..REVOKED_BEFORE {
        meanwhile.revocations.revoke_quietly(site, fault.victim);
    }
    let from = Instant::now();
    meanwhile.perform(site, &fault.begin)?;
    let to = Instant::now();
    meanwhile.hold(site, fault.length)?;
    meanwhile.revocations.try_all(site, false)?;
    meanwhile.perform(site, &fault.end)?;
    let well = site.wait_until_well(fault.well_within);
    meanwhile.deaths.look(site, fault.victim);
    meanwhile.revocations.try_all(site, well.is_ok())?;
    std::thread::sleep(AROUND);
    let lasted = started.elapsed();
    let seen = callers.stop()?;
    let figures = Figures {
        site,
        fault,
        owners: &owners,
        effect: [from, to],
    };
    let mut row = figures.row(&seen, Row::new(fault.name.clone()));
    row = match well {
        Ok(well) => row.note(format!("well {:.1} s after its end", well.as_secs_f64())),
        Err(failure) => row.check(false, failure.to_string()),
    };
    let twice = site.received.posts().1 - already_twice;
    row = row.check(twice == 0, format!("{twice} POSTs twice at a backend"));
    row = bucket(&seen, site, meanwhile.deaths.count, lasted, row);
    if fault.issues_tokens {
        row = meanwhile.row(row);
    }
    meanwhile.revocations.conclude(row)
}

impl Meanwhile<'_> {
    fn perform(&mut self, site: &mut Site, acts: &[Act]) -> Result<(), Failure> {
        acts.iter().try_for_each(|act| match act {
            Act::Wait(length) => self.hold(site, *length),
            act => site.perform(*act),
        })
    }

    /// Revokes keys and asks for tokens for a while.
    fn hold(&mut self, site: &Site, length: Duration) -> Result<(), Failure> {
        let until = Instant::now() + length;
        while Instant::now() < until {
            let due = Instant::now() + REVOKED_EVERY;
            self.revocations.revoke(site, self.fault.victim)?;
            if self.fault.issues_tokens {
                self.ask_for_token(site, self.fault.victim);
            }
            self.deaths.look(site, self.fault.victim);
            std::thread::sleep(due.min(until).saturating_duration_since(Instant::now()));
        }
        Ok(())
    }

    fn ask_for_token(&mut self, site: &Site, node: usize) {
        let asked = Instant::now();
        let issued = site.issue_token(node);
        self.tokens += 1;
        self.tokens_failed
            .extend(issued.err().map(|it| it.to_string()));
        self.slowest_token = self.slowest_token.max(asked.elapsed());
    }

    fn row(&self, row: Row) -> Row {
        let failed = self.tokens_failed.len();
        let first = self.tokens_failed.first().cloned().unwrap_or_default();
        row.check(
            failed == 0 && self.slowest_token <= TOKEN_WITHIN,
            format!(
                "{failed} of {} requests for a token failed {first}, the slowest took {:.2} s",
                self.tokens,
                self.slowest_token.as_secs_f64()
            ),
        )
    }
}

impl Deaths {
    /// Counts nodes that are declared dead, by the view of the latest epoch.
    fn look(&mut self, site: &Site, victim: usize) {
        let others = (0..NODES).filter(|node| *node != victim);
        let views = others.map(|node| site.status(node));
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

/// A service of each node, whose agent connects to the node, and which the node owns.
fn local_services(site: &Site, owners: &[Option<usize>]) -> Result<[usize; NODES], Failure> {
    let mut local = [0; NODES];
    for (node, local) in local.iter_mut().enumerate() {
        let is_local = |it: &usize| [owners[*it], site.services[*it].entry] == [Some(node); 2];
        let found = (0..owners.len()).find(is_local);
        ensure(found.is_some(), || {
            format!("node {node} owns no service of its agent")
        })?;
        *local = found.unwrap_or_default();
    }
    Ok(local)
}

/// The limited service admits its burst, its refill, and a burst for each node that was declared
/// dead, at most.
fn bucket(seen: &[(Pair, Seen)], site: &Site, deaths: usize, lasted: Duration, row: Row) -> Row {
    let of_limited = seen
        .iter()
        .filter(|(pair, _)| pair.service == site.limited());
    let admitted: usize = of_limited.map(|(_, seen)| seen.answered).sum();
    let refill = (lasted.as_secs_f64() * REFILL_PER_SECOND as f64).ceil() as usize;
    let most = BURST * (1 + deaths) + refill;
    row.check(
        admitted <= most,
        format!("{admitted} of at most {most} admitted by a bucket, {deaths} deaths"),
    )
}

struct Figures<'a> {
    site: &'a Site,
    fault: &'a Fault,
    owners: &'a [Option<usize>],
    /// When the fault began to take effect, and when it had.
    effect: [Instant; 2],
}

impl Figures<'_> {
    fn row(&self, seen: &[(Pair, Seen)], row: Row) -> Row {
        let failures = seen
            .iter()
            .flat_map(|(pair, seen)| seen.failed.iter().map(|failed| (*pair, failed)))
            .filter(|(_, failed)| !is_limited(failed));
        let (allowed, others): (Vec<_>, Vec<_>) = failures.partition(|(pair, failed)| {
            self.fault
                .may_fail
                .allows(self.way(*pair), failed, self.effect)
        });
        let answered: usize = seen.iter().map(|(_, seen)| seen.answered).sum();
        let kinds = |failures: &[(Pair, &Failed)]| kinds(failures.iter().map(|(_, it)| *it));
        let longest = self.longest(seen);
        let row = row
            .check(
                others.is_empty(),
                format!(
                    "of {answered} requests {} failed that must not ({}{})",
                    others.len(),
                    kinds(&others),
                    self.first(&others)
                ),
            )
            .check(
                longest <= WAIT_MAX,
                format!(
                    "the slowest GET of others took {:.1} s",
                    longest.as_secs_f64()
                ),
            );
        row.note(format!("{} may ({})", allowed.len(), kinds(&allowed)))
    }

    fn way(&self, pair: Pair) -> Way {
        Way {
            node: pair.node,
            owner: self.owners[pair.service],
            entry: self.site.services[pair.service].entry,
        }
    }

    /// Where and when the first of some failures was.
    fn first(&self, failures: &[(Pair, &Failed)]) -> String {
        let Some((pair, failed)) = failures.iter().min_by_key(|(_, failed)| failed.began) else {
            return String::new();
        };
        let [from, _] = self.effect;
        let Way { node, owner, entry } = self.way(*pair);
        format!(
            "; the first at node {node}, of a service of node {owner:?} with an agent at \
             {entry:?}, {:.1} s after the begin, after {:.1} s",
            failed.began.saturating_duration_since(from).as_secs_f64(),
            (failed.ended - failed.began).as_secs_f64()
        )
    }

    /// The longest GET of those that do not pass a node or a link with the fault. A response that
    /// has begun when a node is lost stays with the node.
    fn longest(&self, seen: &[(Pair, Seen)]) -> Duration {
        let [_, to] = self.effect;
        let may_fail = &self.fault.may_fail;
        let others = seen
            .iter()
            .filter(|(pair, _)| !may_fail.concerns(self.way(*pair)));
        let gets = others.flat_map(|(_, seen)| &seen.gets);
        let gets = gets.filter(|(began, _)| *began > to || may_fail.in_flight.is_zero());
        let longest = gets.map(|(_, took)| *took);
        longest.max().unwrap_or_default()
    }
}
