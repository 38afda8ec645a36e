//! Faults during which keys are revoked.

use std::time::{Duration, Instant};

use clap::ValueEnum;
use rustix::process::Signal;
use serde_json::json;

use super::trial::Trial;
use crate::failure::{Failure, ensure};
use crate::scenarios::region::faults::world::Machine;

/// Changes that a failover loses, beside one for each revocation that follows.
const LOST: usize = 40;
const SERVES_WITHIN: Duration = Duration::from_secs(15);
const MOMENT: Duration = Duration::from_millis(500);
const TICK: Duration = Duration::from_millis(50);

/// A fault of a node, or of the database. The last ones are failovers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(in crate::scenarios::region) enum Kind {
    /// Cut off for two seconds at a time
    Lagging,
    /// Killed and started while PostgreSQL does not answer
    Crashed,
    /// Cut off from PostgreSQL
    NoEngine,
    /// Cut off from the other nodes
    NoPeers,
    /// Cut off from both
    Alone,
    /// Packets are lost in one direction
    OneWay,
    /// Frozen for three and for seven seconds
    Frozen,
    /// PostgreSQL is restarted
    EngineRestarted,
    /// Killed and started
    Killed,
    /// A failover of PostgreSQL loses changes that the node, which is cut off, has applied
    Diverged,
    /// PostgreSQL fails over and the node is killed at the same moment
    FailoverKilled,
    /// The standby was promoted, and the node reaches the earlier primary only
    TwoPrimaries,
}

impl Kind {
    pub(super) fn run(self, trial: &mut Trial<'_>) -> Result<(), Failure> {
        match self {
            Self::Lagging => lagging(trial),
            Self::Crashed => crashed(trial),
            Self::NoEngine => cut_off(trial, &trial.engines()),
            Self::NoPeers => cut_off(trial, &trial.peers()),
            Self::Alone => cut_off(trial, &[trial.engines(), trial.peers()].concat()),
            Self::OneWay => one_way(trial),
            Self::Frozen => frozen(trial),
            Self::EngineRestarted => engine_restarted(trial),
            Self::Killed => killed(trial),
            Self::Diverged => diverged(trial),
            Self::FailoverKilled => failover_killed(trial),
            Self::TwoPrimaries => two_primaries(trial),
        }
    }

    /// Whether the primary is another one afterwards.
    pub(super) fn is_failover(self) -> bool {
        matches!(
            self,
            Self::Diverged | Self::FailoverKilled | Self::TwoPrimaries
        )
    }
}

impl Trial<'_> {
    fn machine(&self) -> Machine {
        Machine::Node(self.victim)
    }

    fn engines(&self) -> Vec<Machine> {
        self.site
            .engines
            .iter()
            .map(|engine| engine.machine())
            .collect()
    }

    fn peers(&self) -> Vec<Machine> {
        self.others().map(Machine::Node).to_vec()
    }

    fn cut(&self, machines: &[Machine]) -> Result<(), Failure> {
        machines
            .iter()
            .try_for_each(|other| self.site.world.cut(self.machine(), *other))
    }

    fn heal(&self, machines: &[Machine]) -> Result<(), Failure> {
        machines
            .iter()
            .try_for_each(|other| self.site.world.heal(self.machine(), *other))
    }
}

fn lagging(trial: &mut Trial<'_>) -> Result<(), Failure> {
    let machines = [trial.engines(), trial.peers()].concat();
    while trial.left() > 0 {
        trial.cut(&machines)?;
        trial.revoke(2)?;
        trial.heal(&machines)?;
        std::thread::sleep(MOMENT);
    }
    trial.try_all_everywhere()?;
    trial.finish()
}

fn cut_off(trial: &mut Trial<'_>, machines: &[Machine]) -> Result<(), Failure> {
    trial.cut(machines)?;
    trial.revoke(trial.left())?;
    trial.try_all_everywhere()?;
    trial.finish()?;
    trial.heal(machines)?;
    trial.try_all(trial.victim)?;
    trial.finish()
}

fn one_way(trial: &mut Trial<'_>) -> Result<(), Failure> {
    let share = trial.left().div_ceil(4);
    for machines in [trial.engines(), trial.peers()] {
        for is_outward in [true, false] {
            let link = |other: &Machine| {
                if is_outward {
                    (trial.machine(), *other)
                } else {
                    (*other, trial.machine())
                }
            };
            let links: Vec<(Machine, Machine)> = machines.iter().map(link).collect();
            links
                .iter()
                .try_for_each(|(from, to)| trial.site.world.cut_one_way(*from, *to))?;
            trial.revoke(share)?;
            trial.try_all_everywhere()?;
            trial.finish()?;
            links
                .iter()
                .try_for_each(|(from, to)| trial.site.world.heal_one_way(*from, *to))?;
            trial.site.wait_until_well()?;
        }
    }
    Ok(())
}

