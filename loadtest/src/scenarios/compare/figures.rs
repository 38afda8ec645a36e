//! Figures of the comparison: one sample for each round, and their medians.

use crate::machine::procfs::Cpu;
use crate::report::median;

/// A measured quantity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Column {
    User,
    Kernel,
    Cpu,
    Rate,
    P50,
    P99,
    P999,
    Bytes,
    /// System calls.
    Calls,
    /// Times that a thread waits, and is woken up then.
    Sleeps,
}

impl Column {
    /// All columns in the order of their declaration, with their names in JSON.
    pub(super) const ALL: [(Self, &'static str); 10] = [
        (Self::User, "cpu_user"),
        (Self::Kernel, "cpu_kernel"),
        (Self::Cpu, "cpu"),
        (Self::Rate, "rate"),
        (Self::P50, "p50_ms"),
        (Self::P99, "p99_ms"),
        (Self::P999, "p999_ms"),
        (Self::Bytes, "bytes"),
        (Self::Calls, "system_calls"),
        (Self::Sleeps, "sleeps"),
    ];

    /// Name in JSON.
    pub(super) fn key(self) -> &'static str {
        Self::ALL[self as usize].1
    }
}

/// Unit of work that CPU time is divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    Request,
    Connection,
    Gigabyte,
    /// Idle connections and tunnels, which only take memory.
    Idle,
}

impl Work {
    pub(super) fn cpu_unit(self) -> &'static str {
        match self {
            Self::Request => "µs/request",
            Self::Connection => "µs/connection",
            Self::Gigabyte => "s/GB",
            Self::Idle => "",
        }
    }

    pub(super) fn rate_unit(self) -> &'static str {
        match self {
            Self::Request => "requests/s",
            Self::Connection => "connections/s",
            Self::Gigabyte => "MB/s",
            Self::Idle => "",
        }
    }

    /// Seconds of CPU time in the unit of [`Self::cpu_unit`].
    fn cpu(self, seconds: f64) -> f64 {
        match self {
            Self::Request | Self::Connection => seconds * 1e6,
            Self::Gigabyte | Self::Idle => seconds,
        }
    }
}

/// Measurements of one round.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Sample {
    values: [Option<f64>; Column::ALL.len()],
    failures: u64,
}

impl Sample {
    pub(super) fn with_failures(self, failures: u64) -> Self {
        Self { failures, ..self }
    }

    pub(super) fn with(mut self, column: Column, value: f64) -> Self {
        self.values[column as usize] = Some(value);
        self
    }

    /// Adds the CPU time of `amount` units of work, if it is known.
    pub(super) fn with_cpu(self, cpu: impl Into<Option<Cpu>>, work: Work, amount: f64) -> Self {
        let Some(cpu) = cpu.into() else { return self };
        let user = work.cpu(cpu.user.as_secs_f64()) / amount;
        let kernel = work.cpu(cpu.kernel.as_secs_f64()) / amount;
        self.with(Column::User, user)
            .with(Column::Kernel, kernel)
            .with(Column::Cpu, user + kernel)
    }

    fn get(&self, column: Column) -> Option<f64> {
        self.values[column as usize]
    }
}

/// All rounds of one setup.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) setup: String,
    pub(super) rounds: Vec<Sample>,
}

impl Row {
    /// The median of the rounds; `None` if the quantity was not measured.
    pub(super) fn median(&self, column: Column) -> Option<f64> {
        let values: Vec<f64> = self.values(column).collect();
        (!values.is_empty()).then(|| median(values))
    }

    /// The lowest and the highest value of the rounds.
    pub(super) fn range(&self, column: Column) -> Option<(f64, f64)> {
        let lowest = self.values(column).min_by(f64::total_cmp)?;
        Some((lowest, self.values(column).max_by(f64::total_cmp)?))
    }

    pub(super) fn failures(&self) -> u64 {
        self.rounds.iter().map(|round| round.failures).sum()
    }

    fn values(&self, column: Column) -> impl Iterator<Item = f64> {
        self.rounds
            .iter()
            .filter_map(move |round| round.get(column))
    }
}

/// One load on all setups.
#[derive(Debug)]
pub(super) struct Case {
    pub(super) section: &'static str,
    pub(super) name: String,
    pub(super) work: Work,
    /// The quantity that setups are compared by.
    pub(super) headline: Column,
    /// The product's row is the first.
    pub(super) rows: Vec<Row>,
}

impl Case {
    /// A case before its rows.
    pub(super) fn new(
        section: &'static str,
        name: impl Into<String>,
        work: Work,
        headline: Column,
    ) -> Self {
        Self {
            section,
            name: name.into(),
            work,
            headline,
            rows: Vec::new(),
        }
    }

    pub(super) fn with_rows(self, rows: Vec<Row>) -> Self {
        Self { rows, ..self }
    }

    /// Headline of the first row divided by that of `row`.
    pub(super) fn ratio(&self, row: &Row) -> Option<f64> {
        Some(self.rows.first()?.median(self.headline)? / row.median(self.headline)?)
    }

    /// Headline of `row` divided by that of the setup with this name, if it took part.
    pub(super) fn multiple(&self, row: &Row, of: &str) -> Option<f64> {
        let of = self.rows.iter().find(|row| row.setup == of)?;
        Some(row.median(self.headline)? / of.median(self.headline)?)
    }
}

#[cfg(test)]
pub(super) fn example() -> Vec<Case> {
    use std::time::Duration;

    let cpu = |user, kernel| Cpu {
        user: Duration::from_micros(user),
        kernel: Duration::from_micros(kernel),
    };
    let sample = |user, kernel| Sample::default().with_cpu(cpu(user, kernel), Work::Request, 10.0);
    let row = |setup: &str, rounds| Row {
        setup: setup.to_owned(),
        rounds,
    };
    let bytes = Sample::default()
        .with(Column::Bytes, 9000.0)
        .with_failures(2);
    vec![
        Case::new("http1", "16 callers", Work::Request, Column::Cpu).with_rows(vec![
            row("gw", vec![sample(60, 40), sample(100, 100), sample(40, 20)]),
            row("haproxy", vec![sample(120, 80).with(Column::P99, 1.5)]),
        ]),
        Case::new("idle", "a <caller>", Work::Idle, Column::Bytes)
            .with_rows(vec![row("gw", vec![bytes])]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_medians_and_ranges_of_their_rounds() {
        let cases = example();
        let [gw, haproxy] = &cases[0].rows[..] else {
            panic!("two rows")
        };
        let columns = [Column::User, Column::Kernel, Column::Cpu, Column::P99]
            .map(|column| gw.median(column));
        assert_eq!(columns, [Some(6.0), Some(4.0), Some(10.0), None]);
        assert_eq!(gw.range(Column::Cpu), Some((6.0, 20.0)));
        assert_eq!(
            (cases[0].ratio(haproxy), cases[0].ratio(gw)),
            (Some(0.5), Some(1.0))
        );
        let multiples = ["haproxy", "absent"].map(|of| cases[0].multiple(gw, of));
        assert_eq!(multiples, [Some(0.5), None]);
        assert_eq!(cases[1].rows[0].failures(), 2);
    }

    #[test]
    fn cpu_time_is_in_the_unit_of_the_work() {
        let cpu = Cpu {
            user: std::time::Duration::from_secs(3),
            kernel: std::time::Duration::from_secs(1),
        };
        let sample = Sample::default().with_cpu(cpu, Work::Gigabyte, 2.0);
        assert_eq!(
            (sample.get(Column::User), sample.get(Column::Cpu)),
            (Some(1.5), Some(2.0))
        );
    }
}
