//! Faults of a scenario, drawn by its seed.

use std::time::Duration;

use fastrand::Rng;

use super::{Agent, Fault, FaultKind, Service};

/// A fault of any kind, but for those of several nodes.
pub(super) fn fault(
    rng: &mut Rng,
    workers: usize,
    services: &[Service],
    agents: &[Agent],
    callers: usize,
) -> FaultKind {
    let agent = rng.usize(..agents.len());
    let service = rng.usize(..services.len());
    let short = Duration::from_millis(rng.u64(1..2000));
    let long = Duration::from_millis(rng.u64(1..40_000));
    // Some paths are mended only after all have given up.
    let lasts = match rng.u8(..8) {
        0..4 => short,
        4..7 => long,
        _ => Duration::from_secs(200),
    };
    match rng.u8(..16) {
        0 => FaultKind::KillAgent {
            agent,
            back_after: short,
        },
        1 => FaultKind::FreezeAgent { agent, lasts },
        2 => FaultKind::CopyAgent { agent, lasts },
        3 => FaultKind::DrainAgent {
            agent,
            back_after: short,
        },
        4 => FaultKind::CutAgent { agent, lasts },
        5 => FaultKind::CutBackend { agent, lasts },
        6 => FaultKind::KillBackend {
            agent,
            back_after: short,
        },
        7 => FaultKind::CutCaller {
            caller: rng.usize(..callers),
            lasts,
        },
        8 => FaultKind::FreezeWorker {
            worker: rng.usize(..workers),
            lasts: short,
        },
        9 => FaultKind::DisableKey { service, lasts },
        10 => FaultKind::RevokeAgent { agent, lasts },
        11 => FaultKind::ChangeRate {
            service,
            burst: rng.u32(1..100),
        },
        12 => FaultKind::TakeOver,
        13 => FaultKind::PanicWorker {
            worker: rng.usize(..workers),
        },
        14 => FaultKind::KillGateway { back_after: short },
        _ => FaultKind::JumpClock {
            by: long,
            forward: rng.bool(),
        },
    }
}

/// A cut between two nodes, or a move of services, perhaps while an agent is away, so that requests
/// wait.
pub(super) fn fault_of_nodes(rng: &mut Rng, nodes: usize, agents: &[Agent]) -> Vec<Fault> {
    let node = rng.usize(..nodes);
    let millis = |rng: &mut Rng, most| Duration::from_millis(rng.u64(1..most));
    let at = millis(rng, 4000);
    if rng.bool() {
        let kind = FaultKind::CutNodes {
            one: node,
            other: (node + rng.usize(1..nodes)) % nodes,
            lasts: millis(rng, 40_000),
        };
        return vec![Fault { at, kind }];
    }
    let back_after = millis(rng, 6000);
    let mut faults = vec![Fault {
        at,
        kind: FaultKind::LeaveNode { node, back_after },
    }];
    if rng.bool() {
        faults.push(Fault {
            at: at.saturating_sub(millis(rng, 1000)),
            kind: FaultKind::KillAgent {
                agent: rng.usize(..agents.len()),
                back_after: millis(rng, 3000),
            },
        });
    }
    faults
}

/// A process that is replaced while an agent is away, so that requests wait, and perhaps in the
/// same moment a change of the records or a worker that does not turn.
pub(super) fn replacement(
    rng: &mut Rng,
    workers: usize,
    services: &[Service],
    agents: &[Agent],
) -> Vec<Fault> {
    let agent = rng.usize(..agents.len());
    let millis = |rng: &mut Rng, most| Duration::from_millis(rng.u64(1..most));
    let away = millis(rng, 3000);
    let back_after = millis(rng, 3000);
    let kind = match rng.u8(..4) {
        0 => FaultKind::DrainAgent { agent, back_after },
        1 => FaultKind::CutAgent {
            agent,
            lasts: back_after,
        },
        _ => FaultKind::KillAgent { agent, back_after },
    };
    let replaced = away + millis(rng, 1500);
    let mut faults = vec![
        Fault { at: away, kind },
        Fault {
            at: replaced,
            kind: FaultKind::TakeOver,
        },
    ];
    if rng.bool() {
        faults.push(Fault {
            at: away + millis(rng, 2000),
            kind: FaultKind::DisableKey {
                service: rng.usize(..services.len()),
                lasts: millis(rng, 2000),
            },
        });
    }
    if rng.bool() {
        faults.push(Fault {
            at: away + millis(rng, 2000),
            kind: FaultKind::FreezeWorker {
                worker: rng.usize(..workers),
                lasts: millis(rng, 1000),
            },
        });
    }
    faults
}
