//! Servers that take changes. A region has one, unless a standby was promoted while the earlier
//! primary goes on, or two copies of the database were restored. Each promotion begins the next
//! timeline of the write-ahead log, so the primary with the lower timeline is the older one, and
//! its changes are lost. Of servers none of which is older, all nodes use the one with the most
//! changes, then the one that was started first, so that the members have one table, and refuse
//! changes.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::iter::zip;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio_postgres::SimpleQueryMessage;

use super::engine::Engine;
use super::settings::PostgresSettings;
use crate::StoreError;

/// Fails on a standby, and without the right to ask.
pub(super) const PRIMARY: &str = "
    SELECT substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8), system_identifier,
        (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint
    FROM pg_control_system()";
/// Fails before the region was created.
pub(super) const REVISION: &str = "SELECT revision FROM gw.region";
/// Longest name of a host of another node, in bytes.
const HOST_MAX: usize = 300;
/// Most servers that other nodes tell.
const TOLD_MAX: usize = 64;
/// Time for which a server counts that another node has told, which each does every second.
const TOLD_FOR: Duration = Duration::from_secs(5);

/// A server that takes changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Primary {
    /// As in `store`, with the port.
    host: String,
    pub(crate) timeline: u32,
    /// Identifies the cluster. Its standbys and copies have the same number.
    #[serde(default)]
    system: i64,
    /// Start of the server, in microseconds: tells two names of one server from two servers.
    #[serde(default)]
    started: i64,
    /// Number of its changes when it was last looked at. One of which this is not known counts as
    /// the one with the most: it was in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    revision: Option<i64>,
}

/// What this process knows of primaries. Clones share it.
pub(super) type Primaries = Arc<Mutex<PrimaryList>>;

#[derive(Debug, Default)]
pub(super) struct PrimaryList {
    /// The one to use, also while it does not answer.
    newest: Option<Primary>,
    /// Servers that this node reaches, one of each host.
    found: Vec<Primary>,
    /// Servers that other nodes reach, each once, and when they were told.
    told: Vec<(Primary, Instant)>,
    /// All of these, each server once, the newest first.
    servers: Vec<Primary>,
}

impl Primary {
    /// Reads the answers to [`PRIMARY`] and [`REVISION`].
    pub(super) fn read(
        host: &str,
        answer: &[SimpleQueryMessage],
        revision: &[SimpleQueryMessage],
    ) -> Option<Self> {
        let row = |answer: &[SimpleQueryMessage], columns| {
            let row = answer.iter().find_map(|message| match message {
                SimpleQueryMessage::Row(row) => Some(row),
                _ => None,
            })?;
            let texts = (0..columns).map(|at| row.get(at).map(str::to_owned));
            texts.collect::<Option<Vec<_>>>()
        };
        let found = row(answer, 3)?;
        let revision = row(revision, 1).and_then(|columns| columns[0].parse().ok());
        Some(Self {
            host: host.to_owned(),
            timeline: u32::from_str_radix(&found[0], 16).ok()?,
            system: found[1].parse().ok()?,
            started: found[2].parse().ok()?,
            revision: Some(revision.unwrap_or(0)),
        })
    }

    /// As a later process is to know it.
    pub fn remembered(self) -> Self {
        Self {
            revision: None,
            ..self
        }
    }

    /// Timelines of two clusters cannot be compared.
    fn is_older_than(&self, other: &Self) -> bool {
        self.system == other.system && self.timeline < other.timeline
    }

    /// Another start at the same host is a restart.
    fn is_same_server(&self, other: &Self) -> bool {
        let has_name_or_start = self.host == other.host || self.started == other.started;
        has_name_or_start && self.system == other.system && self.timeline == other.timeline
    }
}

impl PrimaryList {
    /// Chooses the server to use, as all nodes do that know the same servers.
    fn settle(&mut self) {
        self.told.retain(|(_, at)| at.elapsed() < TOLD_FOR);
        let told = self.told.iter().map(|(it, _)| it);
        let running: Vec<_> = self.found.iter().chain(told).collect();
        let mut known = running.clone();
        known.extend(&self.newest);
        let is_old = |it: &Primary| known.iter().any(|other| it.is_older_than(other));
        let newest = running.iter().filter(|it| !is_old(it));
        let changes = |it: &Primary| it.revision.unwrap_or(i64::MAX);
        let newest = newest.min_by_key(|it| (Reverse(changes(it)), it.started));
        let newest = newest.copied();
        let newest = newest.or(self.newest.as_ref());
        let mut servers: Vec<_> = newest.cloned().into_iter().collect();
        for (at, it) in running.into_iter().enumerate() {
            // Another node may not have noticed yet that an older one has ended.
            let counts = at < self.found.len() || !is_old(it);
            if counts && !servers.iter().any(|other| other.is_same_server(it)) {
                servers.push(it.clone());
            }
        }
        let are_known = servers.len() == self.servers.len()
            && zip(&servers, &self.servers).all(|(it, known)| it.is_same_server(known));
        if servers.len() > 1 && !are_known {
            tracing::error!("{}", several(&servers));
        } else if servers.len() == 1 && self.servers.len() > 1 {
            tracing::info!("one server of PostgreSQL takes changes again");
        }
        self.newest = servers.first().cloned();
        self.servers = servers;
    }
}