fn frozen(trial: &mut Trial<'_>) -> Result<(), Failure> {
    for length in [3, 7].into_iter().cycle() {
        if trial.left() == 0 {
            break;
        }
        trial.site.signal_node(trial.victim, Signal::STOP);
        // Requests with the keys queue at the frozen node.
        let began = Instant::now();
        trial.revoke(length)?;
        std::thread::sleep(Duration::from_secs(length as u64).saturating_sub(began.elapsed()));
        trial.site.signal_node(trial.victim, Signal::CONT);
        trial.try_all(trial.victim)?;
        trial.finish()?;
        trial.site.wait_until_well()?;
    }
    Ok(())
}

fn engine_restarted(trial: &mut Trial<'_>) -> Result<(), Failure> {
    while trial.left() > 0 {
        trial.revoke(3)?;
        trial.site.engines[0].stop()?;
        trial.site.engines[0].run(&trial.site.world)?;
        trial.revoke(7)?;
        trial.try_all_everywhere()?;
        trial.finish()?;
    }
    Ok(())
}

fn killed(trial: &mut Trial<'_>) -> Result<(), Failure> {
    while trial.left() > 0 {
        trial.revoke(3)?;
        trial.site.kill_node(trial.victim)?;
        trial.revoke(3)?;
        trial.site.start_node(trial.victim)?;
        trial.revoke(4)?;
        trial.site.wait_until_well()?;
        trial.try_all_everywhere()?;
        trial.finish()?;
    }
    Ok(())
}

/// The node is killed right after the reply, and started while PostgreSQL does not answer.
fn crashed(trial: &mut Trial<'_>) -> Result<(), Failure> {
    while trial.left() > 0 {
        trial.revoke_quietly(10)?;
        trial.site.engines[0].signal(Signal::STOP);
        trial.site.kill_node(trial.victim)?;
        trial.site.start_node(trial.victim)?;
        wait_for_tunnel(trial);
        trial.try_all_everywhere()?;
        trial.finish()?;
        trial.site.engines[0].signal(Signal::CONT);
        trial.site.wait_until_well()?;
    }
    Ok(())
}

/// Waits until the node serves its service, at most for a while: without it, no try is accepted.
fn wait_for_tunnel(trial: &Trial<'_>) {
    let deadline = Instant::now() + SERVES_WITHIN;
    let service = trial.local[trial.victim];
    while Instant::now() < deadline {
        if trial
            .site
            .owners()
            .is_ok_and(|owners| owners[service] == Some(trial.victim))
        {
            return;
        }
        std::thread::sleep(TICK);
    }
}

fn diverged(trial: &mut Trial<'_>) -> Result<(), Failure> {
    trial.site.engines[1].wait_for(&trial.site.engines[0], &trial.site.world)?;
    trial
        .site
        .world
        .cut(Machine::Engine(0), Machine::Engine(1))?;
    for number in 0..LOST + trial.left() {
        let reply = trial.site.administer(
            trial.others()[0],
            "PATCH",
            "/accounts/demo/services/s0",
            &json!({ "burst": 1_000_000 + number }),
        )?;
        ensure(reply.status == 200 && reply.pending.is_empty(), || {
            "a change is not in use at all nodes".to_owned()
        })?;
    }
    let engines = trial.engines();
    trial.cut(&engines)?;
    trial.site.engines[0].kill();
    trial.site.engines[1].promote(&trial.site.world)?;
    trial.revoke(trial.left())?;
    trial.try_all_everywhere()?;
    trial.finish()?;
    trial.heal(&engines)?;
    trial.try_all(trial.victim)?;
    trial.finish()
}

fn failover_killed(trial: &mut Trial<'_>) -> Result<(), Failure> {
    trial.site.engines[1].wait_for(&trial.site.engines[0], &trial.site.world)?;
    trial.revoke(trial.left() / 2)?;
    trial.site.kill_node(trial.victim)?;
    trial.site.engines[0].kill();
    trial.site.engines[1].promote(&trial.site.world)?;
    trial.site.start_node(trial.victim)?;
    trial.revoke(trial.left())?;
    trial.try_all_everywhere()?;
    trial.finish()
}

fn two_primaries(trial: &mut Trial<'_>) -> Result<(), Failure> {
    trial.site.engines[1].wait_for(&trial.site.engines[0], &trial.site.world)?;
    let [earlier, later] = [Machine::Engine(0), Machine::Engine(1)];
    trial.site.world.cut(earlier, later)?;
    trial.site.world.cut(trial.machine(), later)?;
    trial
        .peers()
        .iter()
        .try_for_each(|peer| trial.site.world.cut(*peer, earlier))?;
    trial.site.engines[1].promote(&trial.site.world)?;
    trial.revoke(trial.left())?;
    trial.try_all_everywhere()?;
    trial.finish()?;
    trial.site.engines[0].kill();
    trial.site.world.heal(trial.machine(), later)?;
    trial.try_all(trial.victim)?;
    trial.finish()
}
