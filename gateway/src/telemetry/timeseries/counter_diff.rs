//! From counts that only grow to what has happened since the last look.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::ALL;
use super::totals::Totals;
use crate::telemetry::counters::WorkerReport;
use crate::telemetry::counters::services::{ServiceReport, ServiceStats};

/// The counts of the last look: by worker, so that one that does not answer in time is made up for by its next report,
/// and by label.
#[derive(Default)]
pub(super) struct CounterDiff(HashMap<usize, HashMap<Arc<str>, ServiceStats>>);

impl CounterDiff {
    /// What each service with traffic did since the last call, and all of them together.
    pub(super) fn advance(&mut self, reports: Vec<WorkerReport>) -> BTreeMap<Arc<str>, Totals> {
        let mut totals: BTreeMap<Arc<str>, Totals> = BTreeMap::new();
        let mut all = Totals::default();
        for report in reports {
            let before = self.0.remove(&report.worker.0).unwrap_or_default();
            // Of services that were not reported any more nothing is kept: should they come back, they begin anew.
            let seen = self.0.entry(report.worker.0).or_default();
            for ServiceReport { label, stats } in report.services {
                let delta = before.get(&label).map_or_else(|| stats.clone(), |before| stats.since(before));
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
