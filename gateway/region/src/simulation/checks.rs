//! What must hold after every step.

use std::time::Duration;

use super::super::engine::Statement;
use super::engine::{EndKind, EngineMode};
use super::world::{Process, WORKER_DELAY, World};
use crate::owners::placement::{Member, NodeSlot, Owner, Placement};
use crate::owners::view::View;

/// Longest time for which a node that lives and reaches the engine does not know that its session
/// has ended.
const UNAWARE_MAX: Duration = Duration::from_millis(1_300);

/// Counts of what the schedules exercised.
#[derive(Debug, Default, Clone)]
pub(super) struct Coverage {
    /// Host and process that last admitted for each service, and its session.
    last_admitted: Vec<Option<(usize, u128)>>,
    /// Services admitted by two hosts, each time with a reason.
    pub(super) overlaps: u64,
    pub(super) handovers: u64,
    pub(super) handovers_without_levels: u64,
    pub(super) deaths: u64,
    /// Full buckets that each service has had, and how many of them a disturbed handover explains.
    bursts: Vec<(u64, u64)>,
    admitting: Vec<u32>,
}

impl World {
    /// A statement was applied.
    pub(super) fn check_statement(
        &mut self,
        statement: &Statement,
        long_outage_end: Option<Duration>,
    ) {
        if self.is_at_older() {
            return;
        }
        if let Statement::GoLive { session, .. } = *statement
            && let Some(host) = self.host_of(session)
            && self.hosts[host].links.began_with_wrong_clock
        {
            self.fail(&format!("host {host} goes live with a wrong clock"));
        }
        let Statement::DeclareDead { session, .. } = *statement else {
            return;
        };
        self.checks.deaths += 1;
        let is_target = |process: &Process| process.machine.session() == session;
        let target = self
            .hosts
            .iter()
            .position(|host| host.process.as_ref().is_some_and(is_target));
        // Clocks of observers are up to 3 % fast. A process that has ended refuses connections,
        // which is proof enough.
        let is_soon =
            long_outage_end.is_some_and(|end| self.now - end < Duration::from_millis(9_650));
        if is_soon && target.is_some() && !self.falsely_refused.contains(&session) {
            self.fail("a node was declared dead soon after an outage of the engine");
        }
        let is_refusal = self
            .engine
            .ended
            .get(&session)
            .is_some_and(|end| end.kind == EndKind::Refusal);
        if target.is_some() && is_refusal && !self.falsely_refused.contains(&session) {
            self.fail("a node that beats was declared dead");
        }
        if let Some(target) = target
            && self.healthy_for(target) > Duration::from_millis(3_000)
            && !self.falsely_refused.contains(&session)
        {
            self.fail(&format!("the healthy host {target} was declared dead"));
        }
    }

    /// For how long the host has been running and connected to the engine.
    fn healthy_for(&self, host: usize) -> Duration {
        let is_apart = self.is_apart(host);
        let host = &self.hosts[host];
        let is_up = self.engine.mode == EngineMode::Up
            && host.requests_pass
            && host.replies_pass
            && !host.is_paused;
        if is_up && !is_apart {
            self.now.saturating_sub(host.disturbed)
        } else {
            Duration::ZERO
        }
    }

    /// The workers of a host use a new view.
    pub(super) fn check_view(&mut self, host: usize, before: Option<&View>, view: &View) {
        if before.is_some_and(|before| before.epoch() > view.epoch()) {
            self.fail(&format!("host {host} went back to epoch {}", view.epoch()));
        }
        let members = view
            .placement()
            .members()
            .iter()
            .map(|member| (member.slot, member.session));
        let older = self.older.iter().map(|older| &older.engine);
        let same = older.chain([&self.engine]).any(|engine| {
            let truth = engine.members.get(view.epoch() as usize);
            truth.is_some_and(|truth| members.clone().eq(truth.iter().copied()))
        });
        if !same && !self.was_demoted() {
            self.fail(&format!(
                "host {host} has other members at epoch {}: {view:?}",
                view.epoch()
            ));
        }
    }

    pub(super) fn check_answer(&mut self, host: usize) {
        let Some(process) = &self.hosts[host].process else {
            return;
        };
        let older = self.older.as_ref().map(|older| older.engine.epoch());
        if process.machine.roster().epoch > self.engine.epoch().max(older.unwrap_or_default())
            && !self.was_demoted()
        {
            self.fail(&format!("host {host} knows an epoch that does not exist"));
        }
    }

