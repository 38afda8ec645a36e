//! Metrics of a gateway or an agent, as its listener answers.

use std::collections::{BTreeMap, BTreeSet};

/// Samples of the text format of Prometheus.
#[derive(Debug)]
pub(crate) struct Metrics {
    /// Names of the metrics, also of those without a sample.
    names: BTreeSet<String>,
    samples: Vec<Sample>,
}

#[derive(Debug)]
struct Sample {
    name: String,
    /// The labels as they are written, without braces.
    labels: String,
    value: f64,
}

impl Metrics {
    pub(crate) fn parse(text: &str) -> Self {
        let sample = |line: &str| {
            let (series, value) = line.rsplit_once(' ').unwrap();
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            Sample {
                name: name.to_owned(),
                labels: labels.trim_end_matches('}').to_owned(),
                value: value.parse().unwrap(),
            }
        };
        let declared = |line: &str| {
            let (name, _) = line.strip_prefix("# TYPE ")?.split_once(' ')?;
            Some(name.to_owned())
        };
        let samples = text
            .lines()
            .filter(|line| !line.starts_with('#') && !line.is_empty());
        Self {
            names: text.lines().filter_map(declared).collect(),
            samples: samples.map(sample).collect(),
        }
    }

    /// The samples of a metric, or of a part of a histogram. Panics if there is no such metric.
    #[track_caller]
    fn of(&self, name: &str) -> impl Iterator<Item = &Sample> {
        let is_part = |part| {
            name.strip_suffix(part)
                .is_some_and(|it| self.names.contains(it))
        };
        let is_known =
            self.names.contains(name) || ["_sum", "_count", "_bucket"].map(is_part).contains(&true);
        assert!(is_known, "no metric {name}");
        let name = name.to_owned();
        self.samples
            .iter()
            .filter(move |sample| sample.name == name)
    }

    /// The sum of a metric over its series; 0 if there is none.
    #[track_caller]
    pub(crate) fn sum(&self, name: &str) -> f64 {
        self.sum_with(name, "")
    }

    /// The sum of a metric over its series whose labels contain `label`, such as
    /// `reason="agent_drained"` or a value alone.
    #[track_caller]
    pub(crate) fn sum_with(&self, name: &str, label: &str) -> f64 {
        self.of(name)
            .filter(|sample| sample.labels.contains(label))
            .map(|sample| sample.value)
            .sum()
    }

    /// As [`Self::sum`], of a metric that counts.
    #[track_caller]
    pub(crate) fn count(&self, name: &str) -> u64 {
        self.sum(name) as u64
    }

    /// As [`Self::sum_with`], of a metric that counts.
    #[track_caller]
    pub(crate) fn count_with(&self, name: &str, label: &str) -> u64 {
        self.sum_with(name, label) as u64
    }

    /// The value of each series of a metric, by its value of `label`; 0 is left out.
    #[track_caller]
    pub(crate) fn by_label(&self, name: &str, label: &str) -> BTreeMap<String, u64> {
        let of_label = |sample: &Sample| {
            let (_, rest) = sample.labels.split_once(&format!("{label}=\""))?;
            let (value, _) = rest.split_once('"')?;
            Some((value.to_owned(), sample.value as u64)).filter(|(_, value)| *value > 0)
        };
        self.of(name).filter_map(of_label).collect()
    }
}
