//! Results of the sections.

use std::time::Duration;

use crate::callers::Outcome;
use crate::failure::{Failure, ensure};
use crate::report::{millis, say};

/// Result of one run of callers.
pub(super) struct Row {
    name: String,
    /// Requests, failures and latencies.
    figures: String,
    findings: Vec<String>,
    missed: Vec<String>,
}

#[derive(Default)]
pub(super) struct Table {
    rows: Vec<Row>,
}

impl Row {
    pub(super) fn new(name: String, outcome: &Outcome) -> Self {
        let (slowest, p50, p99) = outcome.figures();
        let figures = format!(
            "{} | {} | {:.1} ms | {:.1} ms | {:.0} ms",
            outcome.answered.len() + outcome.failed.len(),
            failures(outcome),
            millis(p50),
            millis(p99),
            millis(slowest)
        );
        let row = Self {
            name,
            figures,
            findings: Vec::new(),
            missed: Vec::new(),
        };
        for failed in outcome.failed.iter().take(3) {
            let method = if failed.is_post { "POST" } else { "GET" };
            let after = millis(failed.ended - failed.began);
            say(format_args!(
                "agents: {}: {method}: {} after {after:.0} ms",
                row.name, failed.what
            ));
        }
        row
    }

    /// A section that could not be measured.
    pub(super) fn failed(name: &str, failure: &Failure) -> Self {
        let figures = "| | | |".to_owned();
        Self {
            name: name.to_owned(),
            figures,
            findings: Vec::new(),
            missed: vec![failure.to_string()],
        }
    }

    /// Adds a figure that must hold.
    pub(super) fn check(mut self, holds: bool, finding: String) -> Self {
        let list = if holds {
            &mut self.findings
        } else {
            &mut self.missed
        };
        list.push(finding);
        self
    }

    /// Adds a figure for information.
    pub(super) fn note(self, finding: String) -> Self {
        self.check(true, finding)
    }

    /// Requires that no caller has noticed anything.
    pub(super) fn check_no_failure(self, outcome: &Outcome) -> Self {
        let failures = failures(outcome);
        self.check(failures == 0, format!("{failures} failures"))
    }
}

/// Requests without an answer, and those whose connection ended before it, so that the caller sent
/// them again.
fn failures(outcome: &Outcome) -> usize {
    outcome.failed.len() + outcome.sent_again
}

/// A share as a percentage.
pub(super) fn percent(part: u64, whole: u64) -> f64 {
    100.0 * part as f64 / whole.max(1) as f64
}

pub(super) fn seconds(duration: Duration) -> f64 {
    duration.as_secs_f64()
}

impl Table {
    pub(super) fn add(&mut self, rows: Vec<Row>) {
        rows.iter().for_each(Row::say);
        self.rows.extend(rows);
    }

    /// Prints all rows. Fails if one has missed a figure.
    pub(super) fn conclude(self) -> Result<(), Failure> {
        say(format_args!(
            "\n| section | requests | failed | p50 | p99 | slowest | figures |\n\
             |---|---|---|---|---|---|---|"
        ));
        self.rows.iter().for_each(Row::say);
        let missed = self
            .rows
            .iter()
            .filter(|row| !row.missed.is_empty())
            .count();
        ensure(missed == 0, || {
            format!("{missed} of {} rows miss a figure", self.rows.len())
        })
    }
}

impl Row {
    fn say(&self) {
        let missed = self.missed.iter().map(|missed| format!("MISSED: {missed}"));
        let findings: Vec<String> = missed.chain(self.findings.iter().cloned()).collect();
        say(format_args!(
            "| {} | {} | {} |",
            self.name,
            self.figures,
            findings.join("; ")
        ));
    }
}
