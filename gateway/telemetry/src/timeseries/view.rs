//! Queries of the time series, and points as the administration API and the console show them.

use std::collections::BTreeMap;
use std::time::Duration;

use gw_base::clock::Timestamp;
use gw_base::service::hostname::tenant_label;
use gw_shared::id::{AccountId, ServiceId};
use gw_shared::telemetry::metrics::Histogram;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use utoipa::{IntoParams, ToSchema};

use super::file::{KEPT, step_at};
use super::totals::Totals;
use super::{STEP, Selection, SeriesError};
use crate::counters::services::CLASSES;

/// Approximate maximum of points in an answer.
const POINTS: i64 = 500;
/// Seconds between points that an answer may have. Each coarser step is a multiple of those in the
/// file.
const STEPS: [i64; 14] = [
    STEP, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 43_200, 86_400,
];
/// Default interval in seconds.
const SPAN: i64 = 3600;

/// Query of points.
#[derive(Debug, Clone, Default, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct SeriesQuery {
    /// All services of this account; without it, all accounts.
    #[param(pattern = "^[a-z0-9]{3,15}$")]
    pub account: Option<String>,
    /// Service id; needs `account`.
    #[param(pattern = "^[a-z0-9]([a-z0-9-]{0,56}[a-z0-9])?$")]
    pub service: Option<String>,
    /// RFC 3339; an hour before `until` if not given.
    #[param(format = DateTime)]
    pub since: Option<String>,
    /// RFC 3339; now if not given.
    #[param(format = DateTime)]
    pub until: Option<String>,
    /// Least number of seconds between points. The step can be longer: at most some 500 points are
    /// returned, and points older than three hours cover a minute, those older than two days ten
    /// minutes.
    #[param(minimum = 1, maximum = 86400)]
    pub step: Option<i64>,
    /// In a region of several nodes: whether to answer without the counts of nodes that do not
    /// answer. Otherwise the request is refused (503).
    pub partial: Option<bool>,
}

/// Counts of one step of time.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Point {
    /// Start of the step.
    pub at: Timestamp,
    /// Requests that ended.
    pub requests: u64,
    /// Requests by class, in the order of [`CLASSES`].
    pub classes: [u64; CLASSES.len()],
    /// Gateway errors by code.
    pub errors: BTreeMap<String, u64>,
    /// Bytes of request bodies.
    pub bytes_in: u64,
    /// Bytes of response bodies.
    pub bytes_out: u64,
    /// Total duration at the 50th, 90th and 99th percentile in milliseconds; `None` without
    /// requests.
    pub quantiles_ms: Option<[f64; 3]>,
}

/// What happened, in points of even length without gaps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Series)]
pub struct SeriesView {
    /// Start of the first point: RFC 3339.
    #[schema(format = DateTime)]
    pub since: String,
    /// End of the last point: RFC 3339.
    #[schema(format = DateTime)]
    pub until: String,
    /// Seconds that each point covers.
    pub step_seconds: i64,
    /// Points in the order of time.
    pub points: Vec<PointView>,
    /// With `partial=true`: slots of nodes that do not answer, whose counts are missing. Left out
    /// if all answer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing_nodes: Vec<u16>,
}

/// What happened from `at` on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Point)]
pub struct PointView {
    /// Start of the point: RFC 3339.
    #[schema(format = DateTime)]
    pub at: String,
    /// Requests that ended.
    pub requests: u64,
    /// The same by status class (`1xx` to `5xx`; `none`: the caller left before a response).
    pub classes: BTreeMap<String, u64>,
    /// Errors of the gateway by code.
    pub errors: BTreeMap<String, u64>,
    /// Bytes of request bodies.
    pub bytes_in: u64,
    /// Bytes of response bodies.
    pub bytes_out: u64,
    /// Milliseconds that half of the requests took at most; null without any.
    pub p50_ms: Option<f64>,
    /// Milliseconds that 90 % of the requests took at most; null without any.
    pub p90_ms: Option<f64>,
    /// Milliseconds that 99 % of the requests took at most; null without any.
    pub p99_ms: Option<f64>,
}

