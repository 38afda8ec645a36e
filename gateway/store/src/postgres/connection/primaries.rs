//! Servers that take changes. A region has one, unless a standby was promoted while the earlier primary goes on, or two
//! copies of the database were restored. Each promotion begins the next timeline of the write-ahead log, so the primary
//! with the lower timeline is the older one, and its changes are lost.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use tokio_postgres::SimpleQueryMessage;

use super::engine::Engine;
use super::settings::PostgresSettings;
use crate::StoreError;

/// Fails on a standby, and without the right to ask.
pub(super) const PRIMARY: &str =
    "SELECT substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8), pg_postmaster_start_time()";
/// Longest name of a host of another node, in bytes.
const HOST_MAX: usize = 300;

/// A server that takes changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Primary {
    /// As in `store`, with the port.
    host: String,
    timeline: u32,
    /// Start of the server: tells two names of one server from two servers.
    #[serde(skip)]
    started: String,
}

/// What this process knows of primaries, the newest first: one, found by this node or told by another one, or several that
/// take changes. Clones share it.
pub(super) type Primaries = Arc<Mutex<Vec<Primary>>>;

impl Primary {
    /// Reads the answer to [`PRIMARY`].
    pub(super) fn read(host: &str, answer: &[SimpleQueryMessage]) -> Option<Self> {
        answer.iter().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(Self {
                host: host.to_owned(),
                timeline: u32::from_str_radix(row.get(0)?, 16).ok()?,
                started: row.get(1)?.to_owned(),
            }),
            _ => None,
        })
    }

    /// The first epoch of members on this timeline: it is later than all epochs of the primaries before.
    pub(crate) fn first_epoch(&self) -> u64 {
        u64::from(self.timeline.saturating_sub(1)) << 31
    }
}

impl PostgresSettings {
    fn known(&self) -> MutexGuard<'_, Vec<Primary>> {
        let known = self.primaries.lock();
        // No change under the lock can panic.
        known.unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at all hosts for primaries, for a second at each. Blocks.
    pub fn look_for_primaries(&self, node: &str) {
        if let Ok(engine) = Engine::new(self.clone(), node) {
            self.note_all(engine.primaries());
        }
    }

    fn note_all(&self, mut found: Vec<Primary>) {
        if found.is_empty() {
            // No server has answered: those that took changes may still do.
            return;
        }
        found.sort_by_key(|it| (Reverse(it.timeline), it.started.clone()));
        found.dedup_by(|one, other| one.started == other.started);
        let mut known = self.known();
        // Told by another node, or not reached now.
        let highest = found.first().map(|it| it.timeline);
        let absent = known.first().filter(|it| Some(it.timeline) > highest);
        found.splice(..0, absent.cloned());
        if found.len() > 1 && found != *known {
            tracing::error!("{}", several(&found));
        } else if found.len() == 1 && known.len() > 1 {
            tracing::info!("one server of PostgreSQL takes changes again");
        }
        *known = found;
    }

    /// Notes a primary, if there is one. Fails if it is older than another one.
    pub(super) fn note(&self, primary: Option<&Primary>) -> Result<(), StoreError> {
        let mut known = self.known();
        match (known.first(), primary) {
            (_, None) => Ok(()),
            (Some(newest), Some(it)) if newest.timeline > it.timeline => Err(several([newest, it])),
            (Some(newest), Some(it)) if newest.timeline == it.timeline => Ok(()),
            (_, Some(it)) => {
                *known = vec![it.clone()];
                Ok(())
            }
        }
    }

    /// Notes the newest primary that another node knows, as it has answered in JSON, unless it is of an earlier version.
    pub fn told(&self, answer: &[u8]) {
        let told = serde_json::from_slice::<Primary>(answer).ok();
        let _ = self.note(told.filter(|it| it.host.len() <= HOST_MAX).as_ref());
    }

    /// The newest primary that this process knows.
    pub fn newest_primary(&self) -> Option<Primary> {
        self.known().first().cloned()
    }

    /// Names several servers that take changes, and what to do; `None` if there is one at most.
    pub fn several_primaries(&self) -> Option<String> {
        let known = self.known();
        (known.len() > 1).then(|| several(&*known).to_string())
    }

    /// Fails if several servers take changes, and none is the newer one.
    pub fn refuse_equal_primaries(&self) -> Result<(), StoreError> {
        match &self.known()[..] {
            [one, other, ..] if one.timeline == other.timeline => Err(several([one, other])),
            _ => Ok(()),
        }
    }
}

fn several<'a>(primaries: impl IntoIterator<Item = &'a Primary>) -> StoreError {
    let named = |it: &Primary| format!("{} (timeline {})", it.host, it.timeline);
    let servers: Vec<_> = primaries.into_iter().map(named).collect();
    StoreError::SeveralPrimaries(servers.join(" and "))
}
