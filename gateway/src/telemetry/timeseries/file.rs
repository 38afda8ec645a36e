//! The points in one SQLite file. The older they are the coarser: what is older than three hours is kept by the minute,
//! what is older than two days by ten minutes, and nothing that is older than seven days.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, Transaction, TransactionBehavior, params};

use super::totals::Totals;
use super::{ALL, STEP, Selection};
use crate::clock::Timestamp;

/// Each entry brings a file from the schema numbered by its index to the next. Append only.
const MIGRATIONS: &[&str] = &["
    CREATE TABLE services (id INTEGER PRIMARY KEY, label TEXT NOT NULL UNIQUE) STRICT;
    CREATE TABLE points (
        service INTEGER NOT NULL,
        at INTEGER NOT NULL,
        step INTEGER NOT NULL,
        sums TEXT NOT NULL,
        PRIMARY KEY (service, at, step)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX points_by_age ON points (step, at);
"];

/// How long another process may keep the file busy.
const BUSY: Duration = Duration::from_secs(1);
/// Points that are made coarser at a time.
const COARSEN: usize = 5000;

const HOUR: i64 = 3600;
const DAY: i64 = 24 * HOUR;

/// Points of one coarseness, and what becomes of them.
struct Tier {
    /// Seconds that they are apart.
    step: i64,
    /// Seconds that they are kept.
    keep: i64,
    /// What they become then; nothing, if they are dropped.
    next: Option<i64>,
}

const TIERS: [Tier; 3] = [
    Tier { step: STEP, keep: 3 * HOUR, next: Some(60) },
    Tier { step: 60, keep: 2 * DAY, next: Some(600) },
    Tier { step: 600, keep: 7 * DAY, next: None },
];

/// How far back points reach, in seconds.
pub(super) const KEPT: i64 = TIERS[TIERS.len() - 1].keep;

/// How far apart points are of which the oldest is so many seconds old.
pub(super) fn step_at(age: i64) -> i64 {
    TIERS.iter().find(|tier| age <= tier.keep).unwrap_or(&TIERS[TIERS.len() - 1]).step
}

#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("{0}")]
    Sqlite(#[from] rusqlite::Error),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("the file is of a newer version of the program")]
    Newer,
    #[error("a point cannot be read: {0}")]
    Point(#[from] serde_json::Error),
}

pub(super) struct SeriesFile(Connection);

impl SeriesFile {
    /// Opens or creates the file at `path` (mode 0600). One that is damaged is put aside: these are charts.
    pub(super) fn open(path: &Path) -> Result<Self, FileError> {
        match Self::try_open(path) {
            Err(FileError::Sqlite(error)) if is_damage(&error) => {
                let mut aside = path.to_owned().into_os_string();
                aside.push(".damaged");
                fs::rename(path, &aside)?;
                tracing::error!(%error, "the file of the series is damaged: kept as *.damaged, a new one begins");
                Self::try_open(path)
            }
            opened => opened,
        }
    }

    fn try_open(path: &Path) -> Result<Self, FileError> {
        // SQLite gives the file beside it the same permissions.
        OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
        let mut connection = Connection::open(path)?;
        connection.busy_timeout(BUSY)?;
        // No write-ahead log: it would need a mapped file beside it, which a full disk could take away under us.
        connection.pragma_update(None, "journal_mode", "TRUNCATE")?;
        connection.pragma_update(None, "synchronous", "NORMAL")?;
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let found: u32 = transaction.pragma_query_value(None, "user_version", |row| row.get(0))?;
        for migration in MIGRATIONS.get(found as usize..).ok_or(FileError::Newer)? {
            transaction.execute_batch(migration)?;
        }
        transaction.pragma_update(None, "user_version", MIGRATIONS.len() as u32)?;
        transaction.commit()?;
        Ok(Self(connection))
    }

    /// Adds points to what is there.
    pub(super) fn write(&mut self, points: &BTreeMap<(i64, Arc<str>), Totals>) -> Result<(), FileError> {
        let transaction = self.0.transaction_with_behavior(TransactionBehavior::Immediate)?;
        for ((at, label), totals) in points {
            transaction.prepare_cached("INSERT OR IGNORE INTO services (label) VALUES (?1)")?.execute([label])?;
            let service = transaction
                .prepare_cached("SELECT id FROM services WHERE label = ?1")?
                .query_row([label], |row| row.get(0))?;
            add(&transaction, service, *at, STEP, totals)?;
        }
        transaction.commit()?;
        Ok(())
    }

    /// Merges points that have become old, and drops those that are too old. A bounded piece of it: the rest is for the
    /// next time.
    pub(super) fn make_coarser(&mut self, now: Timestamp) -> Result<(), FileError> {
        for Tier { step, keep, next } in TIERS {
            let to = next.unwrap_or(step);
            // A whole coarse point at a time.
            let before = (now.0 - keep).div_euclid(to) * to;
            if old(&self.0, step, before, 1)?.is_empty() {
                continue;
            }
            let transaction = self.0.transaction_with_behavior(TransactionBehavior::Immediate)?;
            // Looked at again: another process (an upgrade) does the same at the same time.
            for (service, at, sums) in old(&transaction, step, before, COARSEN)? {
                match serde_json::from_str(&sums) {
                    Ok(totals) if next.is_some() => add(&transaction, service, at.div_euclid(to) * to, to, &totals)?,
                    Ok(_) => {}
                    // One that is damaged must not keep all others from growing old.
                    Err(error) => tracing::warn!(%error, service, at, "series: a damaged point is dropped"),
                }
                transaction
                    .prepare_cached("DELETE FROM points WHERE service = ?1 AND at = ?2 AND step = ?3")?
                    .execute(params![service, at, step])?;
            }
            if next.is_none() {
                transaction.execute("DELETE FROM services WHERE id NOT IN (SELECT service FROM points)", [])?;
            }
            transaction.commit()?;
        }
        Ok(())
    }

    /// Hands over the points of `selection` from `since` until before `until`, in any order.
    pub(super) fn read(
        &self,
        selection: &Selection,
        since: i64,
        until: i64,
        mut point: impl FnMut(i64, Totals),
    ) -> Result<(), FileError> {
        // No wildcard can be in an account's id: the API has checked it.
        let (condition, label) = match selection {
            Selection::All => ("label = ?1", ALL.to_owned()),
            Selection::Account(account) => ("label GLOB ?1", format!("{account}--*")),
            Selection::Service(service) => ("label = ?1", service.clone()),
        };
        let mut statement = self.0.prepare_cached(&format!(
            "SELECT at, sums FROM services CROSS JOIN points ON service = id
             WHERE {condition} AND at >= ?2 AND at < ?3"
        ))?;
        let mut rows = statement.query(params![label, since, until])?;
        while let Some(row) = rows.next()? {
            let sums: String = row.get(1)?;
            point(row.get(0)?, serde_json::from_str(&sums)?);
        }
        Ok(())
    }

    /// From now on the file cannot grow.
    #[cfg(test)]
    pub(super) fn limit_size(&self) {
        let pages: i64 = self.0.pragma_query_value(None, "page_count", |row| row.get(0)).unwrap();
        self.0.pragma_update(None, "max_page_count", pages).unwrap();
    }
}

/// Points that have become old, the oldest first, at most so many: service, time and sums of each.
fn old(connection: &Connection, step: i64, before: i64, most: usize) -> Result<Vec<(i64, i64, String)>, FileError> {
    let mut statement = connection
        .prepare_cached("SELECT service, at, sums FROM points WHERE step = ?1 AND at < ?2 ORDER BY at LIMIT ?3")?;
    let rows =
        statement.query_map(params![step, before, most as i64], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Adds `sums` to a point.
fn add(transaction: &Transaction<'_>, service: i64, at: i64, step: i64, totals: &Totals) -> Result<(), FileError> {
    let found: Option<String> = transaction
        .prepare_cached("SELECT sums FROM points WHERE service = ?1 AND at = ?2 AND step = ?3")?
        .query_map(params![service, at, step], |row| row.get(0))?
        .next()
        .transpose()?;
    let mut sum = found.map(|found| serde_json::from_str(&found)).transpose()?.unwrap_or_else(Totals::default);
    sum.add(totals);
    transaction
        .prepare_cached("INSERT OR REPLACE INTO points (service, at, step, sums) VALUES (?1, ?2, ?3, ?4)")?
        .execute(params![service, at, step, serde_json::to_string(&sum)?])?;
    Ok(())
}

fn is_damage(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one() -> Totals {
        Totals { classes: [0, 1, 0, 0, 0, 0], codes: BTreeMap::from([("GW_X".into(), 1)]), ..Totals::default() }
    }

    fn read(file: &SeriesFile) -> BTreeMap<i64, u64> {
        let mut found = BTreeMap::new();
        let selection = Selection::Service("acme--api".into());
        file.read(&selection, 0, i64::MAX, |at, totals| *found.entry(at).or_default() += totals.requests()).unwrap();
        found
    }

    #[test]
    fn points_become_coarser_with_age_and_nothing_is_lost_until_they_are_too_old() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = SeriesFile::open(&folder.path().join("s")).unwrap();
        let start = 1_800_000_000;
        // An hour, one request every ten seconds.
        let points = (0..360).map(|number| ((start + number * STEP, Arc::from("acme--api")), one())).collect();
        file.write(&points).unwrap();
        file.make_coarser(Timestamp(start + HOUR)).unwrap();
        assert_eq!(read(&file).len(), 360);
        for (age, count) in [(4 * HOUR, 60), (DAY, 60), (2 * DAY + HOUR, 6), (7 * DAY, 6)] {
            file.make_coarser(Timestamp(start + age)).unwrap();
            // What became minutes may be ten minutes' at once.
            file.make_coarser(Timestamp(start + age)).unwrap();
            let found = read(&file);
            assert_eq!((found.len(), found.values().sum::<u64>()), (count, 360), "{age}");
        }
        file.make_coarser(Timestamp(start + 7 * DAY + HOUR)).unwrap();
        assert!(read(&file).is_empty());
        let labels: i64 = file.0.query_row("SELECT count(*) FROM services", [], |row| row.get(0)).unwrap();
        assert_eq!(labels, 0);
    }

    #[test]
    fn much_that_is_old_is_dealt_with_piece_by_piece() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = SeriesFile::open(&folder.path().join("s")).unwrap();
        let points: BTreeMap<_, _> =
            (0..COARSEN as i64 + 600).map(|number| ((number * STEP, Arc::from("acme--api")), one())).collect();
        file.write(&points).unwrap();
        let now = Timestamp(points.len() as i64 * STEP + 4 * HOUR);
        file.make_coarser(now).unwrap();
        assert_eq!(read(&file).values().sum::<u64>(), points.len() as u64);
        file.make_coarser(now).unwrap();
        assert_eq!((read(&file).len(), read(&file).values().sum::<u64>()), (points.len() / 6 + 1, points.len() as u64));
    }

    #[test]
    fn a_newer_file_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        SeriesFile::open(&path).unwrap().0.pragma_update(None, "user_version", 99).unwrap();
        assert!(matches!(SeriesFile::open(&path), Err(FileError::Newer)));
    }
}