impl PostgresSettings {
    fn known(&self) -> MutexGuard<'_, PrimaryList> {
        let known = self.primaries.lock();
        // No change under the lock can panic.
        let mut known = known.unwrap_or_else(PoisonError::into_inner);
        known.settle();
        known
    }

    /// Looks at all hosts for primaries, for a second at each. Blocks.
    pub fn look_for_primaries(&self, node: &str) {
        if let Ok(engine) = Engine::new(self.clone(), node) {
            let (found, silent) = engine.primaries();
            self.note_all(found, &silent);
        }
    }

    /// Notes the primaries that were found. `silent` are the hosts that have not answered, whose
    /// servers may take changes.
    fn note_all(&self, found: Vec<Primary>, silent: &[String]) {
        let mut known = self.known();
        known.found.retain(|it| {
            silent.contains(&it.host) && !found.iter().any(|other| it.is_older_than(other))
        });
        known.found.extend(found);
    }

    /// Notes the primary that was connected to, if there is one, and fails as
    /// [`Self::check_primary`] does.
    pub(super) fn note(&self, primary: Option<&Primary>) -> Result<(), StoreError> {
        let mut known = self.known();
        if let Some(primary) = primary.filter(|it| !known.found.contains(it)) {
            // An older one has ended, unless the next look finds it.
            let is_left = |it: &Primary| it.host != primary.host && !it.is_older_than(primary);
            known.found.retain(is_left);
            known.found.push(primary.clone());
        }
        drop(known);
        self.check_primary(primary)
    }

    /// Fails if another primary is to be used.
    pub(super) fn check_primary(&self, primary: Option<&Primary>) -> Result<(), StoreError> {
        match (&self.known().newest, primary) {
            (Some(newest), Some(it)) if !newest.is_same_server(it) => Err(several([newest, it])),
            _ => Ok(()),
        }
    }

    /// Notes the [known primaries](Self::known_primaries) of an earlier process of this node, as
    /// after a look at which no host has answered: those that are equal count until they answer or
    /// have ended.
    pub fn remember(&self, primaries: Vec<Primary>) {
        let hosts = self.each_host("");
        let mut known = self.known();
        let mut primaries = primaries.into_iter();
        let Some(newest) = primaries.next().filter(|_| known.newest.is_none()) else {
            return;
        };
        let found = primaries.filter(|it| hosts.iter().any(|(host, _)| *host == it.host));
        known.found.extend(found.map(|it| Primary {
            revision: (!it.is_same_server(&newest)).then_some(0),
            ..it
        }));
        known.newest = Some(newest);
    }

    /// Notes the newest primary that another node knows, and those that it reaches.
    pub fn told(&self, primaries: Vec<Primary>) {
        let primaries = primaries.into_iter().take(TOLD_MAX);
        let mut primaries = primaries.filter(|it| it.host.len() <= HOST_MAX);
        let mut known = self.known();
        let is_newer = |it: &Primary| known.newest.iter().all(|known| known.is_older_than(it));
        if let Some(newest) = primaries.next().filter(is_newer) {
            known.newest = Some(newest);
        }
        for it in primaries {
            // Another node may reach another server by the same name.
            known.told.retain(|(other, _)| !other.is_same_server(&it));
            known.told.insert(0, (it, Instant::now()));
        }
        known.told.truncate(TOLD_MAX);
    }

    /// The primary that this process uses, also while it does not answer, then those that it
    /// reaches.
    pub fn known_primaries(&self) -> Vec<Primary> {
        let known = self.known();
        known.newest.iter().chain(&known.found).cloned().collect()
    }

    /// Names several servers that take changes, and what to do; `None` if there is one at most.
    pub fn several_primaries(&self) -> Option<String> {
        let known = self.known();
        (known.servers.len() > 1).then(|| several(&known.servers).to_string())
    }

    /// Fails if several servers take changes, and none is the newer one.
    pub fn refuse_equal_primaries(&self) -> Result<(), StoreError> {
        let servers = &self.known().servers;
        match servers
            .iter()
            .skip(1)
            .all(|it| it.is_older_than(&servers[0]))
        {
            true => Ok(()),
            false => Err(several(servers)),
        }
    }
}

fn several<'a>(primaries: impl IntoIterator<Item = &'a Primary>) -> StoreError {
    let named = |it: &Primary| format!("{} (timeline {})", it.host, it.timeline);
    let servers: Vec<_> = primaries.into_iter().map(named).collect();
    StoreError::SeveralPrimaries(servers.join(" and "))
}
