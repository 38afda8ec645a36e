//! The gateway's own errors.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use super::{Checked, Records, each};
use crate::scenario::{Conduct, FaultKind, Framing, Method, Request, ResponseFault};
use crate::world::World;
use crate::world::ledger::Entry;

/// The page that promises codes and statuses.
const PAGE: &str = include_str!("../../../../docs/errors.md");

/// Status and `X-Gw-Status` of each code.
static TABLE: LazyLock<BTreeMap<&str, (u16, &str)>> = LazyLock::new(|| {
    let sections = PAGE.split("\n## ").skip(1);
    sections
        .filter_map(|section| {
            let (code, text) = section.split_once("\n\nStatus ")?;
            let (status, text) = text.split_once(", `X-Gw-Status: ")?;
            let (gw_status, _) = text.split_once('`')?;
            Some((code, (status.parse().ok()?, gw_status)))
        })
        .collect()
});

/// An error has a code of the table, with its status and its `X-Gw-Status` (docs/errors.md). The
/// response to HEAD has no body, and so no code.
pub(super) fn errors_are_of_the_table(world: &World) -> Checked {
    each(
        world,
        "an error is one of the table",
        |request, Entry { seen, .. }| {
            let found = (seen.status?, seen.own_error.as_deref()?);
            let is_known = match seen.code.as_deref() {
                Some(code) => TABLE.get(code).is_some_and(|known| *known == found),
                None if request.method == Method::Head || !seen.is_complete => {
                    TABLE.values().any(|known| *known == found)
                }
                None => false,
            };
            (!is_known).then(|| format!("{found:?} with code {:?}", seen.code))
        },
    )
}

/// An error occurs only if something in the scenario can cause it: each page section names its
/// causes (docs/errors.md).
pub(super) fn errors_have_causes(world: &World) -> Checked {
    let records = Records::of(world);
    each(world, "an error has a cause", |request, entry| {
        let record = records.sole(request.id)?;
        let code = record.code?;
        (!has_cause(world, request, entry, code)).then(|| format!("nothing causes {code}"))
    })
}

fn has_cause(world: &World, request: &Request, entry: &Entry, code: &str) -> bool {
    let scenario = &world.scenario;
    let service = entry.seen.service;
    let mut faults = scenario.faults.iter().map(|fault| fault.kind);
    match code {
        // The model of the bucket decides.
        "GW_RATE_LIMIT_EXCEEDED" => true,
        "GW_SERVICE_KEY_INVALID" => faults.any(
            |fault| matches!(fault, FaultKind::DisableKey { service: of, .. } if of == service),
        ),
        "AGENT_UNAVAILABLE" | "GW_RELAY_ERROR" => faults.any(ends_tunnels),
        // The link to another node was lost, or that of a process that was replaced to the one that
        // has replaced it.
        "GW_NODE_UNAVAILABLE" => {
            let mut others = scenario.faults.iter().map(|fault| fault.kind);
            let is_replaced = others.any(|fault| matches!(fault, FaultKind::TakeOver));
            (scenario.nodes > 1 || is_replaced) && faults.any(ends_links)
        }
        "GW_OVERLOADED" => faults.any(ends_workers) || memory_may_be_used_up(world),
        "GW_AGENT_CONCURRENCY_LIMIT" => !has_slots(world, service) || faults.any(|_| true),
        "GW_BACKEND_UNREACHABLE" => faults.any(ends_backends),
        "GW_BACKEND_RESET" => {
            faults.any(|fault| ends_backends(fault) || ends_tunnels(fault))
                || request.response.is_early
                || others_close_connections(world, service)
        }
        "GW_BACKEND_INVALID_RESPONSE" => {
            // Backends of the world take no extended CONNECT.
            request.response.fault == ResponseFault::Garbage
                || others_send_too_much(world)
                || (request.method == Method::Upgrade && has_http2_backends(world))
        }
        _ => false,
    }
}

pub(super) fn has_http2_backends(world: &World) -> bool {
    let agents = &world.scenario.agents;
    agents.iter().any(|agent| agent.has_http2_backends)
}

fn ends_links(fault: FaultKind) -> bool {
    matches!(
        fault,
        FaultKind::PanicWorker { .. } | FaultKind::KillGateway { .. } | FaultKind::CutNodes { .. }
    )
}

fn ends_workers(fault: FaultKind) -> bool {
    matches!(
        fault,
        FaultKind::FreezeWorker { .. }
            | FaultKind::PanicWorker { .. }
            | FaultKind::KillGateway { .. }
            | FaultKind::TakeOver
    )
}

fn ends_tunnels(fault: FaultKind) -> bool {
    let is_of_agent = matches!(
        fault,
        FaultKind::KillAgent { .. }
            | FaultKind::FreezeAgent { .. }
            | FaultKind::CopyAgent { .. }
            | FaultKind::DrainAgent { .. }
            | FaultKind::CutAgent { .. }
            | FaultKind::RevokeAgent { .. }
    );
    is_of_agent || ends_workers(fault) || ends_links(fault)
}

fn ends_backends(fault: FaultKind) -> bool {
    matches!(
        fault,
        FaultKind::KillBackend { .. } | FaultKind::CutBackend { .. }
    )
}

/// Connections that the backend closes may be those of this request: a kept one closes as the
/// request is sent.
fn others_close_connections(world: &World, service: usize) -> bool {
    let mut requests = world.scenario.requests_to(service);
    requests.any(|request| {
        let response = &request.response;
        response.is_early
            || response.framing == Framing::Close
            || !matches!(
                response.fault,
                ResponseFault::None | ResponseFault::Stalls(_)
            )
    })
}

/// Bytes behind a response can arrive after the next request was sent on the connection, and are
/// then read as its response.
fn others_send_too_much(world: &World) -> bool {
    let mut requests = world.scenario.callers.iter().flat_map(|one| &one.requests);
    requests.any(|request| request.response.fault == ResponseFault::TooLong)
}

/// Whether each agent has a slot for every request that can be in flight. A request whose caller
/// left can still hold one.
pub(super) fn has_slots(world: &World, service: usize) -> bool {
    let scenario = &world.scenario;
    let callers = scenario.callers.iter();
    let callers = callers.filter(|caller| caller.service == service);
    let at_once: usize = callers.map(|caller| caller.at_once).sum();
    let account = scenario.services[service].account;
    let agents = scenario
        .agents
        .iter()
        .filter(|agent| agent.account == account);
    let slots = agents.map(|agent| agent.slots as usize);
    let mut requests = scenario.requests_to(service);
    requests.all(|request| request.conduct == Conduct::Patient && !request.response.is_early)
        && slots.min().unwrap_or(0) >= at_once
}

/// Memory of the account, which may hold half of it (docs/limits.md): at least 69 KiB of each
/// request, 16 KiB more with a body, and what its bodies may hold.
pub(super) fn memory_may_be_used_up(world: &World) -> bool {
    const REQUEST: usize = (69 + 16 + 4 + 64) * 1024;
    let scenario = &world.scenario;
    let at_once: usize = scenario.callers.iter().map(|caller| caller.at_once).sum();
    let each = (16 << 20) / scenario.workers;
    at_once * REQUEST > each / 4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_read_from_its_page() {
        assert_eq!(TABLE.get("GW_OVERLOADED"), Some(&(503, "Overloaded")));
        assert_eq!(
            TABLE.get("AGENT_UNAVAILABLE"),
            Some(&(504, "AgentUnavailable"))
        );
        assert!(TABLE.len() > 30);
    }
}
