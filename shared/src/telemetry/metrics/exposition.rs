//! Prometheus' text format (exposition format 0.0.4).
//!
//! The crate `prometheus-client` (0.25) is not used, because its text encoder writes OpenMetrics
//! 1.0 only:
//! - It declares a counter without the suffix of its samples (`# TYPE gw_requests counter`, then
//!   `gw_requests_total 2`). In format 0.0.4 these are two metrics, the second without type and
//!   help, and `promtool check metrics` rejects each counter ("no help text"). The text would have
//!   to be served as `application/openmetrics-text` whatever the scraper accepts.
//! - It writes the bounds of buckets as `le="1.0"`. Here they are `le="1"`: in Prometheus 2 another
//!   value of `le` is another time series, so that histograms would be interrupted.
//! - Its `Collector` is `Send + Sync + 'static`. The agent's counters are in `Rc` and `Cell`, so
//!   that each scrape would copy them into a tree of families first. This module writes them as it
//!   reads them.

use std::fmt::{Display, Write};

use super::Histogram;
use super::histogram::BOUNDS_NS;

/// `Content-Type` of the text.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Never decreases. The name ends in `_total`.
    Counter,
    Gauge,
    Histogram,
}

/// Text to which metrics are appended.
#[derive(Debug, Default)]
pub struct Exposition(String);

/// Appends the samples of one metric.
pub struct Family<'a> {
    text: &'a mut String,
    name: &'a str,
}

impl Exposition {
    /// Begins a metric. `help` is one sentence. Each name must be used once.
    pub fn family<'a>(&'a mut self, name: &'a str, kind: Kind, help: &str) -> Family<'a> {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        // Writing to a String cannot fail, here and below.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
        Family {
            text: &mut self.0,
            name,
        }
    }

    /// Appends a metric with one sample and no labels.
    pub fn single(&mut self, name: &str, kind: Kind, help: &str, value: impl Display) {
        self.family(name, kind, help).sample(&[], value);
    }

    pub fn into_text(self) -> String {
        self.0
    }
}

impl Family<'_> {
    pub fn sample(&mut self, labels: &[(&str, &str)], value: impl Display) {
        self.write("", labels, None, value);
    }

    /// Appends the samples of a histogram, in seconds.
    pub fn histogram(&mut self, labels: &[(&str, &str)], histogram: &Histogram) {
        let mut cumulative = 0;
        for (at, count) in histogram.counts().iter().enumerate() {
            cumulative += count;
            let bound = BOUNDS_NS
                .get(at)
                .map_or("+Inf".to_owned(), |ns| (*ns as f64 / 1e9).to_string());
            self.write("_bucket", labels, Some(&bound), cumulative);
        }
        self.write("_sum", labels, None, histogram.sum().as_secs_f64());
        self.write("_count", labels, None, cumulative);
    }

    fn write(
        &mut self,
        suffix: &str,
        labels: &[(&str, &str)],
        bound: Option<&str>,
        value: impl Display,
    ) {
        self.text.push_str(self.name);
        self.text.push_str(suffix);
        let labels = labels
            .iter()
            .copied()
            .chain(bound.map(|bound| ("le", bound)));
        let mut opened = false;
        for (name, value) in labels {
            self.text.push(if opened { ',' } else { '{' });
            opened = true;
            let _ = write!(self.text, "{name}=\"");
            for character in value.chars() {
                match character {
                    '\\' => self.text.push_str("\\\\"),
                    '"' => self.text.push_str("\\\""),
                    '\n' => self.text.push_str("\\n"),
                    other => self.text.push(other),
                }
            }
            self.text.push('"');
        }
        if opened {
            self.text.push('}');
        }
        let _ = writeln!(self.text, " {value}");
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn family_has_help_type_and_samples() {
        let mut text = Exposition::default();
        text.single("a_total", Kind::Counter, "All.", 3);
        let mut family = text.family("b", Kind::Gauge, "Some.");
        family.sample(&[("x", "1"), ("y", "a\"b\\c\nd")], 0.5);
        assert_eq!(
            text.into_text(),
            "# HELP a_total All.\n# TYPE a_total counter\na_total 3\n\
             # HELP b Some.\n# TYPE b gauge\nb{x=\"1\",y=\"a\\\"b\\\\c\\nd\"} 0.5\n"
        );
    }

    #[test]
    fn histogram_buckets_are_cumulative_and_in_seconds() {
        let mut histogram = Histogram::default();
        [100, 300, 70_000_000]
            .iter()
            .for_each(|us| histogram.observe(Duration::from_micros(*us)));
        let mut text = Exposition::default();
        text.family("d_seconds", Kind::Histogram, "Durations.")
            .histogram(&[("s", "x")], &histogram);
        let text = text.into_text();
        for line in [
            "d_seconds_bucket{s=\"x\",le=\"0.00025\"} 1",
            "d_seconds_bucket{s=\"x\",le=\"0.0005\"} 2",
            "d_seconds_bucket{s=\"x\",le=\"60\"} 2",
            "d_seconds_bucket{s=\"x\",le=\"+Inf\"} 3",
            "d_seconds_sum{s=\"x\"} 70.0004",
            "d_seconds_count{s=\"x\"} 3",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }
}
