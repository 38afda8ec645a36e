//! Faults that change the world.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use super::super::super::membership::{Membership, MembershipEvent, NodeConfig};
use super::super::engine::EngineMode;
use super::super::schedule::Fault;
use super::{Process, Work, World};
use crate::membership::carried::CarriedMembership;

impl World {
    pub(super) fn fault(&mut self, fault: Fault) {
        self.note(|| format!("{fault:?}"));
        match fault {
            Fault::Start(host) => self.start(host, false),
            Fault::StartAlone(host) => self.start(host, true),
            Fault::Clock { host, error } => self.hosts[host].clock_error = error,
            Fault::LoseChanges(changes) => self.records.lose(changes),
            Fault::Crash(host) => self.crash(host),
            Fault::Pause(host) => self.pause(host),
            Fault::Resume(host) => self.resume(host),
            Fault::EngineDown { loses_beats } => {
                self.engine.set_mode(self.now, EngineMode::Down);
                if loses_beats {
                    self.engine.lose_beats();
                }
                self.disconnect();
                self.disturb_all();
            }
            Fault::Promote { older, reach } => self.promote(older, reach),
            Fault::Demote => self.demote(),
            Fault::EngineHung => self.engine.set_mode(self.now, EngineMode::SyncHung),
            Fault::EngineUp => {
                self.engine.set_mode(self.now, EngineMode::Up);
                self.disturb_all();
            }
            Fault::CutEngine {
                host,
                requests,
                replies,
            } => {
                self.hosts[host].requests_pass &= !requests;
                self.hosts[host].replies_pass &= !replies;
            }
            Fault::HealEngine(host) => {
                self.hosts[host].requests_pass = true;
                self.hosts[host].replies_pass = true;
                self.hosts[host].disturbed = self.now;
            }
            Fault::CutPeer { from, to } => {
                self.peers_disturbed = true;
                self.links_cut[from][to] = true;
            }
            Fault::HealPeer { from, to } => self.links_cut[from][to] = false,
            Fault::Leave(host) => {
                if let Some(process) = &mut self.hosts[host].process {
                    process.machine.leave();
                }
            }
            Fault::Drain { by, host } => {
                if let (Some(slot), Some(process)) =
                    (self.hosts[host].slot, &mut self.hosts[by].process)
                {
                    // Refused where the state of the row does not allow it.
                    let _refused = process.machine.drain(slot);
                }
            }
            Fault::Remove { by } => {
                let over = self
                    .engine
                    .rows()
                    .find(|row| row.state.is_over())
                    .map(|row| row.slot);
                if let (Some(slot), Some(process)) = (over, &mut self.hosts[by].process) {
                    let _refused = process.machine.remove(slot);
                }
            }
            Fault::Refused { by, host } => {
                if let Some(process) = &self.hosts[host].process {
                    let session = process.machine.session();
                    self.falsely_refused.push(session);
                    self.refused(by, host, session);
                }
            }
            Fault::Slow { host, is_slow } => self.hosts[host].is_slow = is_slow,
            Fault::Loss(percent) => {
                self.loss = percent;
                self.peers_disturbed |= percent > 0;
            }
        }
    }

    /// Some hosts notice between their calls that the connection broke.
    fn disconnect(&mut self) {
        for host in 0..self.hosts.len() {
            if let Some(process) = &self.hosts[host].process
                && self.hosts[host].replies_pass
            {
                let process = process.number;
                if self.random.percent(50) {
                    self.push(
                        self.now,
                        Work::Input {
                            host,
                            process,
                            event: MembershipEvent::Disconnected,
                        },
                    );
                }
            }
        }
    }

    fn disturb_all(&mut self) {
        let now = self.now;
        self.hosts
            .iter_mut()
            .for_each(|host| host.disturbed = now.max(host.disturbed));
    }

    fn pause(&mut self, host: usize) {
        if !std::mem::replace(&mut self.hosts[host].is_paused, true) {
            self.hosts[host].paused = self.now;
        }
    }