/// Checked query: which counts, and an interval in whole steps. All nodes of a region answer the
/// same one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeriesPlan {
    account: Option<String>,
    /// Label of a service: `{account}--{service}`.
    service: Option<String>,
    pub(super) since: i64,
    pub(super) until: i64,
    step: i64,
}

/// Counts of each step of a [`SeriesPlan`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SeriesCounts(Vec<Totals>);

impl SeriesPlan {
    /// Checks a query. Fails with [`SeriesError::Invalid`] if a parameter is invalid.
    pub fn check(query: &SeriesQuery, now: Timestamp) -> Result<Self, SeriesError> {
        let selection = match (&query.account, &query.service) {
            (None, None) => Selection::All,
            (None, Some(_)) => return Err(invalid("service", "needs an account")),
            (Some(account), service) => {
                let account = AccountId::new(account)
                    .map_err(|error| invalid("account", error.to_string()))?;
                match service {
                    None => Selection::Account(account.to_string()),
                    Some(service) => {
                        let service = ServiceId::new(service)
                            .map_err(|error| invalid("service", error.to_string()))?;
                        let too_long = || {
                            invalid(
                                "service",
                                "the service id is too long together with the account",
                            )
                        };
                        Selection::Service(tenant_label(&account, &service).ok_or_else(too_long)?)
                    }
                }
            }
        };
        let until = time("until", query.until.as_deref())?.unwrap_or(now.0);
        let since = time("since", query.since.as_deref())?.unwrap_or(until.saturating_sub(SPAN));
        if since >= until {
            return Err(invalid("since", "must be before `until`"));
        }
        let step = query.step.unwrap_or(STEP);
        if !(1..=86_400).contains(&step) {
            return Err(invalid("step", "a whole number of seconds from 1 to 86400"));
        }
        Ok(Self::new(selection, since, until, step, now))
    }

    /// Selects points from `since` (inclusive) to `until` (exclusive), which is not empty. The step
    /// is `step` seconds or coarser: as fine as the file, and about 500 points at most. The
    /// interval is limited to the times with points.
    pub fn new(selection: Selection, since: i64, until: i64, step: i64, now: Timestamp) -> Self {
        // There are no points before and after.
        let oldest = now.0 - KEPT;
        let until = until.clamp(oldest + 1, now.0 + STEP);
        let since = since.clamp(oldest, until - 1);
        let least = step
            .max((until - since) / POINTS)
            .max(step_at(now.0 - since));
        let step = STEPS
            .into_iter()
            .find(|step| *step >= least)
            .unwrap_or(STEPS[STEPS.len() - 1]);
        let since = since.div_euclid(step) * step;
        let until = since + (until - since + step - 1).div_euclid(step) * step;
        let (account, service) = match selection {
            Selection::All => (None, None),
            Selection::Account(account) => (Some(account), None),
            Selection::Service(label) => (None, Some(label)),
        };
        Self {
            account,
            service,
            since,
            until,
            step,
        }
    }

    pub(super) fn selection(&self) -> Selection {
        match (&self.account, &self.service) {
            (None, None) => Selection::All,
            (Some(account), None) => Selection::Account(account.clone()),
            (_, Some(label)) => Selection::Service(label.clone()),
        }
    }

    /// Counts of the plan before any was added. Fails if the plan comes from another node and is
    /// not valid.
    pub(super) fn zeros(&self) -> Result<SeriesCounts, SeriesError> {
        let seconds = self
            .until
            .checked_sub(self.since)
            .filter(|seconds| *seconds > 0);
        let steps = seconds
            .filter(|_| STEPS.contains(&self.step))
            .map(|seconds| seconds / self.step);
        let steps = steps
            .filter(|steps| *steps <= 2 * POINTS)
            .ok_or_else(|| invalid("step", "invalid plan"))?;
        Ok(SeriesCounts(
            (0..steps).map(|_| Totals::default()).collect(),
        ))
    }

