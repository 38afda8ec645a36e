//! Points in one SQLite file. Older points are coarser: 10 s up to three hours, one minute up to
//! two days, ten minutes up to seven days. Then they are deleted.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use gw_base::clock::Timestamp;
use gw_base::sqlite_file::{FileKind, SqliteOpenError};
use rusqlite::{Connection, ErrorCode, Transaction, TransactionBehavior, params};

use super::totals::Totals;
use super::{ALL, STEP, Selection};

const SERIES_FILE: FileKind = FileKind {
    migrations: &["
    CREATE TABLE services (id INTEGER PRIMARY KEY, label TEXT NOT NULL UNIQUE) STRICT;
    CREATE TABLE points (
        service INTEGER NOT NULL,
        at INTEGER NOT NULL,
        step INTEGER NOT NULL,
        sums TEXT NOT NULL,
        PRIMARY KEY (service, at, step)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX points_by_age ON points (step, at);
"],
    set_up: |connection| {
        connection.busy_timeout(BUSY)?;
        // No write-ahead log: its shared-memory file is mapped, and an access to it on a full disk
        // can raise SIGBUS.
        connection.pragma_update(None, "journal_mode", "TRUNCATE")?;
        connection.pragma_update(None, "synchronous", "NORMAL")
    },
};

/// Longest wait for a lock that another process holds.
pub(super) const BUSY: Duration = Duration::from_secs(1);
/// Condition on the keys of services. The text has no effect as a pattern.
const BEGINS: &str = "substr(label, 1, length(?1)) = ?1";
/// Most points merged in one transaction.
const COARSEN: usize = 5000;

const HOUR: i64 = 3600;
const DAY: i64 = 24 * HOUR;

/// Points of one resolution.
struct Tier {
    /// Seconds between points.
    step: i64,
    /// Seconds for which points are kept at this resolution.
    keep: i64,
    /// Resolution into which they are merged afterwards; `None` if they are deleted.
    next: Option<i64>,
}

const TIERS: [Tier; 3] = [
    Tier {
        step: STEP,
        keep: 3 * HOUR,
        next: Some(60),
    },
    Tier {
        step: 60,
        keep: 2 * DAY,
        next: Some(600),
    },
    Tier {
        step: 600,
        keep: 7 * DAY,
        next: None,
    },
];

/// Age of the oldest points, in seconds.
pub(super) const KEPT: i64 = TIERS[TIERS.len() - 1].keep;

/// Returns the seconds between points if the oldest of them is `age` seconds old.
pub(super) fn step_at(age: i64) -> i64 {
    TIERS
        .iter()
        .find(|tier| age <= tier.keep)
        .unwrap_or(&TIERS[TIERS.len() - 1])
        .step
}

/// Reason why the file of the time series cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// SQLite reported an error.
    #[error("{0}")]
    Sqlite(#[from] rusqlite::Error),
    /// The file cannot be opened or created.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The schema of the file is not one that this program can use or migrate.
    #[error("the file was written by a newer version of the program")]
    Newer,
    /// A stored point is not valid JSON.
    #[error("a point cannot be read: {0}")]
    Point(#[from] serde_json::Error),
}

impl From<SqliteOpenError> for FileError {
    fn from(error: SqliteOpenError) -> Self {
        match error {
            SqliteOpenError::Sqlite(error) => Self::Sqlite(error),
            SqliteOpenError::Io(error) => Self::Io(error),
            SqliteOpenError::NewerSchema { .. } | SqliteOpenError::OlderSchema { .. } => {
                Self::Newer
            }
        }
    }
}

pub(super) struct SeriesFile(Connection);

impl SeriesFile {
    /// Opens or creates the file at `path` (mode 0600). Renames a damaged file to `*.damaged` and
    /// creates a new one: only charts are lost.
    pub(super) fn open(path: &Path) -> Result<Self, FileError> {
        open_or_set_aside(
            path,
            "time series: the file is damaged; it is kept as *.damaged and a new one is created",
            Self::try_open,
        )
    }

    fn try_open(path: &Path) -> Result<Self, FileError> {
        Ok(Self(SERIES_FILE.open(path)?))
    }

    /// Adds `points` to the points in the file.
    pub(super) fn write(
        &mut self,
        points: &BTreeMap<(i64, Arc<str>), Totals>,
    ) -> Result<(), FileError> {
        let transaction = self
            .0
            .transaction_with_behavior(TransactionBehavior::Immediate)?;
        for ((at, label), totals) in points {
            transaction
                .prepare_cached("INSERT OR IGNORE INTO services (label) VALUES (?1)")?
                .execute([label])?;
            let service = transaction
                .prepare_cached("SELECT id FROM services WHERE label = ?1")?
                .query_row([label], |row| row.get(0))?;
            add(&transaction, service, *at, STEP, totals)?;
        }
        transaction.commit()?;
        Ok(())
    }

    /// Merges old points into coarser ones and deletes expired points, at most [`COARSEN`] of each
    /// resolution per call.
    pub(super) fn make_coarser(&mut self, now: Timestamp) -> Result<(), FileError> {
        for Tier { step, keep, next } in TIERS {
            let to = next.unwrap_or(step);
            // Aligned, so that all points of a coarse point are merged.
            let before = (now.0 - keep).div_euclid(to) * to;
            if old(&self.0, step, before, 1)?.is_empty() {
                continue;
            }
            let transaction = self
                .0
                .transaction_with_behavior(TransactionBehavior::Immediate)?;
            // Read again within the transaction: during an upgrade another process merges points
            // too.
            for (service, at, sums) in old(&transaction, step, before, COARSEN)? {
                match serde_json::from_str(&sums) {
                    Ok(totals) if next.is_some() => {
                        add(&transaction, service, at.div_euclid(to) * to, to, &totals)?;
                    }
                    Ok(_) => {}
                    // A damaged point must not block the merging of all others.
                    Err(error) => {
                        tracing::warn!(%error, service, at,
                            "time series: a damaged point is deleted");
                    }
                }
                transaction
                    .prepare_cached(
                        "DELETE FROM points WHERE service = ?1 AND at = ?2 AND step = ?3",
                    )?
                    .execute(params![service, at, step])?;
            }
            if next.is_none() {
                transaction.execute(
                    "DELETE FROM services WHERE id NOT IN (SELECT service FROM points)",
                    [],
                )?;
            }
            transaction.commit()?;
        }
        Ok(())
    }

    /// Calls `point` with key, time and counts of each point of `selection` from `since`
    /// (inclusive) to `until` (exclusive), in any order.
    pub(super) fn read(
        &self,
        selection: &Selection,
        since: i64,
        until: i64,
        mut point: impl FnMut(&str, i64, Totals),
    ) -> Result<(), FileError> {
        let (condition, beginning) = match selection {
            Selection::All => ("label = ?1", ALL.to_owned()),
            Selection::Account(account) => (BEGINS, format!("{account}--")),
            Selection::Service(label) => (BEGINS, format!("{label}@")),
        };
        let mut statement = self.0.prepare_cached(&format!(
            "SELECT label, at, sums FROM services CROSS JOIN points ON service = id
             WHERE {condition} AND at >= ?2 AND at < ?3"
        ))?;
        let mut rows = statement.query(params![beginning, since, until])?;
        while let Some(row) = rows.next()? {
            let label: String = row.get(0)?;
            let sums: String = row.get(2)?;
            point(&label, row.get(1)?, serde_json::from_str(&sums)?);
        }
        Ok(())
    }

    /// Prevents the file from growing.
    #[cfg(test)]
    pub(super) fn limit_size(&self) {
        let pages: i64 = self
            .0
            .pragma_query_value(None, "page_count", |row| row.get(0))
            .unwrap();
        self.0.pragma_update(None, "max_page_count", pages).unwrap();
    }
}

/// Returns at most `most` points before `before`, the oldest first: service, time and encoded
/// totals.
fn old(
    connection: &Connection,
    step: i64,
    before: i64,
    most: usize,
) -> Result<Vec<(i64, i64, String)>, FileError> {
    let mut statement = connection.prepare_cached(
        "SELECT service, at, sums FROM points WHERE step = ?1 AND at < ?2 ORDER BY at LIMIT ?3",
    )?;
    let rows = statement.query_map(params![step, before, most as i64], |row| {
        Ok((row.get(0)?, row.get(1)?, row.get(2)?))
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Adds `totals` to a point.
fn add(
    transaction: &Transaction<'_>,
    service: i64,
    at: i64,
    step: i64,
    totals: &Totals,
) -> Result<(), FileError> {
    let found: Option<String> = transaction
        .prepare_cached("SELECT sums FROM points WHERE service = ?1 AND at = ?2 AND step = ?3")?
        .query_map(params![service, at, step], |row| row.get(0))?
        .next()
        .transpose()?;
    let mut sum = found
        .map(|found| serde_json::from_str(&found))
        .transpose()?
        .unwrap_or_else(Totals::default);
    sum.add(totals);
    transaction
        .prepare_cached(
            "INSERT OR REPLACE INTO points (service, at, step, sums) VALUES (?1, ?2, ?3, ?4)",
        )?
        .execute(params![service, at, step, serde_json::to_string(&sum)?])?;
    Ok(())
}

/// Opens the file at `path`. Renames a damaged one to `*.damaged`, logs `message`, and opens a new
/// one.
pub(super) fn open_or_set_aside<T>(
    path: &Path,
    message: &str,
    open: impl Fn(&Path) -> Result<T, FileError>,
) -> Result<T, FileError> {
    match open(path) {
        Err(FileError::Sqlite(error)) if is_damage(&error) => {
            let mut aside = path.to_owned().into_os_string();
            aside.push(".damaged");
            fs::rename(path, &aside)?;
            tracing::error!(%error, "{message}");
            open(path)
        }
        opened => opened,
    }
}

fn is_damage(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one() -> Totals {
        Totals {
            classes: [0, 1, 0, 0, 0, 0],
            codes: BTreeMap::from([("GW_X".into(), 1)]),
            ..Totals::default()
        }
    }

    fn read(file: &SeriesFile) -> BTreeMap<i64, u64> {
        let mut found = BTreeMap::new();
        let selection = Selection::Service("acme--api".into());
        file.read(&selection, 0, i64::MAX, |_, at, totals| {
            *found.entry(at).or_default() += totals.requests();
        })
        .unwrap();
        found
    }

    #[test]
    fn points_become_coarser_with_age_without_loss_until_they_expire() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = SeriesFile::open(&folder.path().join("s")).unwrap();
        let start = 1_800_000_000;
        // One hour with one request every ten seconds.
        let points = (0..360)
            .map(|number| ((start + number * STEP, Arc::from("acme--api@1")), one()))
            .collect();
        file.write(&points).unwrap();
        file.make_coarser(Timestamp(start + HOUR)).unwrap();
        assert_eq!(read(&file).len(), 360);
        for (age, count) in [(4 * HOUR, 60), (DAY, 60), (2 * DAY + HOUR, 6), (7 * DAY, 6)] {
            file.make_coarser(Timestamp(start + age)).unwrap();
            // Points merged into minutes may be due for ten minutes in the same run.
            file.make_coarser(Timestamp(start + age)).unwrap();
            let found = read(&file);
            assert_eq!(
                (found.len(), found.values().sum::<u64>()),
                (count, 360),
                "{age}"
            );
        }
        file.make_coarser(Timestamp(start + 7 * DAY + HOUR))
            .unwrap();
        assert!(read(&file).is_empty());
        let labels: i64 = file
            .0
            .query_row("SELECT count(*) FROM services", [], |row| row.get(0))
            .unwrap();
        assert_eq!(labels, 0);
    }

    #[test]
    fn old_points_are_merged_in_bounded_steps() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = SeriesFile::open(&folder.path().join("s")).unwrap();
        let points: BTreeMap<_, _> = (0..COARSEN as i64 + 600)
            .map(|number| ((number * STEP, Arc::from("acme--api@1")), one()))
            .collect();
        file.write(&points).unwrap();
        let now = Timestamp(points.len() as i64 * STEP + 4 * HOUR);
        file.make_coarser(now).unwrap();
        assert_eq!(read(&file).values().sum::<u64>(), points.len() as u64);
        file.make_coarser(now).unwrap();
        assert_eq!(
            (read(&file).len(), read(&file).values().sum::<u64>()),
            (points.len() / 6 + 1, points.len() as u64)
        );
    }

    #[test]
    fn newer_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        SeriesFile::open(&path)
            .unwrap()
            .0
            .pragma_update(None, "user_version", 99)
            .unwrap();
        assert!(matches!(SeriesFile::open(&path), Err(FileError::Newer)));
    }
}