    /// Starts a process. One that starts alone does not wait for the engine, and continues the
    /// membership of the last one.
    fn start(&mut self, host: usize, is_alone: bool) {
        if self.hosts[host].process.is_some() {
            return;
        }
        self.processes += 1;
        let number = self.processes;
        let config = NodeConfig {
            slot: self.hosts[host].slot,
            session: u128::from(number) << 32,
            peer_address: ([127, 0, 0, 1], 7000 + host as u16).into(),
            version: "1".into(),
            isolation: self.isolation,
        };
        let clock = self.clock(host);
        let carried = self.hosts[host].carried.take().filter(|_| is_alone);
        let is_resumed = carried.is_some();
        let machine = match carried {
            Some(carried) => Membership::resume(
                config,
                CarriedMembership {
                    has_lease: false,
                    ..carried
                },
                clock,
            ),
            None => Membership::new(config, clock),
        };
        self.drop_links(host);
        if is_resumed {
            // Hosts may know that the last process of this session refused connections.
            self.falsely_refused.push(machine.session());
        }
        self.hosts[host].process = Some(Process {
            number,
            is_resumed,
            session: machine.session(),
            machine,
            view: None,
            services: 0,
            admit_until: None,
            apply_at: Duration::ZERO,
            is_handing_over: false,
            last_answer: Default::default(),
            failed: None,
            called: Duration::ZERO,
            told: None,
            hinted: None,
            levels: BTreeMap::new(),
        });
        self.hosts[host].disturbed = self.now;
        self.hosts[host].wake = None;
        self.forget_primaries(host);
        self.load_records(host, number, is_resumed);
        let at = self.now + self.random.millis(50, 1_000);
        self.push(
            at,
            Work::Input {
                host,
                process: number,
                event: MembershipEvent::Ready,
            },
        );
        if !self.hosts[host].is_paused {
            self.drive(host);
        }
    }

    fn crash(&mut self, host: usize) {
        self.hosts[host].inbox.clear();
        self.hosts[host].is_paused = false;
        let Some(process) = self.hosts[host].process.take() else {
            return;
        };
        self.hosts[host].carried = process.machine.carry(self.clock(host));
        self.drop_links(host);
        for by in 0..self.hosts.len() {
            // Another node that cannot reach the host gets no refusal either.
            if by != host
                && !self.links_cut[by][host]
                && !self.links_cut[host][by]
                && self.random.percent(50)
            {
                self.refused(by, host, process.machine.session());
            }
        }
    }

    fn refused(&mut self, by: usize, host: usize, session: u128) {
        let at = self.now + self.random.millis(1, 100);
        if let (Some(slot), Some(process)) = (self.hosts[host].slot, &self.hosts[by].process) {
            let event = MembershipEvent::Refused { slot, session };
            let process = process.number;
            self.push(
                at,
                Work::Input {
                    host: by,
                    process,
                    event,
                },
            );
        }
    }

    fn resume(&mut self, host: usize) {
        if !std::mem::replace(&mut self.hosts[host].is_paused, false) {
            return;
        }
        self.hosts[host].disturbed = self.now;
        self.hosts[host].wake = None;
        self.hosts[host].resumed = self.now;
        self.thaw(host, self.hosts[host].paused);
        // The clock has gone on. Workers and timers may run before the messages that arrived
        // meanwhile.
        self.check_admission(host);
        let inbox = std::mem::take(&mut self.hosts[host].inbox);
        if self.random.percent(50) {
            self.drive(host);
        }
        for work in inbox {
            self.handle(host, work);
            self.drive(host);
        }
        self.drive(host);
    }

    /// Ends all faults. Crashed hosts stay down, unless `restarts`.
    pub(in super::super) fn heal(&mut self, restarts: bool) {
        self.note(|| "heal".into());
        self.queue
            .retain(|Reverse((_, _, index))| !matches!(self.works[*index], Some(Work::Fault(_))));
        self.loss = 0;
        self.demote();
        self.links_cut
            .iter_mut()
            .flatten()
            .for_each(|is_cut| *is_cut = false);
        if self.engine.mode != EngineMode::Up {
            self.fault(Fault::EngineUp);
        }
        for host in 0..self.hosts.len() {
            self.fault(Fault::HealEngine(host));
            self.hosts[host].is_slow = false;
            self.hosts[host].clock_error = 0;
            self.resume(host);
            if restarts {
                self.start(host, false);
            }
        }
    }
}
