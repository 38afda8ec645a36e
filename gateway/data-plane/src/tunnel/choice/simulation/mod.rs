//! Simulations of the choice with the health of tunnels and the budget for attempts, on virtual
//! time.

mod history;
mod load;

use gw_region::random::Random;

use super::*;
use crate::tunnel::attempt_budget::{AttemptBudget, FailedAttempts, Transmission};
use crate::tunnel::health::{BegunAttempt, TunnelFailure, TunnelHealth};

/// An agent with its tunnel.
struct SimulatedAgent {
    health: TunnelHealth,
    is_standby: bool,
    in_flight: usize,
    slots: usize,
    key: u64,
}

impl Candidate for SimulatedAgent {
    fn tier(&self, is_repeatable: bool, now: Instant) -> HealthTier {
        self.health.tier(is_repeatable, now)
    }

    fn is_standby(&self) -> bool {
        self.is_standby
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn slots(&self) -> usize {
        self.slots
    }

    fn latency(&self, now: Instant) -> Duration {
        self.health.latency(now)
    }

    fn key(&self) -> u64 {
        self.key
    }
}

impl SimulatedAgent {
    fn new(slots: usize, key: u64, now: Instant) -> Self {
        Self {
            health: TunnelHealth::new(None, now),
            is_standby: false,
            in_flight: 0,
            slots,
            key,
        }
    }

    fn end(
        &mut self,
        attempt: BegunAttempt,
        failure: Option<TunnelFailure>,
        took: Duration,
        now: Instant,
        random: &mut Random,
    ) {
        self.in_flight -= 1;
        match failure {
            None => self.health.succeeded(attempt, took, now),
            Some(failure) => self
                .health
                .failed(attempt, failure, took, now, &mut || random.unit()),
        }
    }
}

/// A request that goes from agent to agent until one answers.
struct Request {
    wanted: Wanted,
    failed: FailedAttempts,
    tried: u64,
}

impl Request {
    fn new(session: Option<u64>, is_safe: bool) -> Self {
        let failed = FailedAttempts::new(is_safe, true);
        let wanted = Wanted {
            session,
            is_first: true,
            is_repeatable: failed.is_repeatable(),
        };
        Self {
            wanted,
            failed,
            tried: 0,
        }
    }

    fn choose(&mut self, agents: &[SimulatedAgent], now: Instant, random: &mut Random) -> Choice {
        let tried = self.tried;
        choose(
            agents,
            |agent| tried & 1 << agent.key == 0,
            self.wanted,
            now,
            &mut || random.unit(),
        )
    }

    /// Whether the request goes to another agent after this failure.
    fn goes_on(
        &mut self,
        failure: TunnelFailure,
        budget: &mut AttemptBudget,
        now: Instant,
    ) -> bool {
        self.wanted.is_first = false;
        let transmission = Transmission::of(failure != TunnelFailure::Broken, false);
        self.failed.may_go_on_after(transmission) && budget.try_take(now)
    }
}
