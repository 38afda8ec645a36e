//! Usage in one SQLite file, each commit synced.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use gw_base::sqlite_file::FileKind;
use gw_shared::id::RequestIds;
use gw_store::{UsageAmounts, UsageQuery, UsageRow};
use rusqlite::{Connection, Row, TransactionBehavior, params};

use super::file::{BUSY, FileError, open_or_set_aside};

const USAGE_FILE: FileKind = FileKind {
    migrations: &["
    -- One row: the UUID of this file, by which a shared store tells it from other nodes' files.
    CREATE TABLE source (id TEXT NOT NULL) STRICT;
    CREATE TABLE usage (
        date TEXT NOT NULL,
        label TEXT NOT NULL,
        requests INTEGER NOT NULL,
        refusals INTEGER NOT NULL,
        bytes_in INTEGER NOT NULL,
        bytes_out INTEGER NOT NULL,
        sent INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (date, label)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX unsent ON usage (date, label) WHERE sent = 0;
"],
    set_up: |connection| {
        connection.busy_timeout(BUSY)?;
        // No write-ahead log: its shared-memory file is mapped, and an access to it on a full disk
        // can raise SIGBUS.
        connection.pragma_update(None, "journal_mode", "TRUNCATE")?;
        connection.pragma_update(None, "synchronous", "FULL")
    },
};

const ROWS: &str = "SELECT date, label, requests, refusals, bytes_in, bytes_out FROM usage";

pub(super) struct UsageFile(Connection);

impl UsageFile {
    /// Opens or creates the file at `path` (mode 0600). Renames a damaged file to `*.damaged` and
    /// creates a new one.
    pub(super) fn open(path: &Path) -> Result<Self, FileError> {
        open_or_set_aside(
            path,
            "usage: the file is damaged; it is kept as *.damaged, and a new one is created: \
             restore it from a snapshot of the disk",
            Self::try_open,
        )
    }

    fn try_open(path: &Path) -> Result<Self, FileError> {
        let file = Self(USAGE_FILE.open(path)?);
        let id = RequestIds::new().next_id().to_string();
        file.0.execute(
            "INSERT INTO source SELECT ?1 WHERE NOT EXISTS (SELECT 1 FROM source)",
            [id],
        )?;
        Ok(file)
    }

    /// UUID of this file.
    pub(super) fn source(&self) -> Result<String, FileError> {
        Ok(self
            .0
            .query_row("SELECT id FROM source", [], |row| row.get(0))?)
    }

    /// Adds amounts to those in the file.
    pub(super) fn add(
        &mut self,
        amounts: &BTreeMap<(String, Arc<str>), UsageAmounts>,
    ) -> Result<(), FileError> {
        let find = format!("{ROWS} WHERE date = ?1 AND label = ?2");
        const PUT: &str =
            "INSERT OR REPLACE INTO usage (date, label, requests, refusals, bytes_in, bytes_out)
            VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
        let transaction = self
            .0
            .transaction_with_behavior(TransactionBehavior::Immediate)?;
        for ((date, label), more) in amounts {
            let mut sum = *more;
            let mut find = transaction.prepare_cached(&find)?;
            let mut found = find.query(params![date, label])?;
            if let Some(row) = found.next()? {
                sum.add(&read(row)?.amounts);
            }
            let [requests, refusals, bytes_in, bytes_out] = sum.to_columns();
            transaction.prepare_cached(PUT)?.execute(params![
                date, label, requests, refusals, bytes_in, bytes_out
            ])?;
        }
        Ok(transaction.commit()?)
    }

    pub(super) fn rows(&self, query: &UsageQuery) -> Result<Vec<UsageRow>, FileError> {
        let mut select = self.0.prepare_cached(&format!(
            "{ROWS} WHERE date BETWEEN ?1 AND ?2 AND substr(label, 1, length(?3)) = ?3
             AND (?4 IS NULL OR date < ?4 OR (date = ?4 AND label > ?5))
             ORDER BY date DESC, label LIMIT ?6"
        ))?;
        let (after_date, after_label) = query.after.clone().unzip();
        let limit = i64::try_from(query.limit).unwrap_or(i64::MAX);
        let rows = select.query_map(
            params![
                query.since,
                query.until,
                query.label_prefix,
                after_date,
                after_label,
                limit
            ],
            read,
        )?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    pub(super) fn unsent(&self, limit: usize) -> Result<Vec<UsageRow>, FileError> {
        let select = format!("{ROWS} WHERE sent = 0 ORDER BY date, label LIMIT ?1");
        let mut select = self.0.prepare_cached(&select)?;
        let rows = select.query_map([i64::try_from(limit).unwrap_or(i64::MAX)], read)?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    /// Marks rows as sent that are still as in `rows`.
    pub(super) fn sent(&mut self, rows: &[UsageRow]) -> Result<(), FileError> {
        const MARK: &str = "UPDATE usage SET sent = 1
            WHERE date = ?1 AND label = ?2 AND requests = ?3 AND refusals = ?4
            AND bytes_in = ?5 AND bytes_out = ?6";
        let transaction = self
            .0
            .transaction_with_behavior(TransactionBehavior::Immediate)?;
        for UsageRow {
            date,
            label,
            amounts,
        } in rows
        {
            let [requests, refusals, bytes_in, bytes_out] = amounts.to_columns();
            transaction.prepare_cached(MARK)?.execute(params![
                date, label, requests, refusals, bytes_in, bytes_out
            ])?;
        }
        Ok(transaction.commit()?)
    }

    pub(super) fn delete_before(&self, oldest: &str) -> Result<(), FileError> {
        self.0
            .execute("DELETE FROM usage WHERE date < ?1", [oldest])?;
        Ok(())
    }
}

fn read(row: &Row<'_>) -> rusqlite::Result<UsageRow> {
    let counts = [row.get(2)?, row.get(3)?, row.get(4)?, row.get(5)?];
    Ok(UsageRow {
        date: row.get(0)?,
        label: row.get(1)?,
        amounts: UsageAmounts::from_columns(counts),
    })
}
