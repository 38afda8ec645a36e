//! The records: changes in the engine, what each host has of them in memory and on disk, and the
//! acknowledgment of changes.
//!
//! Every change revokes a key. A host accepts the key while its memory lacks the change.

use std::collections::BTreeSet;
use std::time::Duration;

use super::super::super::engine::{NodeRow, NodeState};
use super::super::engine::EngineMode;
use super::{Work, World};
use crate::owners::placement::NodeSlot;
use crate::random::Random;

/// Interval at which a host reads changes.
const POLL: Duration = Duration::from_millis(250);
/// Longest wait of a change for the other hosts.
const REPLY_WITHIN: Duration = Duration::from_secs(1);
/// Interval at which a host that was asked looks at its records again.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Shortest pause that a host notices in its own clock.
const FREEZE: Duration = Duration::from_secs(1);
/// Longest time that requests wait after a freeze.
const FREEZE_WAIT: Duration = Duration::from_millis(1_500);

/// Something that happens to the records of a host.
#[derive(Debug, Clone)]
pub(super) enum RecordsEvent {
    Poll,
    /// The changes of the engine, as they were when the host began to read.
    Read {
        began: Duration,
        history: Vec<u64>,
    },
    /// These changes are on disk.
    Synced {
        history: Vec<u64>,
    },
    /// An administrator revokes a key at this host.
    Revoke,
    /// Another host asks whether this one has the change, until the time.
    Asked {
        by: usize,
        change: u64,
        until: Duration,
    },
    Yes {
        of: NodeSlot,
        change: u64,
    },
    ReplyDue {
        change: u64,
    },
    /// Requests have waited long enough after a freeze.
    WaitedEnough {
        resumed: Duration,
    },
}

#[derive(Debug)]
struct Revocation {
    change: u64,
    /// Position of the change in the history that it was committed to.
    position: usize,
    /// Host and process that answer the administrator.
    by: (usize, u64),
    asked: Duration,
    /// Slots whose nodes do not say that they have the change.
    pending: BTreeSet<NodeSlot>,
    /// Processes with a row when the change was committed.
    known: BTreeSet<u128>,
    replied: Option<Duration>,
}

/// The records of one host. Its disk outlives its processes.
#[derive(Debug, Default, Clone)]
struct HostRecords {
    memory: Vec<u64>,
    disk: Vec<u64>,
    /// Start of the read that `memory` is of.
    read_began: Duration,
    /// The records are not older than the process: read from the engine, or all that the last
    /// process had acknowledged.
    is_loaded: bool,
    /// Start and end of the last freeze, while requests that queued in it wait.
    frozen: Option<(Duration, Duration)>,
}

#[derive(Debug)]
pub(super) struct SimulatedRecords {
    /// The changes in the engine.
    pub(super) history: Vec<u64>,
    last_change: u64,
    hosts: Vec<HostRecords>,
    revocations: Vec<Revocation>,
    random: Random,
}

/// What all sessions of a process have in common: a rejoin takes the next one.
fn process_of(session: u128) -> u128 {
    session >> 32
}

impl SimulatedRecords {
    pub(super) fn new(seed: u64, hosts: usize) -> Self {
        let hosts = vec![HostRecords::default(); hosts];
        let random = Random::new(seed ^ 0x07ec_07d5);
        Self {
            history: Vec::new(),
            last_change: 0,
            hosts,
            revocations: Vec::new(),
            random,
        }
    }

    /// An asynchronous failover loses the last changes, also those that were acknowledged.
    pub(super) fn lose(&mut self, changes: usize) {
        self.history
            .truncate(self.history.len().saturating_sub(changes));
    }
}

impl World {
    pub(in super::super) fn revoke(&mut self, at: Duration, host: usize) {
        self.push(
            at,
            Work::Records {
                host,
                process: 0,
                event: RecordsEvent::Revoke,
            },
        );
    }

