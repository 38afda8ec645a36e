//! Usage of each service by day, kept for 400 days: requests, refusals and bytes.
//!
//! The points of the time series are added to it, every ten seconds, in a file of its own that is
//! synced. Where nodes share a store, they write there what each of them has counted so far: see
//! `unsent`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::limits;
use gw_base::clock::Timestamp;
use gw_store::{UsageAmounts, UsageQuery, UsageRow};

use super::FileError;
use super::totals::Totals;
use super::usage_file::UsageFile;
use crate::counters::services::OTHER;
use crate::request_log::days::day::Day;

/// Days that are kept, with the current one.
const DAYS_KEPT: u32 = 400;

/// Usage that one node has counted.
pub struct Usage {
    path: PathBuf,
    state: Mutex<UsageState>,
}

#[derive(Default)]
struct UsageState {
    /// Open file; `None` while it cannot be opened.
    file: Option<UsageFile>,
    /// Amounts not written yet, by day and label.
    pending: BTreeMap<(String, Arc<str>), UsageAmounts>,
    /// The last write failed and this was logged.
    failing: bool,
}

/// Rows that the shared store may not have.
pub struct UnsentUsage {
    /// UUID of the file that has them.
    pub source: String,
    /// What the file has counted so far, by day and label.
    pub rows: Vec<UsageRow>,
}

impl From<&Totals> for UsageAmounts {
    fn from(totals: &Totals) -> Self {
        Self {
            requests: totals.requests(),
            refusals: totals.codes.values().sum(),
            bytes_in: totals.bytes_in,
            bytes_out: totals.bytes_out,
        }
    }
}

impl Usage {
    /// Opens or creates the file at `path`. If that fails, usage is kept in memory and the file is
    /// tried again.
    pub(super) fn open(path: &Path) -> Self {
        let usage = Self {
            path: path.to_owned(),
            state: Mutex::default(),
        };
        usage.state().save(&usage.path);
        usage
    }

    /// Adds what services have counted at `now`, and writes it.
    pub(super) fn add<'a>(
        &self,
        services: impl Iterator<Item = (&'a Arc<str>, &'a Totals)>,
        now: Timestamp,
    ) {
        let date = day(now).to_string();
        let mut state = self.state();
        for (label, totals) in services {
            let mut key = (date.clone(), Arc::clone(label));
            if state.pending.len() >= limits::SERIES_PENDING && !state.pending.contains_key(&key) {
                key.1 = OTHER.into();
            }
            state.pending.entry(key).or_default().add(&totals.into());
        }
        state.save(&self.path);
    }

    /// Rows of this node that match `query`. Amounts that are not written yet are left out.
    pub fn rows(&self, query: &UsageQuery) -> Result<Vec<UsageRow>, FileError> {
        self.state()
            .file
            .as_ref()
            .map_or(Ok(Vec::new()), |file| file.rows(query))
    }

    /// At most `limit` rows that have changed since they were last given to [`Self::sent`].
    pub fn unsent(&self, limit: usize) -> Result<Option<UnsentUsage>, FileError> {
        let state = self.state();
        let Some(file) = &state.file else {
            return Ok(None);
        };
        let rows = file.unsent(limit)?;
        if rows.is_empty() {
            return Ok(None);
        }
        let source = file.source()?;
        Ok(Some(UnsentUsage { source, rows }))
    }

    /// Notes that the shared store has these rows.
    pub fn sent(&self, unsent: &UnsentUsage) -> Result<(), FileError> {
        match &mut self.state().file {
            Some(file) => file.sent(&unsent.rows),
            None => Ok(()),
        }
    }

    /// Deletes rows of days that are no longer kept at `now`. Returns the oldest day that is.
    pub fn forget_old(&self, now: Timestamp) -> Result<String, FileError> {
        let oldest = Day(day(now).0.saturating_sub(DAYS_KEPT - 1)).to_string();
        if let Some(file) = &self.state().file {
            file.delete_before(&oldest)?;
        }
        Ok(oldest)
    }

    fn state(&self) -> MutexGuard<'_, UsageState> {
        // A panic while the lock was held can only have lost amounts that were not written.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UsageState {
    /// Writes pending amounts; keeps them on failure.
    fn save(&mut self, path: &Path) {
        match self.try_save(path) {
            Ok(()) if self.failing => {
                self.failing = false;
                tracing::warn!("usage: it is written again");
            }
            Ok(()) => {}
            Err(error) => {
                // The next write opens the file again, which may have been replaced.
                self.file = None;
                if !self.failing {
                    self.failing = true;
                    tracing::error!(%error, file = %path.display(),
                        "usage: it cannot be written; it is kept in memory until it can");
                }
            }
        }
    }

    fn try_save(&mut self, path: &Path) -> Result<(), FileError> {
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(UsageFile::open(path)?),
        };
        if !self.pending.is_empty() {
            file.add(&self.pending)?;
            self.pending.clear();
        }
        Ok(())
    }
}

