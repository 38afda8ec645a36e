//! The bucket of each service (docs/limits.md): one for all callers, exact over all workers,
//! processes and changes.

use gw_simulated_kernel::clock::Nanos;

use super::{Checked, Records, violated};
use crate::scenario::FaultKind;
use crate::world::World;

const LIMITED: &str = "GW_RATE_LIMIT_EXCEEDED";
const NANOS_OF_MINUTE: f64 = 60e9;
/// A request's share of rounding and of time that passes while it is charged.
const TOLERANCE: f64 = 0.01;
/// Most that a level is rounded, and ages on its way, from one process to the next
/// (docs/limits.md).
const ROUNDED: Nanos = 2_000_000;

/// A request, with times between which its token was taken.
struct Charge {
    id: u32,
    began: Nanos,
    /// When it had reached a backend; `None` if it may not have been charged.
    arrived: Option<Nanos>,
    ended: Nanos,
    is_limited: bool,
}

impl Charge {
    /// Time at which it was charged, at the latest.
    fn latest(&self) -> Nanos {
        self.arrived.unwrap_or(self.ended)
    }
}

/// A period admits at most the burst and the tokens that are refilled in it. A request is refused
/// only if as many were admitted. A retried request is charged once.
pub(super) fn bucket_is_exact(world: &World) -> Checked {
    for number in 0..world.services.len() {
        let charges = charges(world, number);
        let service = &world.scenario.services[number];
        let changes = world
            .scenario
            .faults
            .iter()
            .filter_map(|fault| match fault.kind {
                FaultKind::ChangeRate { service, burst } if service == number => Some(burst),
                _ => None,
            });
        let bursts: Vec<f64> = changes.chain([service.burst]).map(f64::from).collect();
        // Buckets are full after a crash (docs/limits.md).
        let crashes = world.scenario.faults.iter().filter(|fault| {
            matches!(
                fault.kind,
                FaultKind::PanicWorker { .. } | FaultKind::KillGateway { .. }
            )
        });
        // With several nodes, the service moves away and back, to full buckets: their levels are
        // lost here.
        let moves = world
            .scenario
            .faults
            .iter()
            .filter(|fault| matches!(fault.kind, FaultKind::LeaveNode { .. }));
        let each = if world.scenario.nodes > 1 { 3 } else { 1 };
        let fills = 1.0 + (each * (crashes.count() + moves.count())) as f64;
        let largest = bursts.iter().copied().fold(0.0, f64::max) * fills;
        let least = bursts.iter().copied().fold(f64::MAX, f64::min);
        let per_nano = f64::from(service.per_minute) / NANOS_OF_MINUTE;
        if let Some(found) = admits_too_many(&charges, largest, per_nano) {
            return violated("the bucket admits its burst and rate", found);
        }
        let handed_over = world
            .scenario
            .faults
            .iter()
            .filter(|fault| matches!(fault.kind, FaultKind::TakeOver));
        let rounded = handed_over.count() as f64 * ROUNDED as f64 * per_nano;
        if let Some(found) = refuses_too_early(&charges, least - rounded, per_nano) {
            return violated("the bucket refuses when it is empty", found);
        }
    }
    Ok(())
}

fn charges(world: &World, service: usize) -> Vec<Charge> {
    let records = Records::of(world);
    let mut charges = Vec::new();
    world.ledger.find(|request, entry| {
        let seen = &entry.seen;
        let code = records.sole(request.id).and_then(|record| record.code);
        if seen.service == service {
            charges.push(Charge {
                id: request.id,
                began: seen.began?,
                arrived: entry.attempts.first().map(|attempt| attempt.at),
                // A caller that leaves does not know when its request is charged.
                ended: seen
                    .ended
                    .filter(|_| seen.status.is_some())
                    .unwrap_or(Nanos::MAX),
                is_limited: code == Some(LIMITED),
            });
        }
        None::<()>
    });
    charges
}

fn admits_too_many(charges: &[Charge], burst: f64, per_nano: f64) -> Option<String> {
    let admitted: Vec<(Nanos, Nanos)> = charges
        .iter()
        .filter_map(|charge| Some((charge.began, charge.arrived?)))
        .collect();
    if (admitted.len() as f64) <= burst {
        return None;
    }
    for (from, _) in &admitted {
        let mut within: Vec<Nanos> = admitted
            .iter()
            .filter(|(began, _)| began >= from)
            .map(|(_, arrived)| *arrived)
            .collect();
        within.sort_unstable();
        for (index, to) in within.iter().enumerate() {
            let most = burst + (to - from) as f64 * per_nano + TOLERANCE;
            if (index + 1) as f64 > most {
                return Some(format!("{} requests from {from} to {to}", index + 1));
            }
        }
    }
    None
}

fn refuses_too_early(charges: &[Charge], burst: f64, per_nano: f64) -> Option<String> {
    let may_be_charged = || charges.iter().filter(|charge| !charge.is_limited);
    for limited in charges.iter().filter(|charge| charge.is_limited) {
        // The bucket was full last when a request was charged. With a later time, up to the next at
        // which a request must have been charged, as many requests count, and less is refilled.
        let mut times = may_be_charged().map(|first| first.latest().min(limited.ended));
        let is_explained = times.any(|since| {
            let within =
                |charge: &&Charge| charge.began <= limited.ended && charge.latest() >= since;
            let charged = may_be_charged().filter(within).count() as f64;
            let refilled = limited.began.saturating_sub(since) as f64 * per_nano;
            charged > burst - 1.0 + refilled - TOLERANCE
        });
        if !is_explained {
            return Some(format!("request {} was refused", limited.id));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Nanos = 1_000_000_000;
    /// 60 requests a minute.
    const ONE_A_SECOND: f64 = 1e-9;

    fn charge(id: u32, at: Nanos, is_limited: bool) -> Charge {
        Charge {
            id,
            began: at,
            arrived: (!is_limited).then_some(at),
            ended: at,
            is_limited,
        }
    }

    #[test]
    fn a_burst_and_what_is_refilled_are_admitted() {
        let mut charges: Vec<Charge> = (0..3).map(|id| charge(id, 0, false)).collect();
        assert_eq!(admits_too_many(&charges, 3.0, ONE_A_SECOND), None);
        charges.push(charge(3, SECOND, false));
        assert_eq!(admits_too_many(&charges, 3.0, ONE_A_SECOND), None);
        charges.push(charge(4, SECOND, false));
        assert!(admits_too_many(&charges, 3.0, ONE_A_SECOND).is_some());
    }

    #[test]
    fn only_an_empty_bucket_refuses() {
        let mut charges: Vec<Charge> = (0..3).map(|id| charge(id, 0, false)).collect();
        charges.push(charge(3, SECOND / 2, true));
        assert_eq!(refuses_too_early(&charges, 3.0, ONE_A_SECOND), None);
        charges.push(charge(4, 2 * SECOND, true));
        assert!(refuses_too_early(&charges, 3.0, ONE_A_SECOND).is_some());
    }
}
