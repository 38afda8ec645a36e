//! Comparison of instruction counts with a baseline. The benchmarks are in `benches/`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Growth of a scenario that fails, in percent.
pub const GROWTH_MAX: u64 = 3;

/// Instructions per request of each scenario, and the environment that they were counted in.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// Compiler and processor, which both decide which instructions run.
    pub environment: String,
    pub scenarios: BTreeMap<String, u64>,
}

impl Counts {
    /// Parses the text of a baseline. Fails with the line that is not understood.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut counts = Self::default();
        for line in text
            .lines()
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
        {
            if let Some(environment) = line.strip_prefix("environment ") {
                environment.trim().clone_into(&mut counts.environment);
                continue;
            }
            let parsed = line
                .split_once(' ')
                .and_then(|(name, count)| Some((name, count.trim().parse().ok()?)));
            let (name, count) = parsed.ok_or_else(|| line.to_owned())?;
            counts.scenarios.insert(name.to_owned(), count);
        }
        Ok(counts)
    }

    /// The text of a baseline.
    pub fn to_text(&self) -> String {
        let mut text =
            "# Instructions per request. Written by `benches/instructions --update`.\n".to_owned();
        // Never fails: the target is memory.
        let _ = writeln!(text, "environment {}", self.environment);
        for (name, count) in &self.scenarios {
            let _ = writeln!(text, "{name:<20}{count:>10}");
        }
        text
    }
}

/// What a comparison with the baseline says.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// No scenario has grown by more than [`GROWTH_MAX`].
    Kept,
    /// These scenarios have.
    Grown(Vec<String>),
    /// These scenarios are not in the baseline.
    Missing(Vec<String>),
    /// The counts are of different environments.
    OtherEnvironment,
}

/// Compares the scenarios of `now`.
pub fn compare(baseline: &Counts, now: &Counts) -> Verdict {
    let names = |chosen: &dyn Fn(&str, u64) -> bool| -> Vec<String> {
        let scenarios = now
            .scenarios
            .iter()
            .filter(|(name, count)| chosen(name, **count));
        scenarios.map(|(name, _)| name.clone()).collect()
    };
    let missing = names(&|name, _| !baseline.scenarios.contains_key(name));
    if !missing.is_empty() {
        return Verdict::Missing(missing);
    }
    if baseline.environment != now.environment {
        return Verdict::OtherEnvironment;
    }
    // In integers, which are exact at the limit.
    let grown = names(&|name, count| count * 100 > baseline.scenarios[name] * (100 + GROWTH_MAX));
    if grown.is_empty() {
        Verdict::Kept
    } else {
        Verdict::Grown(grown)
    }
}

/// A table of the scenarios of `now`: before, now, change.
pub fn table(baseline: &Counts, now: &Counts) -> String {
    let mut text = format!(
        "{:<20}{:>10}{:>10}{:>10}\n",
        "scenario", "before", "now", "change"
    );
    for (name, count) in &now.scenarios {
        let (before, changed) = match baseline.scenarios.get(name) {
            Some(before) => (
                before.to_string(),
                format!("{:+.2} %", change(*before, *count)),
            ),
            None => ("-".to_owned(), "-".to_owned()),
        };
        let _ = writeln!(text, "{name:<20}{before:>10}{count:>10}{changed:>10}");
    }
    text
}

/// Change in percent.
fn change(before: u64, now: u64) -> f64 {
    (now as f64 / before.max(1) as f64 - 1.0) * 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(environment: &str, scenarios: &[(&str, u64)]) -> Counts {
        let scenarios = scenarios
            .iter()
            .map(|(name, count)| ((*name).to_owned(), *count))
            .collect();
        Counts {
            environment: environment.to_owned(),
            scenarios,
        }
    }

    #[test]
    fn a_baseline_is_read_as_it_was_written() {
        let written = counts(
            "rustc 1.95.0 (abc 2026-03-21)",
            &[("get", 20_000), ("a-name-of-many-letters", 1)],
        );
        assert_eq!(Counts::parse(&written.to_text()), Ok(written));
        assert_eq!(
            Counts::parse("get 1\nget many\n"),
            Err("get many".to_owned())
        );
    }

    #[test]
    fn growth_beyond_the_limit_fails() {
        let baseline = counts("1", &[("get", 10_000), ("post", 10_000)]);
        assert_eq!(
            compare(&baseline, &counts("1", &[("get", 10_300), ("post", 5)])),
            Verdict::Kept
        );
        let grown = compare(
            &baseline,
            &counts("1", &[("get", 10_301), ("post", 10_000)]),
        );
        assert_eq!(grown, Verdict::Grown(vec!["get".to_owned()]));
    }

    #[test]
    fn counts_of_another_environment_are_not_compared() {
        let baseline = counts("1", &[("get", 10_000)]);
        assert_eq!(
            compare(&baseline, &counts("2", &[("get", 20_000)])),
            Verdict::OtherEnvironment
        );
    }

    #[test]
    fn a_scenario_without_a_baseline_fails() {
        let baseline = counts("1", &[("get", 10_000)]);
        let missing = Verdict::Missing(vec!["post".to_owned()]);
        for environment in ["1", "2"] {
            assert_eq!(
                compare(
                    &baseline,
                    &counts(environment, &[("get", 10_000), ("post", 1)])
                ),
                missing
            );
        }
    }

    #[test]
    fn the_table_has_both_counts_and_the_change() {
        let table = table(
            &counts("1", &[("get", 10_000)]),
            &counts("1", &[("get", 10_250), ("post", 7)]),
        );
        let rows: Vec<Vec<&str>> = table
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(rows[1], ["get", "10000", "10250", "+2.50", "%"]);
        assert_eq!(rows[2], ["post", "-", "7", "-"]);
    }
}
