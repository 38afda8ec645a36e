//! Figures of the parts, and which of them must hold.

use crate::failure::{Failure, ensure};
use crate::report::say;

/// Figures of one situation.
pub(super) struct Row {
    situation: String,
    figures: Vec<String>,
    missed: Vec<String>,
}

#[derive(Default)]
pub(super) struct Table {
    rows: Vec<Row>,
}

impl Row {
    pub(super) fn new(situation: impl Into<String>) -> Self {
        Self {
            situation: situation.into(),
            figures: Vec::new(),
            missed: Vec::new(),
        }
    }

    /// Adds a figure that must hold.
    pub(super) fn check(mut self, holds: bool, figure: String) -> Self {
        let list = if holds {
            &mut self.figures
        } else {
            &mut self.missed
        };
        list.push(figure);
        self
    }

    /// Adds a figure for information.
    pub(super) fn note(self, figure: String) -> Self {
        self.check(true, figure)
    }

    fn say(&self) {
        let missed = self.missed.iter().map(|figure| format!("MISSED: {figure}"));
        let figures: Vec<String> = missed.chain(self.figures.iter().cloned()).collect();
        say(format_args!(
            "| {} | {} |",
            self.situation,
            figures.join("; ")
        ));
    }
}

impl Table {
    pub(super) fn add(&mut self, row: Row) {
        row.say();
        self.rows.push(row);
    }

    /// Adds a row that could perhaps not be measured.
    pub(super) fn add_or_failed(&mut self, situation: &str, row: Result<Row, Failure>) {
        self.add(
            row.unwrap_or_else(|failure| Row::new(situation).check(false, failure.to_string())),
        );
    }

    /// Prints all rows. Fails if one has missed a figure.
    pub(super) fn conclude(self) -> Result<(), Failure> {
        say(format_args!("\n| situation | figures |\n|---|---|"));
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
