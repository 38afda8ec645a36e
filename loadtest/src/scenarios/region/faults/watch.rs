//! Load on services at all nodes, with the result of each pair of node and service.

use std::time::{Duration, Instant};

use super::site::Site;
use super::world::Machine;
use crate::callers::{Callers, Failed, Load, Methods, Outcome, PER_CONNECTION};
use crate::client::Target;
use crate::failure::Failure;

/// Callers on the machine of a node, of one service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pair {
    pub(super) node: usize,
    pub(super) service: usize,
}

pub(super) struct Watch {
    callers: Vec<(Pair, Callers)>,
}

/// What the callers of a pair have seen.
pub(super) struct Seen {
    pub(super) pair: Pair,
    pub(super) outcome: Outcome,
}

/// All pairs of these nodes and services.
pub(super) fn pairs(nodes: &[usize], services: &[usize]) -> Vec<Pair> {
    nodes
        .iter()
        .flat_map(|node| {
            services.iter().map(|service| Pair {
                node: *node,
                service: *service,
            })
        })
        .collect()
}

impl Watch {
    /// Starts callers that send `rate` requests per second in all, as long as fewer than `callers`
    /// of a pair wait.
    pub(super) fn start(
        site: &Site,
        pairs: &[Pair],
        rate: u32,
        callers: u32,
    ) -> Result<Self, Failure> {
        Self::with(site, pairs, rate, callers, Ok)
    }

    /// Like [`Self::start`], with another target for each service.
    pub(super) fn with(
        site: &Site,
        pairs: &[Pair],
        rate: u32,
        callers: u32,
        target: impl Fn(Target) -> Result<Target, Failure>,
    ) -> Result<Self, Failure> {
        let rate = (rate / u32::try_from(pairs.len()).unwrap_or(u32::MAX)).max(1);
        let start = |pair: &Pair| {
            let targets = vec![target(site.target(pair.service)?)?];
            let load = Load {
                targets,
                callers,
                rate: Some(rate),
                methods: Methods::Get,
                per_connection: PER_CONNECTION,
            };
            Ok((
                *pair,
                site.world
                    .on(Machine::Node(pair.node), || Ok(Callers::send(&load)))?,
            ))
        };
        Ok(Self {
            callers: pairs.iter().map(start).collect::<Result<_, Failure>>()?,
        })
    }

    pub(super) fn stop(self) -> Result<Vec<Seen>, Failure> {
        self.callers.iter().for_each(|(_, callers)| callers.end());
        let seen = |(pair, callers): (Pair, Callers)| {
            Ok(Seen {
                pair,
                outcome: callers.stop()?,
            })
        };
        self.callers.into_iter().map(seen).collect()
    }
}

/// Requests in all.
pub(super) fn requests(seen: &[Seen]) -> usize {
    seen.iter()
        .map(|seen| seen.outcome.answered.len() + seen.outcome.failed.len())
        .sum()
}

pub(super) fn failures(seen: &[Seen]) -> impl Iterator<Item = (Pair, &Failed)> {
    seen.iter()
        .flat_map(|seen| seen.outcome.failed.iter().map(|failed| (seen.pair, failed)))
}

/// The longest time that a request took which ended after `since`, answered or failed.
pub(super) fn longest(seen: &[Seen], since: Instant) -> Duration {
    let answered = seen.iter().flat_map(|seen| &seen.outcome.answered);
    let answered = answered
        .filter(|(began, took)| *began + *took >= since)
        .map(|(_, took)| *took);
    let failed = failures(seen)
        .filter(|(_, failed)| failed.ended >= since)
        .map(|(_, failed)| failed.ended - failed.began);
    answered.chain(failed).max().unwrap_or_default()
}

/// Failures by their kind, such as `3 × 504 AGENT_UNAVAILABLE`.
pub(super) fn kinds<'a>(failed: impl Iterator<Item = &'a Failed>) -> String {
    let mut counts = std::collections::BTreeMap::<String, usize>::new();
    for failed in failed {
        *counts.entry(failed.what.to_string()).or_default() += 1;
    }
    let parts: Vec<String> = counts
        .iter()
        .map(|(what, count)| format!("{count} × {what}"))
        .collect();
    if parts.is_empty() {
        "none".to_owned()
    } else {
        parts.join(", ")
    }
}