    /// Services that the workers of a host admit now.
    pub(super) fn admitted(&self, host: usize) -> u32 {
        let clock = self.clock(host);
        match &self.hosts[host].process {
            Some(process)
                if !self.hosts[host].is_paused
                    && process.admit_until.is_some_and(|until| clock <= until) =>
            {
                process.services
            }
            _ => 0,
        }
    }

    /// Host `host` may have begun to admit.
    pub(super) fn check_admission(&mut self, host: usize) {
        self.checks.admitting.resize(self.hosts.len(), 0);
        self.checks.last_admitted.resize(self.services.len(), None);
        self.checks.bursts.resize(self.services.len(), (0, 0));
        let admitted = self.admitted(host);
        let begun = admitted & !self.checks.admitting[host];
        self.checks.admitting[host] = admitted;
        if admitted == 0 {
            return;
        }
        for service in (0..self.services.len()).filter(|service| begun & (1 << service) != 0) {
            self.check_handover(host, service);
        }
        for other in (0..self.hosts.len()).filter(|other| *other != host) {
            if admitted & self.admitted(other) != 0 {
                self.check_overlap(host, other);
            }
        }
    }

    /// The host begins to admit for a service: in a planned move it has the levels of the earlier
    /// owner.
    fn check_handover(&mut self, host: usize, service: usize) {
        let Some(process) = &self.hosts[host].process else {
            return;
        };
        let Some(view) = &process.view else { return };
        let session = process.session;
        let epoch = view.epoch();
        if self.was_split {
            // Members of two primaries are unknown to each other.
            self.checks.bursts[service].1 += 1;
        }
        let earlier = self.checks.last_admitted[service].replace((host, session));
        if self.engine.ended.contains_key(&session) {
            // An isolated node serves beside the next owner, with a bucket of its own.
            self.checks.bursts[service].1 += 1;
        }
        let earlier = match earlier {
            Some((_, earlier)) if earlier == session && !self.flaws.forgets_levels => return,
            Some((_, earlier))
                if earlier != session && !self.engine.ended.contains_key(&earlier) =>
            {
                earlier
            }
            _ => return self.check_burst(service),
        };
        // After two changes in a row the levels can be on their way to the owner between.
        let is_direct = self.owning_session(epoch - 1, service) == Some(earlier);
        let has_levels = process
            .levels
            .get(&earlier)
            .is_some_and(|levels| *levels >= epoch);
        self.checks.handovers += 1;
        if !has_levels {
            self.checks.handovers_without_levels += 1;
            self.checks.bursts[service].1 += 1;
            self.check_burst(service);
            if is_direct && !self.peers_disturbed && !self.was_split {
                self.fail(&format!(
                    "host {host} admits for service {service} without levels of {earlier:x}"
                ));
            }
        }
    }

    /// A service starts with a full bucket: once, and once for each session that has ended without
    /// handing its level over.
    fn check_burst(&mut self, service: usize) {
        let (bursts, explained) = &mut self.checks.bursts[service];
        *bursts += 1;
        if *bursts > 1 + *explained + self.engine.ended.len() as u64 {
            self.fail(&format!(
                "service {service} has had more than one burst and one for each death"
            ));
        }
    }

    /// The session that owns a service at an epoch.
    fn owning_session(&self, epoch: u64, service: usize) -> Option<u128> {
        let members = self.engine.members.get(epoch as usize)?.iter();
        let member = |&(slot, session): &(NodeSlot, u128)| Member {
            slot,
            session,
            peer_address: ([0; 4], 0).into(),
        };
        let placement = Placement::new(epoch, NodeSlot::new(0)?, members.map(member).collect());
        placement
            .owning_member(&self.services[service])
            .map(|member| member.session)
    }

    /// Two hosts admit for one service: one must be cut off, within the documented bounds.
    fn check_overlap(&mut self, one: usize, other: usize) {
        let epoch = |host: usize| {
            self.hosts[host]
                .process
                .as_ref()
                .and_then(|process| Some(process.view.as_ref()?.epoch()))
        };
        let older = if epoch(one) <= epoch(other) {
            one
        } else {
            other
        };
        if let Err(reason) = self.may_overlap(older, one, other) {
            self.fail(&format!(
                "hosts {one} and {other} both admit, {older} by the older epoch: {reason}"
            ));
        }
        self.checks.overlaps += 1;
    }

