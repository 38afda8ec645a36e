//! Which agent gets a request (docs/redundancy.md).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::errors::{has_http2_backends, has_slots, memory_may_be_used_up};
use super::{Checked, each, violated};
use crate::scenario::{Affinity, Conduct, Fault, FaultKind, Method, Request, ResponseFault};
use crate::world::World;

/// Time within which a revocation takes effect (docs/agent.md).
const REVOKED_WITHIN: u64 = 1_000_000_000;
/// Longest time until a safe request on a silent agent goes elsewhere: a PING each second,
/// unanswered for 2 seconds; the wait for a slot of 1 second (docs/limits.md); and what paths and
/// workers take.
const MOVED_WITHIN: Duration = Duration::from_millis(3000 + 1000 + 1000);

/// A backend has no more requests at once than its agent has slots, as long as the agent has one
/// tunnel of the service. Counts requests that neither side broke off: their slots are in use at
/// least as long as the backend has them.
pub(super) fn backends_get_no_more_than_slots(world: &World) -> Checked {
    let scenario = &world.scenario;
    let changes_tunnels = scenario.faults.iter().any(|fault| {
        !matches!(
            fault.kind,
            FaultKind::CutCaller { .. }
                | FaultKind::DisableKey { .. }
                | FaultKind::ChangeRate { .. }
                | FaultKind::JumpClock { .. }
        )
    });
    if changes_tunnels {
        return Ok(());
    }
    // A request begins at +1 and ends at -1; ends come first.
    let mut changes: BTreeMap<(usize, usize), Vec<(u64, i32)>> = BTreeMap::new();
    world.ledger.find(|request, entry| {
        let seen = &entry.seen;
        // A backend that stalls behind the last byte has a request for longer than its agent.
        let is_whole = is_benign(request) && seen.is_complete;
        for attempt in entry.attempts.iter().filter(|_| is_whole) {
            if let Some(answered) = attempt.answered {
                let changes = changes.entry((attempt.agent, seen.service)).or_default();
                changes.extend([(attempt.at, 1), (answered, -1)]);
            }
        }
        None::<()>
    });
    for ((agent, service), mut changes) in changes {
        changes.sort_unstable();
        let slots = i64::from(scenario.agents[agent].slots);
        let mut at_once: i64 = 0;
        for (time, change) in changes {
            at_once += i64::from(change);
            if at_once > slots {
                let found = format!(
                    "{at_once} requests to service {service} of agent {agent} at {time}, of \
                     {slots} slots"
                );
                return violated("backends get no more requests than slots", found);
            }
        }
    }
    Ok(())
}

/// An agent that was revoked a second ago gets no requests.
pub(super) fn revoked_agents_get_nothing(world: &World) -> Checked {
    let happened = world.happened.borrow();
    let revocations: Vec<_> = happened
        .iter()
        .filter_map(|happened| match happened.fault {
            FaultKind::RevokeAgent { agent, .. } => Some((agent, happened.began, happened.ended)),
            _ => None,
        })
        .collect();
    each(world, "a revoked agent gets no requests", |_, entry| {
        let began = entry.seen.began?;
        entry.attempts.iter().find_map(|attempt| {
            let is_revoked = revocations.iter().any(|(agent, since, until)| {
                *agent == attempt.agent
                    && began > since + REVOKED_WITHIN
                    && until.is_none_or(|until| attempt.at < until)
            });
            is_revoked.then(|| format!("agent {} got it", attempt.agent))
        })
    })
}