    pub(super) fn count(&self, counts: &mut SeriesCounts, at: i64, totals: &Totals) {
        let index = at
            .checked_sub(self.since)
            .and_then(|since| usize::try_from(since.div_euclid(self.step)).ok());
        if let Some(point) = index.and_then(|index| counts.0.get_mut(index)) {
            point.add(totals);
        }
    }

    /// Returns the counts of this plan as points, in the order of time.
    pub fn points(&self, counts: SeriesCounts) -> Vec<Point> {
        let times = (self.since..).step_by(usize::try_from(self.step).unwrap_or(1));
        times
            .zip(counts.0)
            .map(|(at, totals)| Point::new(Timestamp(at), totals))
            .collect()
    }

    /// Returns the counts of this plan as the administration API shows them.
    pub fn view(&self, counts: SeriesCounts) -> SeriesView {
        SeriesView {
            since: Timestamp(self.since).to_string(),
            until: Timestamp(self.until).to_string(),
            step_seconds: self.step,
            points: self
                .points(counts)
                .into_iter()
                .map(PointView::from)
                .collect(),
            missing_nodes: Vec::new(),
        }
    }
}

impl SeriesCounts {
    /// Adds the counts of another node for the same plan.
    pub fn add(&mut self, other: &Self) {
        self.0
            .iter_mut()
            .zip(&other.0)
            .for_each(|(sum, more)| sum.add(more));
    }
}

fn time(field: &'static str, text: Option<&str>) -> Result<Option<i64>, SeriesError> {
    let expected = || {
        invalid(
            field,
            "must be a time like `2026-11-21T04:15:32Z` (RFC 3339)",
        )
    };
    let parse =
        |text: &str| OffsetDateTime::parse(text, &Rfc3339).map(OffsetDateTime::unix_timestamp);
    text.map(parse).transpose().map_err(|_| expected())
}

fn invalid(field: &'static str, message: impl Into<String>) -> SeriesError {
    SeriesError::Invalid {
        field,
        message: message.into(),
    }
}

impl Point {
    fn new(at: Timestamp, totals: Totals) -> Self {
        let durations = Histogram::from_counts(totals.durations);
        let quantiles =
            [0.5, 0.9, 0.99].map(|quantile| durations.quantile(quantile).map(rounded_ms));
        Self {
            at,
            requests: totals.requests(),
            classes: totals.classes,
            bytes_in: totals.bytes_in,
            bytes_out: totals.bytes_out,
            errors: totals.codes,
            quantiles_ms: match quantiles {
                [Some(p50), Some(p90), Some(p99)] => Some([p50, p90, p99]),
                _ => None,
            },
        }
    }
}

impl From<Point> for PointView {
    fn from(point: Point) -> Self {
        let classes = CLASSES
            .into_iter()
            .zip(point.classes)
            .filter(|(_, count)| *count > 0);
        let ms = |at: usize| point.quantiles_ms.map(|quantiles| quantiles[at]);
        Self {
            at: point.at.to_string(),
            requests: point.requests,
            classes: classes
                .map(|(class, count)| (class.to_owned(), count))
                .collect(),
            bytes_in: point.bytes_in,
            bytes_out: point.bytes_out,
            p50_ms: ms(0),
            p90_ms: ms(1),
            p99_ms: ms(2),
            errors: point.errors,
        }
    }
}