fn day(now: Timestamp) -> Day {
    Day::of_ms(u64::try_from(now.0).unwrap_or(0) * 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2026-11-21T04:15:32Z
    const NOW: Timestamp = Timestamp(1_795_234_532);
    const DAY: i64 = 24 * 3600;

    fn totals(requests: u64) -> Totals {
        Totals {
            classes: [0, requests, 0, 1, 0, 0],
            codes: BTreeMap::from([("GW_RATE_LIMIT_EXCEEDED".to_owned(), 1)]),
            bytes_in: 10 * requests,
            bytes_out: 100 * requests,
            ..Totals::default()
        }
    }

    fn add(usage: &Usage, label: &str, requests: u64, now: Timestamp) {
        usage.add([(&Arc::from(label), &totals(requests))].into_iter(), now);
    }

    fn everything() -> UsageQuery {
        UsageQuery {
            since: "2000-01-01".to_owned(),
            until: "2999-01-01".to_owned(),
            limit: 1000,
            ..UsageQuery::default()
        }
    }

    /// Day, label and requests of each row.
    fn read(usage: &Usage, query: &UsageQuery) -> Vec<(String, String, u64)> {
        let rows = usage.rows(query).unwrap().into_iter();
        rows.map(|row| (row.date, row.label, row.amounts.requests))
            .collect()
    }

    fn row(date: &str, label: &str, requests: u64) -> (String, String, u64) {
        (date.to_owned(), label.to_owned(), requests)
    }

    #[test]
    fn amounts_of_a_day_are_added_and_stay_in_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("usage.sqlite");
        let usage = Usage::open(&path);
        add(&usage, "acme--api@1", 5, NOW);
        add(&usage, "acme--api@1", 2, NOW);
        add(&usage, "acme--web@1", 1, NOW);
        add(&usage, "demo--echo@1", 1, Timestamp(NOW.0 + DAY));
        drop(usage);
        // Two processes have the file open during an upgrade.
        let [usage, other] = [(); 2].map(|()| Usage::open(&path));
        add(&other, "acme--api@1", 1, NOW);
        let all = read(&usage, &everything());
        let expected = [
            row("2026-11-22", "demo--echo@1", 2),
            row("2026-11-21", "acme--api@1", 11),
            row("2026-11-21", "acme--web@1", 2),
        ];
        assert_eq!(all, expected);
        let amounts = usage.rows(&everything()).unwrap()[1].amounts;
        let counted = (amounts.refusals, amounts.bytes_in, amounts.bytes_out);
        assert_eq!(counted, (3, 80, 800));

        let of_account = UsageQuery {
            label_prefix: "acme--".to_owned(),
            ..everything()
        };
        assert_eq!(read(&usage, &of_account), expected[1..]);
        let of_service = UsageQuery {
            label_prefix: "acme--web@".to_owned(),
            ..everything()
        };
        assert_eq!(read(&usage, &of_service), expected[2..]);
        let of_day = UsageQuery {
            since: "2026-11-22".to_owned(),
            until: "2026-11-22".to_owned(),
            ..everything()
        };
        assert_eq!(read(&usage, &of_day), expected[..1]);
        let after = UsageQuery {
            after: Some(("2026-11-21".to_owned(), "acme--api@1".to_owned())),
            ..everything()
        };
        assert_eq!(read(&usage, &after), expected[2..]);
    }

    #[test]
    fn a_row_is_unsent_until_the_store_has_all_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("usage.sqlite");
        let usage = Usage::open(&path);
        assert!(usage.unsent(10).unwrap().is_none());
        add(&usage, "acme--api@1", 5, NOW);
        let first = usage.unsent(10).unwrap().unwrap();
        add(&usage, "acme--api@1", 1, NOW);
        // What was counted meanwhile is not sent.
        usage.sent(&first).unwrap();
        let second = usage.unsent(10).unwrap().unwrap();
        assert_eq!(second.rows[0].amounts.requests, 8);
        assert_eq!(second.source, first.source);
        usage.sent(&second).unwrap();
        assert!(usage.unsent(10).unwrap().is_none());
        drop(usage);
        let again = Usage::open(&path);
        add(&again, "acme--web@1", 1, NOW);
        let third = again.unsent(10).unwrap().unwrap();
        assert_eq!((third.rows.len(), third.source), (1, first.source));
        let other = Usage::open(&folder.path().join("other"));
        add(&other, "acme--web@1", 1, NOW);
        assert_ne!(other.unsent(10).unwrap().unwrap().source, second.source);
    }

    #[test]
    fn amounts_wait_in_memory_while_the_file_cannot_be_written_and_expire_after_400_days() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("missing");
        let usage = Usage::open(&inner.join("usage.sqlite"));
        add(&usage, "acme--api@1", 5, NOW);
        assert!(read(&usage, &everything()).is_empty());
        std::fs::create_dir(&inner).unwrap();
        add(&usage, "acme--api@1", 5, Timestamp(NOW.0 + 399 * DAY));
        assert_eq!(read(&usage, &everything()).len(), 2);
        let forget = |days: i64| usage.forget_old(Timestamp(NOW.0 + days * DAY)).unwrap();
        assert_eq!(forget(399), "2026-11-21");
        assert_eq!(read(&usage, &everything()).len(), 2);
        forget(400);
        assert_eq!(read(&usage, &everything()).len(), 1);
    }
}
