//! Probes of nodes without a sign of life: which sessions are probed, and which of them are lost,
//! so that the workers end their connections.
//!
//! A lost machine sends no packets, and TCP notices that after [`TCP_DEAD_AFTER`] only. So a
//! session whose beat has not changed for [`SUSPECT_AFTER`] is probed with a new connection. When
//! it is declared dead and the probe had no answer, its connections end. A node that answers has
//! only lost PostgreSQL: its requests finish, and it is probed for [`WATCHED`] more, in case that
//! its machine follows.
//!
//! # Load
//!
//! Each node probes each such session by one connection at a time, [`PROBES`](limits::PROBES)
//! sessions at once. A lost machine gets a SYN a second from each node: 1,023 a second in a region
//! of 1,024. A node that answers does one handshake a second with each of up to 100 nodes. In a
//! larger region the time between two probes grows with the number of nodes, so that there are 100
//! handshakes a second, but for the first second, in which each node begins.
//!
//! [`TCP_DEAD_AFTER`]: gw_shared::tunnel::heartbeat::TCP_DEAD_AFTER
//! [`SUSPECT_AFTER`]: gw_region::timing::SUSPECT_AFTER

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

use crate::limits;
use bytes::Bytes;
use gw_base::process::background::Tasks;
use gw_interface::workers::LostNode;
use gw_region::{Member, Membership, NodeSlot, NodeState, Roster, is_rejoin};
use http::Request;
use tokio::time::{sleep, timeout};

use super::inputs::RegionInputs;
use crate::cluster::{NodeCallError, NodeClient};
use crate::control::Control;

/// Time limit of a probe.
const WITHIN: Duration = Duration::from_secs(2);
/// A probe that ends this much after its time proves nothing: this process did not run.
const LATE: Duration = Duration::from_millis(500);
/// Least time between the beginnings of two probes of a session.
const EVERY: Duration = Duration::from_secs(1);
/// Time between them for each node of the region, if the session answers.
const EVERY_PER_NODE: Duration = Duration::from_millis(10);
/// Time for which a session is probed after it was declared dead, or another process took its slot.
const WATCHED: Duration = Duration::from_secs(30);
/// Time between two looks at the table of nodes. The membership also looks then whether a node is
/// dead.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Pause after an attempt without a route.
const ROUTE_AGAIN: Duration = Duration::from_millis(200);

const _: () = {
    let known = gw_region::timing::SUSPECT_AFTER.as_millis() + WITHIN.as_millis();
    assert!(
        known <= gw_region::timing::DEAD_AFTER.as_millis(),
        "a lost machine has a verdict when it is declared dead"
    );
};

/// What a probe has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProbeVerdict {
    /// The process answers, whatever it says.
    Answers,
    /// No answer, or no such process at its address: a process that is dead by the table of nodes
    /// is lost.
    Silent,
}

/// The sessions that are probed.
#[derive(Default)]
pub(super) struct Probes {
    watched: BTreeMap<u128, Watched>,
    /// The process in each slot at the last look.
    seen: BTreeMap<NodeSlot, (Member, NodeState)>,
    looked: Option<Instant>,
    nodes: u32,
}

struct Watched {
    member: Member,
    reason: ProbeReason,
    /// Beginning of the next probe.
    due: Instant,
    /// Beginning of the probe under way.
    began: Option<Instant>,
    verdict: Option<ProbeVerdict>,
    /// The workers know the last verdict.
    is_told: bool,
    is_known_lost: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProbeReason {
    /// No sign of life, but not declared dead.
    Suspect,
    /// Declared dead.
    Dead { since: Instant },
    /// Another process has the slot.
    Replaced { since: Instant },
    /// Not probed any more. The probe under way has yet to end.
    Released,
}

impl Probes {
    /// Looks at the table of nodes, begins the probes that are due and tells the workers of lost
    /// nodes. Returns when to call it again.
    pub(super) fn run(
        &mut self,
        tasks: &Tasks,
        machine: &Membership,
        control: &Control,
        inputs: &RegionInputs,
    ) -> Option<Instant> {
        let now = Instant::now();
        if self
            .looked
            .is_none_or(|at| now.saturating_duration_since(at) >= LOOK_EVERY)
        {
            let suspects = machine.suspects(now);
            self.look(now, machine.roster(), machine.slot(), &suspects);
        }
        for to in self.begin(now) {
            let client = control.node_client().clone();
            let inputs = inputs.clone();
            tasks.spawn_until_stopped("a probe of another node", async move {
                let verdict = probe(&client, &to).await;
                inputs.probed(to.session, verdict);
            });
        }
        for (lost, is_first) in self.lost(now) {
            if is_first {
                let node = lost.slot.get();
                tracing::warn!(
                    node,
                    "another node is dead and does not answer: its connections with this node end"
                );
            }
            control.end_connections(lost);
        }
        self.next_deadline()
    }

