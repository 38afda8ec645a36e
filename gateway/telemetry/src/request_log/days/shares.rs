//! Bytes that each account has in the file of a day, and the share of the day that it may use.
//!
//! Shares are enforced when records are written. Files are removed as a whole, so an account
//! without a share could cost the others their days.

use std::collections::HashMap;

use rusqlite::{Connection, params};

use super::day_file::OrderedRecord;
use crate::request_log::LogError;

/// Estimated bytes of a record without its target.
const RECORD: u64 = 64;

/// Shares of one day.
#[derive(Default)]
pub(crate) struct Shares {
    accounts: HashMap<Box<str>, Share>,
    /// Bytes of all accounts.
    total: u64,
    /// Bytes that the file may have.
    day_bytes: u64,
    pub(crate) left_out: LeftOut,
}

#[derive(Default)]
struct Share {
    /// Bytes in the file, and estimated ones of the commit in progress.
    bytes: u64,
    added: u64,
    is_told: bool,
}

/// Records, and captures of other records, for which there was no share.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct LeftOut {
    pub(crate) records: u64,
    pub(crate) captures: u64,
}

impl Shares {
    /// Reads the shares in a file.
    pub(crate) fn load(connection: &Connection) -> Result<Self, LogError> {
        // Not a migration: a version of the program without shares ignores the table.
        connection.execute_batch(
            "CREATE TABLE IF NOT EXISTS share (account TEXT PRIMARY KEY, bytes INTEGER NOT NULL) \
             STRICT",
        )?;
        let mut shares = Self::default();
        let mut select = connection.prepare("SELECT account, bytes FROM share")?;
        let mut rows = select.query([])?;
        while let Some(row) = rows.next()? {
            let bytes = row.get::<_, i64>(1)?.unsigned_abs();
            let share = shares.accounts.entry(row.get(0)?).or_default();
            share.bytes = bytes;
            shares.total += bytes;
        }
        Ok(shares)
    }

    /// Returns the records for which their accounts have a share of a day of `day_bytes`.
    pub(crate) fn admit<'a>(
        &mut self,
        entries: &[OrderedRecord<'a>],
        day_bytes: u64,
    ) -> Vec<OrderedRecord<'a>> {
        self.day_bytes = day_bytes;
        let bytes = |entry: &OrderedRecord<'_>| RECORD + entry.record.target.len() as u64;
        let mut admitted = entries.to_vec();
        admitted.retain(|entry| self.take(entry.account(), bytes(entry), 2));
        self.left_out = LeftOut {
            records: (entries.len() - admitted.len()) as u64,
            captures: 0,
        };
        admitted
    }

    /// Whether the account has a share for the captured messages of a record, which take `bytes`.
    pub(crate) fn admit_capture(&mut self, account: &str, bytes: u64) -> bool {
        let is_admitted = self.take(account, bytes, 4);
        self.left_out.captures += u64::from(!is_admitted);
        is_admitted
    }

    /// Takes `bytes` for the account, which may have one of `part` parts of what the others leave.
    fn take(&mut self, account: &str, bytes: u64, part: u64) -> bool {
        let share = self.accounts.entry(account.into()).or_default();
        let others = self.total - share.bytes - share.added;
        let most = self.day_bytes.saturating_sub(others) / part;
        if share.bytes + share.added + bytes <= most {
            share.added += bytes;
            self.total += bytes;
            return true;
        }
        if !std::mem::replace(&mut share.is_told, true) {
            tracing::warn!(
                %account,
                "request log: the account has used its share of the day: captured bodies are left \
                 out, then records; raise request_log_max_bytes"
            );
        }
        false
    }

    /// Writes the shares after a commit, by which the file grows by `grown` bytes.
    pub(crate) fn save(&mut self, connection: &Connection, grown: u64) -> Result<(), LogError> {
        let estimated: u64 = self.accounts.values().map(|share| share.added).sum();
        // Another process may add to the same file during an upgrade.
        let mut add = connection.prepare_cached(
            "INSERT INTO share VALUES (?1, ?2) ON CONFLICT DO UPDATE SET bytes = bytes + \
             excluded.bytes",
        )?;
        for (account, share) in self
            .accounts
            .iter_mut()
            .filter(|(_, share)| share.added > 0)
        {
            let part = u128::from(grown) * u128::from(share.added) / u128::from(estimated);
            add.execute(params![account, part as i64])?;
            share.bytes += part as u64;
            share.added = 0;
        }
        self.total = self.accounts.values().map(|share| share.bytes).sum();
        Ok(())
    }
}
