//! Output of the report and formatting of numbers.

use std::fmt;
use std::io::{self, Write};
use std::time::Duration;

use crate::failure::{Failure, ensure};

/// Prints one line of the report.
pub(crate) fn say(line: fmt::Arguments<'_>) {
    // A closed output does not stop the checks.
    let _ = writeln!(io::stdout().lock(), "{line}");
}

pub(crate) fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

pub(crate) fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// The median; the upper one for an even number of values, 0 for none.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// The value that `per_mille` thousandths of `sorted` do not exceed; 0 for none.
pub(crate) fn per_mille(sorted: &[Duration], per_mille: usize) -> Duration {
    let rank = (sorted.len() * per_mille).div_ceil(1000);
    sorted
        .get(rank.saturating_sub(1))
        .copied()
        .unwrap_or_default()
}

/// A row of a table: its name, and the figures that were measured.
pub(crate) struct Row {
    name: String,
    figures: Vec<String>,
    missed: Vec<String>,
}

/// Rows under a heading of their names.
pub(crate) struct Table {
    heading: &'static str,
    rows: Vec<Row>,
}

impl Row {
    pub(crate) fn new(name: String) -> Self {
        Self {
            name,
            figures: Vec::new(),
            missed: Vec::new(),
        }
    }

    /// Adds a figure that must hold.
    pub(crate) fn check(mut self, holds: bool, figure: impl Into<String>) -> Self {
        let list = if holds {
            &mut self.figures
        } else {
            &mut self.missed
        };
        list.push(figure.into());
        self
    }

    /// Adds a figure for information.
    pub(crate) fn note(self, figure: impl Into<String>) -> Self {
        self.check(true, figure)
    }

    pub(crate) fn has_missed(&self) -> bool {
        !self.missed.is_empty()
    }

    fn say(&self) {
        let missed = self.missed.iter().map(|figure| format!("MISSED: {figure}"));
        let figures: Vec<String> = missed.chain(self.figures.iter().cloned()).collect();
        say(format_args!("| {} | {} |", self.name, figures.join("; ")));
    }
}

impl Table {
    pub(crate) fn new(heading: &'static str) -> Self {
        let rows = Vec::new();
        Self { heading, rows }
    }

    /// Prints a row, and keeps it for the end.
    pub(crate) fn add(&mut self, row: Row) {
        row.say();
        self.rows.push(row);
    }

    /// Prints all rows. Fails if one has missed a figure.
    pub(crate) fn conclude(self) -> Result<(), Failure> {
        say(format_args!("\n| {} | figures |\n|---|---|", self.heading));
        self.rows.iter().for_each(Row::say);
        let missed = self.rows.iter().filter(|row| row.has_missed());
        let missed = missed.count();
        ensure(missed == 0, || {
            format!("{missed} of {} rows miss a figure", self.rows.len())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_thousandths() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([]), 0.0);
        let sorted: Vec<Duration> = (1..=1000).map(Duration::from_millis).collect();
        assert_eq!(per_mille(&sorted, 500), Duration::from_millis(500));
        assert_eq!(per_mille(&sorted, 999), Duration::from_millis(999));
        assert_eq!(per_mille(&sorted[..1], 990), Duration::from_millis(1));
    }
}