    /// Takes note of the rows, and of those without a sign of life. `here` is the slot of this
    /// node.
    fn look(&mut self, now: Instant, roster: &Roster, here: Option<NodeSlot>, suspects: &[Member]) {
        self.looked = Some(now);
        self.nodes = u32::try_from(roster.rows.len()).unwrap_or(u32::MAX);
        for (slot, (member, state)) in std::mem::take(&mut self.seen) {
            // A process that has left has finished its requests, or is about to.
            let Some(row) = roster.slot(slot).filter(|_| state != NodeState::Left) else {
                continue;
            };
            if row.session == member.session {
                if row.state == NodeState::Dead && state != NodeState::Dead {
                    self.watch(now, &member, ProbeReason::Dead { since: now });
                }
            } else if is_rejoin(member.session, row.session) {
                self.release(member.session);
            } else {
                self.watch(now, &member, ProbeReason::Replaced { since: now });
            }
        }
        let others = roster.rows.iter().filter(|row| Some(row.slot) != here);
        self.seen = others
            .map(|row| (row.slot, (row.member(), row.state)))
            .collect();
        for watched in self.watched.values_mut() {
            let is_suspect = suspects
                .iter()
                .any(|suspect| suspect.session == watched.member.session);
            watched.reason = match watched.reason {
                ProbeReason::Suspect if !is_suspect => ProbeReason::Released,
                ProbeReason::Dead { since } | ProbeReason::Replaced { since }
                    if now.saturating_duration_since(since) >= WATCHED =>
                {
                    ProbeReason::Released
                }
                reason => reason,
            };
        }
        suspects
            .iter()
            .for_each(|suspect| self.watch(now, suspect, ProbeReason::Suspect));
        self.watched.retain(|_, watched| {
            watched.reason != ProbeReason::Released || watched.began.is_some()
        });
    }

    fn watch(&mut self, now: Instant, member: &Member, reason: ProbeReason) {
        let fresh = || Watched {
            member: member.clone(),
            reason,
            due: now,
            began: None,
            verdict: None,
            is_told: false,
            is_known_lost: false,
        };
        let watched = self.watched.entry(member.session).or_insert_with(fresh);
        watched.reason = reason;
    }

    fn release(&mut self, session: u128) {
        if let Some(watched) = self.watched.get_mut(&session) {
            watched.reason = ProbeReason::Released;
        }
    }

    /// The members to probe now. [`Self::ended`] follows for each.
    fn begin(&mut self, now: Instant) -> Vec<Member> {
        let under_way = self
            .watched
            .values()
            .filter(|watched| watched.began.is_some())
            .count();
        let is_due = |watched: &&mut Watched| {
            watched.reason != ProbeReason::Released && watched.began.is_none() && now >= watched.due
        };
        let due = self
            .watched
            .values_mut()
            .filter(is_due)
            .take(limits::PROBES.saturating_sub(under_way));
        let begun = due.map(|watched| {
            watched.began = Some(now);
            watched.member.clone()
        });
        begun.collect()
    }

