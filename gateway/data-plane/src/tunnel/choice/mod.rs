//! Choice of the tunnel for a request, of a service with several tunnels. No I/O, no clock, no
//! randomness of its own.
//!
//! Candidates form classes: by tier of their health, then those that are not standby before standby
//! ones. The best class with a free slot takes the request; in it the less loaded of two random
//! candidates ("the power of two choices", Mitzenmacher, 2001), or the candidate of the session. A
//! standby with a free slot is better than a refusal. Impaired candidates are used only if there is
//! no other one at all: they are no spare room of full ones, because requests that fail there would
//! be tried on the full ones again.

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use gw_region::owners::ownership;

use super::health::HealthTier;

/// Least latency in the comparison of loads. Below it only the requests in flight decide.
const LATENCY_MIN: Duration = Duration::from_micros(100);

/// A tunnel that may take a request.
pub(crate) trait Candidate {
    /// HealthTier for a request, which `is_repeatable` if it may go to another agent even after a
    /// backend may have received it.
    fn tier(&self, is_repeatable: bool, now: Instant) -> HealthTier;
    /// Whether the agent gets requests only while no other one can take them.
    fn is_standby(&self) -> bool;
    fn in_flight(&self) -> usize;
    /// Requests that the agent serves at once.
    fn slots(&self) -> usize;
    fn latency(&self, now: Instant) -> Duration;
    /// Hash of the agent's id, the same for each of its tunnels.
    fn key(&self) -> u64;
}

/// What the choice considers of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    /// Hash of the session, if the service has an affinity.
    pub(crate) session: Option<u64>,
    /// Whether this is the first attempt. Only a first attempt probes a tunnel before others are
    /// used, so that a probe that fails can go elsewhere.
    pub(crate) is_first: bool,
    pub(crate) is_repeatable: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Index of the chosen candidate.
    Tunnel(usize),
    /// No candidate that could take the request has a free slot.
    Full,
    NoCandidate,
}

/// Classes of candidates, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    /// Due for a probe, which goes before everything else: the breaker makes such requests rare.
    FirstProbe,
    Ready,
    ReadyStandby,
    Probe,
    ProbeStandby,
    Impaired,
    ImpairedStandby,
}

/// Candidates of one class.
#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    members: usize,
    with_free_slot: usize,
    in_flight: usize,
}

/// Chooses one of the candidates that `may_take` the request: not draining, and of an agent that
/// has not been tried. `random` returns a number in [0, 1).
pub(crate) fn choose<C: Candidate>(
    candidates: &[C],
    may_take: impl Fn(&C) -> bool,
    wanted: Wanted,
    now: Instant,
    random: &mut dyn FnMut() -> f64,
) -> Choice {
    let class_of = |candidate: &C| may_take(candidate).then(|| wanted.class(candidate, now));
    let mut tallies = [Tally::default(); Class::ALL.len()];
    for candidate in candidates {
        if let Some(class) = class_of(candidate) {
            let tally = &mut tallies[class as usize];
            tally.members += 1;
            tally.with_free_slot += usize::from(has_free_slot(candidate));
            tally.in_flight += candidate.in_flight();
        }
    }
    let mut is_any = false;
    for (class, tally) in Class::ALL.into_iter().zip(tallies) {
        if class == Class::Impaired && is_any {
            break;
        }
        if tally.with_free_slot > 0 {
            let members = candidates
                .iter()
                .enumerate()
                .filter(|(_, candidate)| class_of(candidate) == Some(class));
            let index = match wanted.session {
                Some(session) => of_session(members, tally, session),
                None => less_loaded_of_two(members, tally, now, random),
            };
            return index.map_or(Choice::NoCandidate, Choice::Tunnel);
        }
        is_any |= tally.members > 0;
    }
    if is_any {
        Choice::Full
    } else {
        Choice::NoCandidate
    }
}

/// The less loaded of two random members with free slots.
fn less_loaded_of_two<'a, C: Candidate + 'a>(
    members: impl Iterator<Item = (usize, &'a C)>,
    tally: Tally,
    now: Instant,
    random: &mut dyn FnMut() -> f64,
) -> Option<usize> {
    let free = members.filter(|(_, candidate)| has_free_slot(*candidate));
    let count = tally.with_free_slot;
    let first = below(count, random);
    let second = if count > 1 {
        (first + 1 + below(count - 1, random)) % count
    } else {
        first
    };
    let mut two = free
        .enumerate()
        .filter(|(nth, _)| *nth == first || *nth == second)
        .map(|(_, member)| member);
    let one = two.next()?;
    let other = two.next();
    let load = |candidate: &C| {
        candidate.latency(now).max(LATENCY_MIN).as_secs_f64() * (candidate.in_flight() + 1) as f64
    };
    let Some(other) = other else {
        return Some(one.0);
    };
    let load_of_one = load(one.1);
    let load_of_other = load(other.1);
    // Candidates without a difference get equal shares.
    let takes_one = load_of_one < load_of_other || (load_of_one == load_of_other && first < second);
    Some(if takes_one { one.0 } else { other.0 })
}

/// The first member with a free slot in the order of the session that is not overloaded: rendezvous
/// hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018). The loss of an agent
/// moves only its own sessions.
fn of_session<'a, C: Candidate + 'a>(
    members: impl Iterator<Item = (usize, &'a C)>,
    tally: Tally,
    session: u64,
) -> Option<usize> {
    // 1.25 times the mean load with this request, rounded up.
    let bound = (5 * (tally.in_flight + 1)).div_ceil(4 * tally.members);
    // An agent with a quarter of its slots in use is not overloaded, however idle the others are: a
    // session with two requests at once stays where it is.
    let is_overloaded = |candidate: &C| candidate.in_flight() >= bound.max(candidate.slots() / 4);
    members
        .filter(|(_, candidate)| has_free_slot(*candidate))
        .max_by_key(|(_, candidate)| {
            (
                !is_overloaded(candidate),
                ownership::weight(session, candidate.key()),
            )
        })
        .map(|(index, _)| index)
}

impl Wanted {
    fn class<C: Candidate>(&self, candidate: &C, now: Instant) -> Class {
        match (
            candidate.tier(self.is_repeatable, now),
            candidate.is_standby(),
        ) {
            // A session probes its own agent only.
            (HealthTier::Probe, false) if self.is_first && self.session.is_some() => Class::Ready,
            (HealthTier::Probe, false) if self.is_first => Class::FirstProbe,
            (HealthTier::Ready, false) => Class::Ready,
            (HealthTier::Ready, true) => Class::ReadyStandby,
            (HealthTier::Probe, false) => Class::Probe,
            (HealthTier::Probe, true) => Class::ProbeStandby,
            (HealthTier::Impaired, false) => Class::Impaired,
            (HealthTier::Impaired, true) => Class::ImpairedStandby,
        }
    }
}

impl Class {
    const ALL: [Self; 7] = [
        Self::FirstProbe,
        Self::Ready,
        Self::ReadyStandby,
        Self::Probe,
        Self::ProbeStandby,
        Self::Impaired,
        Self::ImpairedStandby,
    ];
}

fn has_free_slot<C: Candidate>(candidate: &C) -> bool {
    candidate.in_flight() < candidate.slots()
}

/// A random number below `end`, which is at least 1.
fn below(end: usize, random: &mut dyn FnMut() -> f64) -> usize {
    ((random() * end as f64) as usize).min(end - 1)
}
