//! Simulations of a region on virtual time: random schedules of faults, with checks after every
//! step.
//!
//! `GW_REGION_SCHEDULES` sets the number of random schedules, `GW_REGION_SEED` replays one with a
//! trace.

mod attempts;
mod checks;
mod engine;
mod flaws;
mod model_scenarios;
mod scenarios;
mod schedule;
mod setup;
mod world;

use std::time::Duration;

use self::checks::Coverage;
use self::flaws::Flaws;
use self::schedule::Schedule;
use self::world::World;
use super::owners::lease::Isolation;
use crate::random::Random;

/// Random schedules of a usual test run.
const SCHEDULES: u64 = 2_000;

/// Longest time to converge after the last fault, if no node that ended has to be declared dead.
const CONVERGENCE: Duration = Duration::from_secs(5);

/// Longest time if one has: the grace after an outage, on the slowest clock, and the beats around
/// it.
const CONVERGENCE_AFTER_DEATH: Duration = Duration::from_secs(14);

/// Result of one schedule: how long it took to converge, and what was checked.
struct Run {
    converged_after: Duration,
    has_silent_row: bool,
    checks: Coverage,
    answered: u64,
    revoked: u64,
    pending: u64,
}

fn run(seed: u64, flaws: Flaws, trace: bool) -> Result<Run, String> {
    let mut random = Random::new(seed);
    let schedule = Schedule::random(&mut random);
    let isolation = if random.percent(70) {
        Isolation::Serve
    } else {
        Isolation::Refuse {
            max_staleness: random.millis(1_000, 8_000),
        }
    };
    let mut world = World::new(seed, &schedule, isolation, trace);
    world.flaws = flaws;
    let result = run_world(&mut world, schedule.heal, random.percent(50));
    if let Some(trace) = &world.trace {
        let from = trace.len().saturating_sub(3_000);
        eprintln!("{schedule:?}\n{}", trace[from..].join("\n"));
    }
    result
}

fn run_world(world: &mut World, heal: Duration, restarts: bool) -> Result<Run, String> {
    world.run_until(heal);
    if world.violation.is_none() {
        world.heal(restarts);
    }
    let mut converged_after = None;
    let mut has_silent_row = false;
    for step in 1..=160u32 {
        if let Some(violation) = world.violation.take() {
            return Err(violation);
        }
        let after = Duration::from_millis(100) * step;
        world.run_until(heal + after);
        has_silent_row |= world.has_silent_row();
        match world.has_converged() {
            Ok(()) => {
                let since: &mut Duration = converged_after.get_or_insert(after);
                if after >= *since + Duration::from_millis(1_500) {
                    break;
                }
            }
            Err(_) => converged_after = None,
        }
    }
    if let Some(violation) = world.violation.take() {
        return Err(violation);
    }
    let limit = if has_silent_row {
        CONVERGENCE_AFTER_DEATH
    } else {
        CONVERGENCE
    };
    let Some(converged_after) = converged_after.filter(|after| *after <= limit) else {
        let state = world
            .has_converged()
            .err()
            .unwrap_or_else(|| format!("converged after {converged_after:?}"));
        return Err(format!("not converged within {limit:?}: {state}"));
    };
    let checks = world.checks.clone();
    let answered = world.answered;
    let (revoked, pending) = world.revoked();
    Ok(Run {
        converged_after,
        has_silent_row,
        checks,
        answered,
        revoked,
        pending,
    })
}

/// Counts of several schedules.
#[derive(Debug, Default)]
struct SimulationTotals {
    overlaps: u64,
    handovers: u64,
    handovers_without_levels: u64,
    deaths: u64,
    answered: u64,
    revoked: u64,
    /// Slots that answers to revocations have named.
    pending: u64,
    slowest: Duration,
    slowest_after_death: Duration,
}

impl SimulationTotals {
    fn add(&mut self, run: &Run) {
        self.overlaps += run.checks.overlaps;
        self.handovers += run.checks.handovers;
        self.handovers_without_levels += run.checks.handovers_without_levels;
        self.deaths += run.checks.deaths;
        self.answered += run.answered;
        self.revoked += run.revoked;
        self.pending += run.pending;
        let slowest = if run.has_silent_row {
            &mut self.slowest_after_death
        } else {
            &mut self.slowest
        };
        *slowest = run.converged_after.max(*slowest);
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

#[test]
fn random_schedules_keep_one_owner_and_converge() {
    if let Some(seed) = number("GW_REGION_SEED") {
        run(seed, Flaws::default(), true).map(|_| ()).unwrap();
        return;
    }
    let schedules = number("GW_REGION_SCHEDULES").unwrap_or(SCHEDULES);
    let first = number("GW_REGION_FIRST").unwrap_or(1);
    let mut totals = SimulationTotals::default();
    let mut failures = Vec::new();
    for seed in first..first + schedules {
        match run(seed, Flaws::default(), false) {
            Ok(run) => totals.add(&run),
            Err(failure) => failures.push(format!("GW_REGION_SEED={seed}: {failure}")),
        }
        if failures.len() >= 20 {
            break;
        }
    }
    eprintln!("{totals:?}");
    assert!(
        failures.is_empty(),
        "{} schedules failed:\n{}",
        failures.len(),
        failures.join("\n")
    );
    // The checks have something to check.
    assert!(
        totals.overlaps > 0 && totals.handovers > 0 && totals.deaths > 0 && totals.answered > 0,
        "{totals:?}"
    );
    assert!(
        totals.revoked > totals.pending && totals.pending > 0,
        "{totals:?}"
    );
}