    /// The probe of this session has ended; without a verdict if this node could not make it.
    pub(super) fn ended(&mut self, now: Instant, session: u128, verdict: Option<ProbeVerdict>) {
        let Some(watched) = self.watched.get_mut(&session) else {
            return;
        };
        let Some(began) = watched.began.take() else {
            return;
        };
        // This thread did not run for a while, and may have missed the answer.
        let is_late = now.saturating_duration_since(began) > WITHIN + LATE;
        let verdict = verdict.filter(|verdict| *verdict == ProbeVerdict::Answers || !is_late);
        let pause = match verdict {
            Some(ProbeVerdict::Answers) => EVERY.max(EVERY_PER_NODE * self.nodes),
            Some(ProbeVerdict::Silent) | None => EVERY,
        };
        watched.due = began + pause;
        watched.verdict = verdict.or(watched.verdict);
        watched.is_told &= verdict != Some(ProbeVerdict::Silent);
    }

    /// Processes that are over and silent, again after each probe without an answer: a connection
    /// to them may have been opened meanwhile. The second value tells whether it is the first time.
    fn lost(&mut self, now: Instant) -> Vec<(LostNode, bool)> {
        let mut lost = Vec::new();
        for watched in self.watched.values_mut() {
            let until = match watched.reason {
                ProbeReason::Dead { .. } => now,
                ProbeReason::Replaced { since } => since,
                ProbeReason::Suspect | ProbeReason::Released => continue,
            };
            if watched.verdict == Some(ProbeVerdict::Silent) && !watched.is_told {
                watched.is_told = true;
                let is_first = !std::mem::replace(&mut watched.is_known_lost, true);
                let Member { slot, session, .. } = watched.member;
                lost.push((
                    LostNode {
                        slot,
                        session,
                        until,
                    },
                    is_first,
                ));
            }
        }
        lost
    }

    fn next_deadline(&self) -> Option<Instant> {
        let under_way = self
            .watched
            .values()
            .filter(|watched| watched.began.is_some())
            .count();
        let is_waiting = |watched: &&Watched| {
            let is_over = watched.reason == ProbeReason::Released;
            !is_over && watched.began.is_none() && under_way < limits::PROBES
        };
        let waiting = self
            .watched
            .values()
            .filter(is_waiting)
            .map(|watched| watched.due);
        waiting.chain(self.looked.map(|at| at + LOOK_EVERY)).min()
    }
}

/// Asks a process for an answer, on a new connection. `None` if this node cannot ask.
async fn probe(client: &NodeClient, to: &Member) -> Option<ProbeVerdict> {
    let answer = async {
        loop {
            let Ok(request) = Request::get("/v1/alive").body(Bytes::new()) else {
                return None;
            };
            match client.send_on_new_connection(to, request, WITHIN).await {
                // A route can come back: it is an answer only when the time is up.
                Err(NodeCallError::Io(error)) if is_without_route(&error) => {
                    sleep(ROUTE_AGAIN).await;
                }
                answer => return verdict(to, answer.err().as_ref()),
            }
        }
    };
    timeout(WITHIN, answer)
        .await
        .unwrap_or(Some(ProbeVerdict::Silent))
}

fn is_without_route(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable
    )
}

fn verdict(to: &Member, error: Option<&NodeCallError>) -> Option<ProbeVerdict> {
    match error {
        Some(NodeCallError::NoCertificate) => None,
        Some(NodeCallError::TimedOut | NodeCallError::Refused) => Some(ProbeVerdict::Silent),
        Some(NodeCallError::Io(error)) if error.kind() == io::ErrorKind::TimedOut => {
            Some(ProbeVerdict::Silent)
        }
        Some(NodeCallError::OtherProcess(Some(other)))
            if other.slot == to.slot && is_rejoin(to.session, other.session) =>
        {
            Some(ProbeVerdict::Answers)
        }
        Some(NodeCallError::OtherProcess(_)) => Some(ProbeVerdict::Silent),
        // A connection that was closed, or an answer that is no HTTP, is a sign of life.
        Some(NodeCallError::Io(_) | NodeCallError::Http(_) | NodeCallError::ResponseBody(_))
        | None => Some(ProbeVerdict::Answers),
    }
}

#[cfg(test)]
mod tests;
