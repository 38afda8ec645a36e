//! The terminal's table.

use crate::scenarios::compare::figures::{Case, Column, Row};
use crate::scenarios::compare::setups::Kind;

const HEADINGS: [&str; 18] = [
    "section",
    "case",
    "setup",
    "user",
    "kernel",
    "CPU",
    "unit",
    "rate",
    "unit",
    "p50 ms",
    "p99 ms",
    "p99.9 ms",
    "bytes",
    "calls",
    "sleeps",
    "gw ÷",
    "× null",
    "× null, TLS",
];

/// Formats all cases as one Markdown table.
pub(crate) fn table(cases: &[Case]) -> String {
    let heading = HEADINGS.map(str::to_owned);
    let rows = cases
        .iter()
        .flat_map(|case| case.rows.iter().map(move |row| cells(case, row)));
    let rule = HEADINGS.map(|_| "---".to_owned());
    let lines = [heading, rule].into_iter().chain(rows);
    lines
        .map(|cells| format!("| {} |\n", cells.join(" | ")))
        .collect()
}

fn cells(case: &Case, row: &Row) -> [String; HEADINGS.len()] {
    let value = |column| row.median(column).map(number).unwrap_or_default();
    let [null, null_tls] = Kind::FLOORS.map(|floor| case.multiple(row, floor.name()));
    let ratio = |ratio: Option<f64>| ratio.map(|ratio| format!("{ratio:.2}")).unwrap_or_default();
    let unit = |column, unit: &str| {
        if row.median(column).is_some() {
            unit.to_owned()
        } else {
            String::new()
        }
    };
    [
        case.section.to_owned(),
        case.name.clone(),
        row.setup.clone(),
        value(Column::User),
        value(Column::Kernel),
        value(Column::Cpu),
        unit(Column::Cpu, case.work.cpu_unit()),
        value(Column::Rate),
        unit(Column::Rate, case.work.rate_unit()),
        value(Column::P50),
        value(Column::P99),
        value(Column::P999),
        value(Column::Bytes),
        value(Column::Calls),
        value(Column::Sleeps),
        ratio(case.ratio(row)),
        ratio(null),
        ratio(null_tls),
    ]
}

/// A number with about three significant digits.
pub(super) fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenarios::compare::figures::example;

    #[test]
    fn tables_leave_out_what_was_not_measured() {
        let text = table(&example());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[3],
            "| http1 | 16 callers | haproxy | 12.0 | 8.00 | 20.0 | µs/request |  |  |  | 1.50 \
             |  |  |  |  | 0.50 |  |  |"
        );
        assert!(
            lines[4].starts_with("| idle | a <caller> | gw |  |"),
            "{text}"
        );
        let cells = |line: &str| line.split('|').count();
        assert!(lines.iter().all(|line| cells(line) == HEADINGS.len() + 2));
    }

    #[test]
    fn numbers_have_three_digits() {
        assert_eq!(
            [0.123, 1.5, 12.34, 123.4, 12_345.6].map(number),
            ["0.12", "1.50", "12.3", "123", "12346"]
        );
    }
}