    /// Revocations whose answer has arrived, and slots that answers have named.
    pub(in super::super) fn revoked(&self) -> (u64, u64) {
        let replied = self
            .records
            .revocations
            .iter()
            .filter(|revocation| revocation.replied.is_some());
        (
            replied.clone().count() as u64,
            replied
                .map(|revocation| revocation.pending.len() as u64)
                .sum(),
        )
    }

    /// A process starts: with the records of the disk, until it has read the engine.
    pub(super) fn load_records(&mut self, host: usize, process: u64, is_resumed: bool) {
        let records = &mut self.records.hosts[host];
        records.memory.clone_from(&records.disk);
        records.is_loaded = is_resumed;
        records.frozen = None;
        self.push_records(Duration::from_millis(1), host, process, RecordsEvent::Poll);
    }

    fn push_records(&mut self, after: Duration, host: usize, process: u64, event: RecordsEvent) {
        self.push(
            self.now + after,
            Work::Records {
                host,
                process,
                event,
            },
        );
    }

    fn records_delay(&mut self, least: u64, most: u64) -> Duration {
        self.records.random.millis(least, most)
    }

    /// Whether a message that is sent now is lost.
    fn records_message_is_lost(&mut self, from: usize, to: usize) -> bool {
        self.links_cut[from][to] || self.records.random.percent(self.loss)
    }

    pub(super) fn records_event(&mut self, host: usize, process: u64, event: RecordsEvent) {
        let Some(number) = self.hosts[host]
            .process
            .as_ref()
            .map(|process| process.number)
        else {
            return;
        };
        if process != 0 && process != number {
            return;
        }
        match event {
            RecordsEvent::Poll => {
                self.push_records(POLL, host, number, RecordsEvent::Poll);
                self.at_server(host, |world| world.read_changes(host, number));
            }
            RecordsEvent::Read { began, history } => {
                self.changes_were_read(host, number, began, history);
            }
            RecordsEvent::Synced { history } => self.records.hosts[host].disk = history,
            RecordsEvent::Revoke => {
                self.at_server(host, |world| world.commit_revocation(host, number));
            }
            RecordsEvent::Asked { by, change, until } => {
                self.asked(host, number, (by, change, until));
            }
            RecordsEvent::Yes { of, change } => self.has_said_yes(of, change),
            RecordsEvent::ReplyDue { change } => self.reply(change, host),
            RecordsEvent::WaitedEnough { resumed } => {
                // Without the engine, the records in memory count.
                self.records.hosts[host]
                    .frozen
                    .take_if(|(_, end)| *end == resumed);
            }
        }
        self.check_records();
    }

    fn reads_engine(&self, host: usize) -> bool {
        let host = &self.hosts[host];
        self.engine.mode != EngineMode::Down && host.requests_pass && host.replies_pass
    }

    fn read_changes(&mut self, host: usize, process: u64) {
        if self.reads_engine(host) && !self.records.random.percent(self.loss) {
            let began = self.now;
            let history = self.records.history.clone();
            let delay = self.records_delay(0, 8);
            self.push_records(delay, host, process, RecordsEvent::Read { began, history });
        }
    }

    fn changes_were_read(&mut self, host: usize, process: u64, began: Duration, history: Vec<u64>) {
        if began < self.records.hosts[host].read_began {
            return;
        }
        if !self.flaws.forgets_journal || self.records.hosts[host].memory != history {
            // With a flaw, the copy of all records follows later.
            let (least, most) = if self.flaws.forgets_journal {
                (200, 4_000)
            } else {
                (0, 20)
            };
            let delay = self.records_delay(least, most);
            self.push_records(
                delay,
                host,
                process,
                RecordsEvent::Synced {
                    history: history.clone(),
                },
            );
        }
        let records = &mut self.records.hosts[host];
        (records.memory, records.read_began, records.is_loaded) = (history, began, true);
        if let Some((start, _)) = records.frozen.take_if(|(_, end)| *end <= began) {
            self.authenticate_queued(host, start);
        }
    }