/// The requests of a session to one service go to one agent while it is in order and has room.
pub(super) fn sessions_stay(world: &World) -> Checked {
    let scenario = &world.scenario;
    // An agent is overloaded above a quarter of its slots.
    let at_once: usize = scenario.callers.iter().map(|caller| caller.at_once).sum();
    let slots = scenario.agents.iter().map(|agent| agent.slots as usize);
    let has_room = slots.min().unwrap_or(0) >= 4 * at_once;
    let requests = || scenario.callers.iter().flat_map(|caller| &caller.requests);
    if !scenario.faults.is_empty() || !has_room || !requests().all(is_benign) {
        return Ok(());
    }
    let mut agents: BTreeMap<(usize, usize), BTreeSet<usize>> = BTreeMap::new();
    let can_be_switched = !has_http2_backends(world);
    world.ledger.find(|request, entry| {
        let seen = &entry.seen;
        // An upgrade moves to another agent if the backend does not support extended CONNECT (RFC
        // 8441).
        if request.method == Method::Upgrade && !can_be_switched {
            return None;
        }
        // A cookie comes with the first response.
        let has_session = match scenario.services[seen.service].affinity {
            Affinity::None => false,
            Affinity::Cookie => {
                let caller = scenario.callers.get(seen.caller);
                caller.is_some_and(|caller| caller.at_once == 1 && caller.pipelined <= 1)
            }
            Affinity::Header | Affinity::Client => true,
        };
        if has_session {
            let of_caller = agents.entry((seen.caller, seen.service)).or_default();
            of_caller.extend(entry.attempts.iter().map(|attempt| attempt.agent));
        }
        None::<()>
    });
    let scattered = agents.iter().find(|(_, agents)| agents.len() > 1);
    match scattered {
        None => Ok(()),
        Some(((caller, service), agents)) => violated(
            "sessions stay with their agent",
            format!("agents {agents:?} got requests of caller {caller} to service {service}"),
        ),
    }
}

fn is_benign(request: &Request) -> bool {
    request.conduct == Conduct::Patient
        && request.response.fault == ResponseFault::None
        && !request.response.is_early
}

/// While one agent is in order and has room, one fault of another agent fails no safe request
/// without a body, and none waits for longer than the detection of a silent agent takes.
pub(super) fn a_healthy_agent_suffices(world: &World) -> Checked {
    let scenario = &world.scenario;
    // A safe request is sent once more only.
    let [fault] = &scenario.faults[..] else {
        return Ok(());
    };
    let Some(faulty) = faulty_agent(fault) else {
        return Ok(());
    };
    if memory_may_be_used_up(world) {
        return Ok(());
    }
    let has_path = |service: usize| {
        let settings = &scenario.services[service];
        let mut agents = 0..scenario.agents.len();
        let has_healthy = agents.any(|agent| agent != faulty && scenario.serves(agent, service));
        let admits_all = settings.burst as usize >= scenario.requests();
        let has_room = has_slots(world, service) && all_are_benign(world, service);
        has_healthy && settings.retries && admits_all && has_room
    };
    let has_path: Vec<bool> = (0..scenario.services.len()).map(has_path).collect();
    each(world, "a healthy agent suffices", |request, entry| {
        let seen = &entry.seen;
        let is_safe = matches!(request.method, Method::Get | Method::Head);
        if !is_safe || request.response.interim > 0 || !has_path[seen.service] {
            return None;
        }
        if let Some(error) = &seen.own_error {
            return Some(format!("it failed with {error}"));
        }
        let is_pipelined = scenario.callers.get(seen.caller)?.pipelined > 1;
        let waited = Duration::from_nanos(seen.answered?.saturating_sub(seen.head_sent?));
        let most = request.response.delay * 2 + scenario.delay * 20 + MOVED_WITHIN;
        (waited > most && !is_pipelined).then(|| format!("it waited {waited:?}, of {most:?}"))
    })
}

fn all_are_benign(world: &World, service: usize) -> bool {
    let mut requests = world.scenario.requests_to(service);
    requests.all(is_benign)
}

/// The agent that a fault concerns; `None` if the fault concerns others.
fn faulty_agent(fault: &Fault) -> Option<usize> {
    match fault.kind {
        FaultKind::KillAgent { agent, .. }
        | FaultKind::FreezeAgent { agent, .. }
        | FaultKind::DrainAgent { agent, .. }
        | FaultKind::CutAgent { agent, .. } => Some(agent),
        _ => None,
    }
}
