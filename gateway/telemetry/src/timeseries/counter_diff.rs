//! Differences between successive values of counters that only grow.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::ALL;
use super::totals::Totals;
use crate::counters::WorkerReport;
use crate::counters::services::{ServiceReport, ServiceStats};

/// Last counters of each worker, by label. They are kept per worker: if a worker does not answer in
/// time, its next report includes the missed interval.
#[derive(Default)]
pub(super) struct CounterDiff(HashMap<usize, HashMap<Arc<str>, ServiceStats>>);

impl CounterDiff {
    /// Returns the difference to the last call for each service with traffic, and the sum of all
    /// under [`ALL`].
    pub(super) fn advance(&mut self, reports: Vec<WorkerReport>) -> BTreeMap<Arc<str>, Totals> {
        let mut totals: BTreeMap<Arc<str>, Totals> = BTreeMap::new();
        let mut all = Totals::default();
        for report in reports {
            let before = self.0.remove(&report.worker.0).unwrap_or_default();
            // Services absent from the report are forgotten: if they are reported again, they count
            // from zero.
            let seen = self.0.entry(report.worker.0).or_default();
            for ServiceReport { label, stats } in report.services {
                let delta = before
                    .get(&label)
                    .map_or_else(|| stats.clone(), |before| stats.since(before));
                if delta.requests() > 0 {
                    let delta = Totals::from(&delta);
                    all.add(&delta);
                    totals.entry(Arc::clone(&label)).or_default().add(&delta);
                }
                seen.insert(label, stats);
            }
        }
        if all.requests() > 0 {
            totals.insert(ALL.into(), all);
        }
        totals
    }
}