    fn commit_revocation(&mut self, host: usize, number: u64) {
        let Some(process) = &self.hosts[host].process else {
            return;
        };
        let is_member = process.view.as_ref().is_some_and(|view| view.is_member());
        if !is_member || !self.reads_engine(host) || self.engine.mode != EngineMode::Up {
            return;
        }
        let own = process.machine.session();
        let known_rows = process.machine.roster().rows.clone();
        // The rows are read after the commit: the host may not know of a node that has just joined.
        let mut rows = self.engine.roster().rows;
        let is_new = |row: &NodeRow| self.engine.roster().session(row.session).is_none();
        rows.extend(known_rows.into_iter().filter(is_new));
        self.records.last_change += 1;
        let change = self.records.last_change;
        let history = &mut self.records.history;
        history.push(change);
        let position = history.len();
        let history = history.clone();
        self.note(|| format!("host {host} commits change {change} at {position}"));
        // No read that began before the commit, or at the same time, replaces it.
        self.changes_were_read(host, number, self.now + Duration::from_micros(1), history);
        let mut pending = BTreeSet::new();
        let mut known = BTreeSet::new();
        for row in rows {
            known.insert(process_of(row.session));
            // A dead node may serve on. It is not asked.
            let is_dead = row.state == NodeState::Dead;
            if row.state == NodeState::Left || (is_dead && self.flaws.omits_dead) {
                continue;
            }
            pending.insert(row.slot);
            let until = self.now + REPLY_WITHIN.mul_f64(0.9);
            let asked = if row.session == own {
                Some(host)
            } else {
                self.host_of(row.session)
            };
            if let Some(to) = asked
                .filter(|to| !is_dead && (*to == host || !self.records_message_is_lost(host, *to)))
            {
                let delay = self.records_delay(0, 5);
                let event = RecordsEvent::Asked {
                    by: host,
                    change,
                    until,
                };
                self.push(
                    self.now + delay,
                    Work::Records {
                        host: to,
                        process: 0,
                        event,
                    },
                );
            }
        }
        let by = (host, number);
        let asked = self.now;
        self.records.revocations.push(Revocation {
            change,
            position,
            by,
            asked,
            pending,
            known,
            replied: None,
        });
        if !self.flaws.waits_for_all {
            self.push_records(
                REPLY_WITHIN,
                host,
                number,
                RecordsEvent::ReplyDue { change },
            );
        }
    }

    /// Says yes once the host has the change in the history of its own memory and disk.
    fn asked(&mut self, host: usize, process: u64, (by, change, until): (usize, u64, Duration)) {
        let Some(slot) = self.hosts[host].slot else {
            return;
        };
        let position = self
            .records
            .revocations
            .iter()
            .find(|asked| asked.change == change)
            .map(|asked| asked.position);
        let HostRecords { memory, disk, .. } = &self.records.hosts[host];
        let has = |history: &[u64]| {
            if self.flaws.compares_numbers {
                position <= Some(history.len())
            } else {
                history.contains(&change)
            }
        };
        if has(memory) && (self.flaws.forgets_journal || has(disk)) {
            if host == by || !self.records_message_is_lost(host, by) {
                let delay = self.records_delay(0, 5);
                self.push(
                    self.now + delay,
                    Work::Records {
                        host: by,
                        process: 0,
                        event: RecordsEvent::Yes { of: slot, change },
                    },
                );
            }
        } else if self.now < until {
            self.push_records(
                LOOK_AGAIN,
                host,
                process,
                RecordsEvent::Asked { by, change, until },
            );
        }
    }

    fn has_said_yes(&mut self, of: NodeSlot, change: u64) {
        let revocations = &mut self.records.revocations;
        let Some(asked) = revocations
            .iter_mut()
            .find(|asked| asked.change == change && asked.replied.is_none())
        else {
            return;
        };
        asked.pending.remove(&of);
        if asked.pending.is_empty() {
            let host = asked.by.0;
            self.reply(change, host);
        }
    }