/// Milliseconds, with microseconds as the fraction.
fn rounded_ms(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp(1_800_000_000);

    #[test]
    fn step_is_as_fine_as_the_file_and_the_maximum_of_points_allow() {
        for (age, length, wanted, step) in [
            (3600, 3600, 10, 10),
            (3600, 3600, 45, 60),
            (3 * 3600, 3 * 3600, 1, 30),
            (86_400, 3600, 10, 60),
            (86_400, 86_400, 10, 300),
            (7 * 86_400, 600, 10, 600),
            (7 * 86_400, 7 * 86_400, 10, 1800),
            (99 * 86_400, 99 * 86_400, 10, 1800),
            // Before the oldest point, and in the future.
            (99 * 86_400, 600, 10, 600),
            (-3600, 600, 10, 10),
        ] {
            let plan = SeriesPlan::new(
                Selection::All,
                NOW.0 - age,
                NOW.0 - age + length,
                wanted,
                NOW,
            );
            assert_eq!(plan.step, step, "{age} {length} {wanted}");
            let count = (plan.until - plan.since) / step;
            assert!(
                (1..=POINTS + 1).contains(&count) && plan.since % step == 0,
                "{plan:?}"
            );
            assert_eq!(plan.zeros().unwrap().0.len() as i64, count);
        }
    }

    #[test]
    fn points_of_one_step_are_added() {
        let plan = SeriesPlan::new(Selection::All, NOW.0, NOW.0 + 60, 30, Timestamp(NOW.0 + 60));
        let mut counts = plan.zeros().unwrap();
        let mut others = plan.zeros().unwrap();
        let mut totals = Totals {
            classes: [0, 9, 0, 0, 1, 0],
            bytes_in: 3,
            bytes_out: 4,
            ..Totals::default()
        };
        totals.codes.insert("GW_X".into(), 1);
        (totals.durations[2], totals.durations[9]) = (9, 1);
        plan.count(&mut counts, NOW.0, &totals);
        plan.count(&mut others, NOW.0 + 20, &totals);
        plan.count(&mut counts, NOW.0 - 1, &totals);
        plan.count(&mut counts, NOW.0 + 60, &totals);
        counts.add(&others);
        let view = plan.view(counts);
        assert_eq!((view.points.len(), view.step_seconds), (2, 30));
        let [first, second] = &view.points[..] else {
            panic!()
        };
        assert_eq!(
            (first.requests, first.bytes_in, first.errors["GW_X"]),
            (20, 6, 2)
        );
        assert_eq!(
            first.classes,
            BTreeMap::from([("2xx".into(), 18), ("5xx".into(), 2)])
        );
        assert!(
            first.p50_ms.unwrap() <= 1.0 && first.p99_ms.unwrap() > 100.0,
            "{first:?}"
        );
        assert_eq!((second.requests, second.p50_ms), (0, None));
        assert_eq!(second.at, Timestamp(NOW.0 + 30).to_string());
    }

    #[test]
    fn invalid_parameters_are_named() {
        let refused = |query: SeriesQuery| SeriesPlan::check(&query, NOW).unwrap_err().to_string();
        let query = SeriesQuery::default;
        assert!(SeriesPlan::check(&query(), NOW).is_ok());
        for (query, field) in [
            (
                SeriesQuery {
                    service: Some("api".into()),
                    ..query()
                },
                "service: ",
            ),
            (
                SeriesQuery {
                    account: Some("*".into()),
                    ..query()
                },
                "account: ",
            ),
            (
                SeriesQuery {
                    since: Some("yesterday".into()),
                    ..query()
                },
                "since: ",
            ),
            (
                SeriesQuery {
                    until: Some(Timestamp(0).to_string()),
                    since: Some(NOW.to_string()),
                    ..query()
                },
                "since: ",
            ),
            (
                SeriesQuery {
                    step: Some(0),
                    ..query()
                },
                "step: ",
            ),
        ] {
            let error = refused(query);
            assert!(error.starts_with(field), "{error}");
        }
    }

    #[test]
    fn plans_of_other_nodes_are_checked() {
        let plan = SeriesPlan::check(&SeriesQuery::default(), NOW).unwrap();
        assert!(plan.zeros().is_ok());
        for (since, until, step) in [
            (0, 60, 7),
            (0, 60, 0),
            (60, 60, 10),
            (i64::MIN, i64::MAX, 10),
            (0, 10_020, 10),
            (10, 0, 10),
        ] {
            let plan = SeriesPlan {
                since,
                until,
                step,
                ..plan.clone()
            };
            assert!(plan.zeros().is_err(), "{plan:?}");
        }
    }
}
