//! Two servers of the engine that take changes: a standby is promoted while the earlier primary
//! goes on. Models which of them the store of a host uses: the newer one, once the host has seen it
//! or another host has told of it, and else the first of its list.

use std::time::Duration;

use super::super::engine::FakeEngine;
use super::{Work, World};

/// First epoch at the newer primary. Later than all epochs that a schedule reaches at the older
/// one.
const FIRST_EPOCH: u64 = 10_000;
/// Interval at which a host looks at all servers.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// The earlier primary, which goes on, with its changes of the records.
#[derive(Debug)]
pub(in super::super) struct OlderPrimary {
    pub(in super::super) engine: FakeEngine,
    pub(super) history: Vec<u64>,
    /// It is in place of `World::engine` for a moment.
    is_swapped: bool,
}

/// What a host knows of primaries.
#[derive(Debug, Default, Clone, Copy)]
pub(in super::super) struct KnownPrimaries {
    /// The older primary is the first in its list.
    is_older_first: bool,
    reaches_newer: bool,
    knows_newer: bool,
    /// When a host that knows the newer primary first answered a message of this one.
    answered: Option<Duration>,
    /// When the host began to use the newer primary in place of the older one.
    switched: Option<Duration>,
}

/// The servers, as one host reaches them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Server {
    Newest,
    Older,
    /// It does not reach the newer one, and does not use the older one.
    NotReached,
}

impl World {
    /// Promotes a standby. The hosts of `older` go on at the earlier primary; those of `reach`
    /// could use either. Each has a bit.
    pub(super) fn promote(&mut self, older: u8, reach: u8) {
        if self.older.is_some() {
            return;
        }
        self.older = Some(OlderPrimary {
            engine: self.engine.clone(),
            history: self.records.history.clone(),
            is_swapped: false,
        });
        self.was_split = true;
        let first = if self.flaws.keeps_epochs {
            0
        } else {
            FIRST_EPOCH
        };
        self.engine.promote(self.now, first);
        for host in 0..self.hosts.len() {
            let is_older_first = older & (1 << host) != 0;
            self.hosts[host].primaries = KnownPrimaries {
                is_older_first,
                reaches_newer: !is_older_first || reach & (1 << host) != 0,
                knows_newer: !is_older_first,
                answered: None,
                switched: None,
            };
            let at = self.now + self.random.millis(0, LOOK_EVERY.as_millis() as u64);
            self.push(at, Work::LookForPrimaries { host });
            self.hosts[host].disturbed = self.now;
        }
    }

    /// The earlier primary stops.
    pub(super) fn demote(&mut self) {
        let hosts = 0..self.hosts.len();
        let apart: Vec<usize> = hosts.filter(|host| self.is_apart(*host)).collect();
        if self.older.take().is_some() {
            for host in &mut self.hosts {
                host.primaries = KnownPrimaries::default();
            }
            apart.into_iter().for_each(|host| self.switch(host));
        }
    }

    pub(super) fn look_for_primaries(&mut self, host: usize) {
        if self.older.is_none() {
            return;
        }
        if self.hosts[host].primaries.reaches_newer {
            self.learn(host);
        }
        self.push(self.now + LOOK_EVERY, Work::LookForPrimaries { host });
    }

    /// A process of the host starts: it knows nothing, and looks.
    pub(super) fn forget_primaries(&mut self, host: usize) {
        let primaries = &mut self.hosts[host].primaries;
        primaries.knows_newer = !primaries.is_older_first || primaries.reaches_newer;
        primaries.answered = None;
    }

    /// A message of `from` has arrived at `host`, whose answer tells of the newest primary that it
    /// knows.
    pub(super) fn answer_with_primary(&mut self, host: usize, from: usize) {
        let knows = self.older.is_some() && self.hosts[host].primaries.knows_newer;
        if !knows || self.links_cut[host][from] {
            return;
        }
        let now = self.now;
        self.hosts[from].primaries.answered.get_or_insert(now);
        if !self.flaws.tells_no_primary {
            self.learn(from);
        }
    }

    /// The host knows the newer primary.
    fn learn(&mut self, host: usize) {
        let was_apart = self.is_apart(host);
        self.hosts[host].primaries.knows_newer = true;
        if was_apart && !self.is_apart(host) {
            self.switch(host);
        }
    }

    /// The host uses the newer primary in place of the older one: its connection breaks.
    fn switch(&mut self, host: usize) {
        let now = self.now;
        self.hosts[host].disturbed = now;
        self.hosts[host].primaries.switched = Some(now);
    }

    /// Whether the host uses the newer primary, which has not answered it yet.
    pub(in super::super) fn has_just_switched(&self, host: usize) -> bool {
        let answer = self.hosts[host].process.as_ref().map(|it| it.last_answer.0);
        let switched = self.hosts[host].primaries.switched;
        switched.is_some_and(|at| answer.is_none_or(|executed| executed <= at))
    }

    fn server(&self, host: usize) -> Server {
        if self.older.is_none() {
            return Server::Newest;
        }
        let KnownPrimaries {
            is_older_first,
            reaches_newer,
            knows_newer,
            ..
        } = self.hosts[host].primaries;
        match (
            is_older_first,
            knows_newer && !self.flaws.uses_first_primary,
        ) {
            (false, _) => Server::Newest,
            (true, false) => Server::Older,
            (true, true) if reaches_newer => Server::Newest,
            (true, true) => Server::NotReached,
        }
    }

    /// Whether a host uses the older primary, or none for want of the newer one.
    pub(in super::super) fn is_apart(&self, host: usize) -> bool {
        self.server(host) != Server::Newest
    }

    /// The older primary answers nothing to a host that has been told of the newer one, and keeps
    /// no change for it.
    fn check_server(&mut self, host: usize) {
        let is_told = self.hosts[host]
            .primaries
            .answered
            .is_some_and(|at| at < self.now);
        let is_older = self.server(host) == Server::Older;
        if is_older && (is_told || self.hosts[host].primaries.knows_newer) {
            self.fail(&format!(
                "host {host} uses the older primary, and was told of the newer one"
            ));
        }
    }

    /// Generation of the connections of a host.
    pub(super) fn generation(&self, host: usize) -> u64 {
        match &self.older {
            Some(older) if self.server(host) == Server::Older => older.engine.generation,
            _ => self.engine.generation,
        }
    }

    /// Runs `act` at the server that the host uses. Returns whether there is one.
    pub(super) fn at_server(&mut self, host: usize, act: impl FnOnce(&mut Self)) -> bool {
        let server = self.server(host);
        if server == Server::Older {
            self.check_server(host);
            self.swap_servers();
        }
        if server != Server::NotReached {
            act(self);
        }
        if server == Server::Older {
            self.swap_servers();
        }
        server != Server::NotReached
    }

    fn swap_servers(&mut self) {
        if let Some(older) = &mut self.older {
            std::mem::swap(&mut older.engine, &mut self.engine);
            std::mem::swap(&mut older.history, &mut self.records.history);
            older.is_swapped = !older.is_swapped;
        }
    }

    /// Whether there were two primaries. Nodes may still have views of the older one.
    pub(in super::super) fn was_demoted(&self) -> bool {
        self.was_split && self.older.is_none()
    }

    /// Whether the older primary is in place of the newer one now.
    pub(in super::super) fn is_at_older(&self) -> bool {
        self.older.as_ref().is_some_and(|older| older.is_swapped)
    }
}