    fn may_overlap(&self, older: usize, one: usize, other: usize) -> Result<(), &'static str> {
        let process = |host: usize| self.hosts[host].process.as_ref().ok_or("no process");
        let view = |host: usize| process(host)?.view.as_ref().ok_or("no view");
        if view(one)?.epoch() == view(other)?.epoch() {
            return Err("both have the same epoch");
        }
        let node = process(older)?;
        let here = view(older)?.placement().here();
        let member = view(older)?
            .placement()
            .members()
            .iter()
            .find(|member| member.slot == here);
        let session = member.ok_or("it is no member")?.session;
        let told = node.told.map_or(Duration::ZERO, |(_, at)| self.now - at);
        if told > WORKER_DELAY {
            return Err("a peer told it of a later epoch");
        }
        for host in [one, other] {
            // It knows the members of the older primary alone.
            if self.is_apart(host) {
                return Ok(());
            }
            if self.has_just_switched(host) {
                return match self.healthy_for(host) > UNAWARE_MAX {
                    true => Err("it reaches the newer primary for too long"),
                    false => Ok(()),
                };
            }
        }
        let (executed, arrived) = node.last_answer;
        let Some(end) = self.engine.ended.get(&session) else {
            // A session that went live at the older primary was no member at the newer one. Its
            // workers are about to know.
            return match self.was_split && node.apply_at >= self.now {
                true => Ok(()),
                false => Err("its session has not ended"),
            };
        };
        if executed > end.at && self.now - arrived > WORKER_DELAY {
            return Err("it has read the end of its session");
        }
        let unaware = self.healthy_for(older).min(self.now - end.at);
        if unaware > UNAWARE_MAX {
            return Err("it reaches the engine for too long");
        }
        if end.kind != EndKind::Silence {
            return Ok(());
        }
        // What other nodes sent before the end of the session has queued in a pause. Their later
        // messages follow.
        if node.is_resumed && self.now - self.hosts[older].resumed <= WORKER_DELAY {
            return Ok(());
        }
        // A failure is known one second after the start of its call, and counts for four seconds
        // after that start, on a clock that is up to 3 % slow.
        let has_failed = node
            .failed
            .is_some_and(|failed| self.now - failed < Duration::from_millis(4_130));
        if !has_failed {
            return Err("its calls have not failed");
        }
        let hinted = node.hinted.map_or(Duration::ZERO, |(_, at)| self.now - at);
        if hinted > WORKER_DELAY {
            return Err("another node named a later epoch");
        }
        Ok(())
    }

    /// Whether all running hosts agree, and each service is admitted by its owner.
    pub(super) fn has_converged(&self) -> Result<(), String> {
        let running = || (0..self.hosts.len()).filter(|host| self.hosts[*host].process.is_some());
        for host in running() {
            let Some(process) = &self.hosts[host].process else {
                continue;
            };
            let Some(view) = &process.view else {
                return Err(format!("host {host} has no view"));
            };
            if view.epoch() != self.engine.epoch() {
                return Err(format!(
                    "host {host} is at epoch {} of {}",
                    view.epoch(),
                    self.engine.epoch()
                ));
            }
            if !view.is_member() || view.is_moving() || view.next().is_some() {
                return Err(format!("host {host} is not settled: {view:?}"));
            }
            for (service, name) in self.services.iter().enumerate() {
                let is_owner = view.placement().owner(name) == Owner::Here;
                if is_owner != (self.admitted(host) & (1 << service) != 0) {
                    return Err(format!(
                        "host {host}: owner of {service}: {is_owner}, but admits otherwise"
                    ));
                }
            }
        }
        if running().next().is_none() {
            return Ok(());
        }
        let members = self.engine.members.last().map_or(0, Vec::len);
        if members != running().count() {
            return Err(format!(
                "{members} members, {} running hosts",
                running().count()
            ));
        }
        Ok(())
    }

    /// Whether a row of a host that does not run has to be declared dead first.
    pub(super) fn has_silent_row(&self) -> bool {
        let is_running = |session: u128| {
            let has = |process: &Process| process.machine.session() == session;
            self.hosts
                .iter()
                .any(|host| host.process.as_ref().is_some_and(has))
        };
        self.engine
            .rows()
            .any(|row| !row.state.is_over() && !is_running(row.session))
    }
}
