//! Counts of one interval.

use std::collections::BTreeMap;

use gw_shared::telemetry::metrics::histogram::BUCKETS;
use serde::{Deserialize, Serialize};

use crate::counters::services::{CLASSES, ServiceStats};

/// Counts of one interval, which can be added. Serialized as JSON into the file, with short names.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Totals {
    /// Requests by class, in the order of [`CLASSES`].
    #[serde(rename = "c")]
    pub(super) classes: [u64; CLASSES.len()],
    /// Gateway errors by code.
    #[serde(rename = "e", default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) codes: BTreeMap<String, u64>,
    #[serde(rename = "i")]
    pub(super) bytes_in: u64,
    #[serde(rename = "o")]
    pub(super) bytes_out: u64,
    /// Requests by total duration, in the buckets of [`gw_shared::telemetry::metrics::Histogram`].
    #[serde(rename = "d")]
    pub(super) durations: [u64; BUCKETS],
}

impl From<&ServiceStats> for Totals {
    fn from(stats: &ServiceStats) -> Self {
        Self {
            classes: stats.classes,
            codes: stats
                .codes
                .iter()
                .map(|(code, count)| ((*code).to_owned(), *count))
                .collect(),
            bytes_in: stats.bytes_in,
            bytes_out: stats.bytes_out,
            durations: *stats.total.counts(),
        }
    }
}

impl Totals {
    pub(super) fn requests(&self) -> u64 {
        self.classes.iter().sum()
    }

    pub(super) fn add(&mut self, other: &Self) {
        // Values read from a file may be arbitrary.
        let add = |sum: &mut u64, more: u64| *sum = sum.saturating_add(more);
        self.classes
            .iter_mut()
            .zip(other.classes)
            .for_each(|(sum, more)| add(sum, more));
        self.durations
            .iter_mut()
            .zip(other.durations)
            .for_each(|(sum, more)| add(sum, more));
        other
            .codes
            .iter()
            .for_each(|(code, more)| add(self.codes.entry(code.clone()).or_default(), *more));
        add(&mut self.bytes_in, other.bytes_in);
        add(&mut self.bytes_out, other.bytes_out);
    }
}
