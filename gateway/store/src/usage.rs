//! Usage of services by day, as the nodes of a region store it for all of them.

use serde::{Deserialize, Serialize};

/// What one service was used for on one day.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageRow {
    /// Day in UTC, `2026-11-21`.
    pub date: String,
    /// `{account}--{service}@{created_ms}`, or `other` for services without counters of their own.
    pub label: String,
    /// The counts.
    pub amounts: UsageAmounts,
}

/// Counts of usage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageAmounts {
    /// Ended requests.
    pub requests: u64,
    /// Requests among them that the gateway answered with an error of its own.
    pub refusals: u64,
    /// Bytes of request bodies.
    pub bytes_in: u64,
    /// Bytes of response bodies.
    pub bytes_out: u64,
}

/// Selects rows of usage: the newest day first, and the services of a day in the order of their
/// labels.
#[derive(Debug, Clone, Default)]
pub struct UsageQuery {
    /// First day.
    pub since: String,
    /// Last day.
    pub until: String,
    /// Beginning of labels: `acme--` or `acme--api@`; empty for all.
    pub label_prefix: String,
    /// Only rows after this day and label.
    pub after: Option<(String, String)>,
    /// Most rows that are returned.
    pub limit: usize,
}

impl UsageAmounts {
    /// Adds other counts. They may come from a file, and be arbitrary.
    pub fn add(&mut self, other: &Self) {
        let add = |sum: &mut u64, more: u64| *sum = sum.saturating_add(more);
        add(&mut self.requests, other.requests);
        add(&mut self.refusals, other.refusals);
        add(&mut self.bytes_in, other.bytes_in);
        add(&mut self.bytes_out, other.bytes_out);
    }

    /// As columns of a database.
    pub fn to_columns(&self) -> [i64; 4] {
        [self.requests, self.refusals, self.bytes_in, self.bytes_out]
            .map(|count| i64::try_from(count).unwrap_or(i64::MAX))
    }

    /// From columns of a database.
    pub fn from_columns(columns: [i64; 4]) -> Self {
        let [requests, refusals, bytes_in, bytes_out] =
            columns.map(|count| u64::try_from(count).unwrap_or(0));
        Self {
            requests,
            refusals,
            bytes_in,
            bytes_out,
        }
    }
}