    fn reply(&mut self, change: u64, host: usize) {
        let now = self.now;
        let is_it =
            |revocation: &&mut Revocation| revocation.change == change && revocation.by.0 == host;
        if let Some(revocation) = self.records.revocations.iter_mut().find(is_it) {
            revocation.replied.get_or_insert(now);
            let pending = format!("{:?}", revocation.pending);
            self.note(|| format!("host {host} answers change {change}, pending: {pending}"));
        }
    }

    /// A host runs again after a pause that began at `paused`: requests have queued.
    pub(super) fn thaw(&mut self, host: usize, paused: Duration) {
        let Some(process) = self.hosts[host]
            .process
            .as_ref()
            .map(|process| process.number)
        else {
            return;
        };
        if self.flaws.trusts_memory {
            return self.authenticate_queued(host, paused);
        }
        if self.now - paused >= FREEZE {
            self.records.hosts[host].frozen = Some((paused, self.now));
            self.at_server(host, |world| world.read_changes(host, process));
            self.push_records(
                FREEZE_WAIT,
                host,
                process,
                RecordsEvent::WaitedEnough { resumed: self.now },
            );
        }
    }

    /// The host authenticates requests that queued in a freeze that began at `start`.
    fn authenticate_queued(&mut self, host: usize, start: Duration) {
        let SimulatedRecords {
            history,
            hosts,
            revocations,
            ..
        } = &self.records;
        let is_in_freeze = |revocation: &&Revocation| {
            revocation
                .replied
                .is_some_and(|at| start < at && at < self.now)
        };
        let accepts = |revocation: &Revocation| {
            history.contains(&revocation.change) && !hosts[host].memory.contains(&revocation.change)
        };
        // A host that was at an older primary has its changes.
        let reads_newest = self.reads_engine(host) && !self.was_split;
        if reads_newest && revocations.iter().filter(is_in_freeze).any(accepts) {
            self.fail(&format!(
                "host {host} accepts a request that queued in a freeze, with a revoked key"
            ));
        }
    }

    /// No host accepts a revoked key, unless the answer named it. A failover may lose the
    /// revocation itself.
    fn check_records(&mut self) {
        let mut failure = None;
        for host in 0..self.hosts.len() {
            let (Some(slot), Some(process)) = (self.hosts[host].slot, &self.hosts[host].process)
            else {
                continue;
            };
            let session = process.machine.session();
            // The row of a node is removed once the node does not run any more.
            let has_row = || self.engine.rows().any(|row| row.session == session);
            let HostRecords {
                memory, is_loaded, ..
            } = &self.records.hosts[host];
            if self.admitted(host) == 0 || !is_loaded || !has_row() {
                continue;
            }
            let accepts = |revocation: &&Revocation| {
                // A process that joins later was not asked. It reads the change when it can.
                revocation.known.contains(&process_of(session))
                    && revocation.replied.is_some_and(|at| at < self.now)
                    && !revocation.pending.contains(&slot)
                    && !memory.contains(&revocation.change)
                    && self.records.history.contains(&revocation.change)
            };
            if let Some(revocation) = self.records.revocations.iter().find(accepts) {
                failure = Some(format!(
                    "host {host} accepts the key that change {} has revoked",
                    revocation.change
                ));
            }
        }
        let late = self.records.revocations.iter().find(|revocation| {
            let (host, number) = revocation.by;
            let runs = self.hosts[host]
                .process
                .as_ref()
                .is_some_and(|process| process.number == number);
            let ran = runs
                && !self.hosts[host].is_paused
                && self.now.saturating_sub(self.hosts[host].resumed) > POLL;
            ran && revocation.replied.is_none() && self.now - revocation.asked > REPLY_WITHIN + POLL
        });
        failure =
            failure.or_else(|| late.map(|late| format!("change {} is not answered", late.change)));
        if let Some(failure) = failure {
            self.fail(&failure);
        }
    }
}
