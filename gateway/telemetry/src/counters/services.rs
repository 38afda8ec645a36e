//! Counters of ended requests by service, on one worker.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::limits;
use gw_shared::telemetry::metrics::{Exposition, Histogram, Kind};
use gw_store::{Directory, label_of};

/// Label of services without a place in the table. The label of a service contains `--`.
pub const OTHER: &str = "other";

/// Classes of requests by the status of the final response; the last is for requests without one.
pub const CLASSES: [&str; 6] = ["1xx", "2xx", "3xx", "4xx", "5xx", "none"];

// The counters of all services and the copy in a report take at most 2 MiB per worker.
const _: () =
    assert!(2 * limits::SERVICES_COUNTED * (size_of::<ServiceStats>() + 128) <= 2 * 1024 * 1024);

/// Data of one ended request.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// Status of the final response; `None` if there was none.
    pub status: Option<u16>,
    /// Code of the gateway's error, if it answered with one.
    pub code: Option<&'static str>,
    /// Bytes of the request body.
    pub bytes_in: u64,
    /// Bytes of the response body.
    pub bytes_out: u64,
    /// Time from the request's head to the end of the response.
    pub total: Duration,
    /// Time from the request's head to the response's head; `None` if there was no response.
    pub response_head: Option<Duration>,
    /// The request log has no record of it, because its caller did not authenticate.
    pub is_left_out: bool,
}

/// Counts since the worker started.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServiceStats {
    /// Requests by class, in the order of [`CLASSES`].
    pub classes: [u64; CLASSES.len()],
    /// Gateway errors by code. The set of codes is small and closed.
    pub codes: Vec<(&'static str, u64)>,
    /// Bytes of request bodies.
    pub bytes_in: u64,
    /// Bytes of response bodies.
    pub bytes_out: u64,
    /// Times from the request's head to the end of the response.
    pub total: Histogram,
    /// Times from the request's head to the response's head.
    pub response_head: Histogram,
    /// Requests without a record in the request log, because their callers did not authenticate.
    pub left_out: u64,
}

/// Counters of one service in a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceReport {
    /// `{account}--{service}@{created_ms}`, or [`OTHER`].
    pub label: Arc<str>,
    /// Counts of the service.
    pub stats: ServiceStats,
}

/// Counters of the services of one worker. Their number is bounded; further services are counted
/// together.
#[derive(Debug, Default)]
pub struct ServiceCounters {
    /// With the time of creation of the service that they are of.
    by_label: RefCell<HashMap<Arc<str>, (u64, ServiceStats)>>,
    other: RefCell<ServiceStats>,
    /// A request was counted as [`OTHER`].
    overflowed: Cell<bool>,
}

impl ServiceCounters {
    /// Counts an ended request of the service `label` that was created at `created_ms`, on the
    /// worker of its caller's connection. Ignores a request of an earlier service of this name.
    pub fn ended(&self, label: &Arc<str>, created_ms: u64, sample: Sample) {
        let mut services = self.by_label.borrow_mut();
        if let Some((counted, stats)) = services.get_mut(&**label) {
            if *counted < created_ms {
                (*counted, *stats) = (created_ms, ServiceStats::default());
            }
            if *counted == created_ms {
                stats.count(sample);
            }
        } else if services.len() < limits::SERVICES_COUNTED {
            let mut stats = ServiceStats::default();
            stats.count(sample);
            services.insert(Arc::clone(label), (created_ms, stats));
        } else {
            self.overflowed.set(true);
            self.other.borrow_mut().count(sample);
        }
    }

    /// Removes deleted services, which frees their places.
    pub fn retain(&self, directory: &Directory) {
        self.by_label
            .borrow_mut()
            .retain(|label, (created_ms, _)| directory.is_service(label, *created_ms));
    }

    /// Copies the counts of each service; those of services without a place in the table are summed
    /// as [`OTHER`].
    pub fn report(&self) -> Vec<ServiceReport> {
        let services = self.by_label.borrow();
        let report =
            |(label, (created_ms, stats)): (&Arc<str>, &(u64, ServiceStats))| ServiceReport {
                label: format!("{label}@{created_ms}").into(),
                stats: stats.clone(),
            };
        let mut reports: Vec<ServiceReport> = services.iter().map(report).collect();
        if self.overflowed.get() {
            reports.push(ServiceReport {
                label: OTHER.into(),
                stats: self.other.borrow().clone(),
            });
        }
        reports
    }
}

impl ServiceStats {
    fn count(&mut self, sample: Sample) {
        let class = sample.status.map_or(CLASSES.len() - 1, |status| {
            usize::from((status / 100).clamp(1, 5)) - 1
        });
        self.classes[class] += 1;
        if let Some(code) = sample.code {
            self.count_code(code, 1);
        }
        self.bytes_in = self.bytes_in.saturating_add(sample.bytes_in);
        self.bytes_out = self.bytes_out.saturating_add(sample.bytes_out);
        self.total.observe(sample.total);
        if let Some(response_head) = sample.response_head {
            self.response_head.observe(response_head);
        }
        self.left_out += u64::from(sample.is_left_out);
    }

    fn count_code(&mut self, code: &'static str, count: u64) {
        match self.codes.iter_mut().find(|(known, _)| *known == code) {
            Some((_, so_far)) => *so_far += count,
            None => self.codes.push((code, count)),
        }
    }

    /// Returns the number of ended requests.
    pub fn requests(&self) -> u64 {
        self.classes.iter().sum()
    }

    /// Adds the counters of another worker.
    pub fn add(&mut self, other: &Self) {
        self.classes
            .iter_mut()
            .zip(other.classes)
            .for_each(|(count, more)| *count += more);
        other
            .codes
            .iter()
            .for_each(|(code, count)| self.count_code(code, *count));
        self.bytes_in = self.bytes_in.saturating_add(other.bytes_in);
        self.bytes_out = self.bytes_out.saturating_add(other.bytes_out);
        self.total.add(&other.total);
        self.response_head.add(&other.response_head);
        self.left_out = self.left_out.saturating_add(other.left_out);
    }

    /// Returns the difference to `earlier`; all counts if one is lower than in `earlier`, which
    /// means that counting restarted.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let code_before = |code: &str| {
            earlier
                .codes
                .iter()
                .find(|(known, _)| *known == code)
                .map_or(0, |it| it.1)
        };
        let continues = self
            .classes
            .iter()
            .zip(earlier.classes)
            .all(|(now, before)| *now >= before)
            && self
                .codes
                .iter()
                .all(|(code, now)| *now >= code_before(code))
            && self.left_out >= earlier.left_out
            && self.bytes_in >= earlier.bytes_in
            && self.bytes_out >= earlier.bytes_out;
        if !continues {
            return self.clone();
        }
        let mut delta = self.clone();
        delta
            .classes
            .iter_mut()
            .zip(earlier.classes)
            .for_each(|(count, before)| *count -= before);
        delta
            .codes
            .iter_mut()
            .for_each(|(code, count)| *count -= code_before(code));
        delta.codes.retain(|(_, count)| *count > 0);
        delta.bytes_in -= earlier.bytes_in;
        delta.bytes_out -= earlier.bytes_out;
        delta.total = self.total.since(&earlier.total);
        delta.response_head = self.response_head.since(&earlier.response_head);
        delta.left_out -= earlier.left_out;
        delta
    }
}

/// Adds the reports of several workers by service, in the order of their labels, which have no time
/// of creation then.
pub fn merged<'a>(reports: impl IntoIterator<Item = &'a ServiceReport>) -> Vec<ServiceReport> {
    let mut sums: std::collections::BTreeMap<&str, ServiceStats> =
        std::collections::BTreeMap::new();
    for ServiceReport { label, stats } in reports {
        sums.entry(label_of(label)).or_default().add(stats);
    }
    sums.into_iter()
        .map(|(label, stats)| ServiceReport {
            label: label.into(),
            stats,
        })
        .collect()
}

/// Writes the metrics of services.
pub fn write(out: &mut Exposition, services: &[ServiceReport]) {
    let mut family = out.family(
        "gw_service_requests_total",
        Kind::Counter,
        "Ended requests, by class of their status.",
    );
    for ServiceReport { label, stats } in services {
        for (class, count) in CLASSES
            .into_iter()
            .zip(stats.classes)
            .filter(|(_, count)| *count > 0)
        {
            family.sample(&[("service", label), ("class", class)], count);
        }
    }
    let mut family = out.family(
        "gw_service_errors_total",
        Kind::Counter,
        "Requests that the gateway answered with an error.",
    );
    for ServiceReport { label, stats } in services {
        stats
            .codes
            .iter()
            .for_each(|(code, count)| family.sample(&[("service", label), ("code", code)], count));
    }
    let mut sums = |name, help, value: fn(&ServiceReport) -> u64| {
        let mut family = out.family(name, Kind::Counter, help);
        services
            .iter()
            .for_each(|service| family.sample(&[("service", &service.label)], value(service)));
    };
    sums(
        "gw_service_request_bytes_total",
        "Bytes of request bodies.",
        |service| service.stats.bytes_in,
    );
    sums(
        "gw_service_response_bytes_total",
        "Bytes of response bodies.",
        |service| service.stats.bytes_out,
    );
    sums(
        "gw_service_records_left_out_total",
        "Unauthenticated requests that were not recorded in the request log, beyond their rate.",
        |service| service.stats.left_out,
    );
    let help = "Time from a request's head to the end of its response.";
    let mut family = out.family("gw_service_request_duration_seconds", Kind::Histogram, help);
    services
        .iter()
        .for_each(|service| family.histogram(&[("service", &service.label)], &service.stats.total));
    let help = "Time from a request's head to the head of its response.";
    let mut family = out.family(
        "gw_service_time_to_first_byte_seconds",
        Kind::Histogram,
        help,
    );
    services.iter().for_each(|service| {
        family.histogram(&[("service", &service.label)], &service.stats.response_head);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    const OK: Sample = Sample {
        status: Some(200),
        code: None,
        bytes_in: 10,
        bytes_out: 1000,
        total: Duration::from_millis(3),
        response_head: Some(Duration::from_millis(2)),
        is_left_out: false,
    };
    const LIMITED: Sample = Sample {
        status: Some(429),
        code: Some("GW_RATE_LIMIT_EXCEEDED"),
        bytes_in: 0,
        bytes_out: 80,
        total: Duration::from_micros(20),
        response_head: None,
        is_left_out: true,
    };

    fn label(text: &str) -> Arc<str> {
        text.into()
    }

    #[test]
    fn requests_are_counted_by_class_and_code_with_their_bytes_and_durations() {
        let services = ServiceCounters::default();
        let api = label("acme--api");
        for sample in [
            OK,
            OK,
            LIMITED,
            Sample { status: None, ..OK },
            Sample {
                status: Some(999),
                ..OK
            },
        ] {
            services.ended(&api, 1, sample);
        }
        let [report] = &services.report()[..] else {
            panic!("one service")
        };
        assert_eq!(
            (&*report.label, report.stats.requests()),
            ("acme--api@1", 5)
        );
        assert_eq!(report.stats.classes, [0, 2, 0, 1, 1, 1]);
        assert_eq!(report.stats.codes, [("GW_RATE_LIMIT_EXCEEDED", 1)]);
        let stats = &report.stats;
        assert_eq!(
            (stats.bytes_in, stats.bytes_out, stats.left_out),
            (40, 4080, 1)
        );
        assert_eq!(
            (
                report.stats.total.count(),
                report.stats.response_head.count()
            ),
            (5, 4)
        );
        assert_eq!(report.stats.total.sum(), Duration::from_micros(12_020));
    }

    #[test]
    fn services_beyond_the_maximum_are_counted_together_and_deleted_services_free_their_places() {
        let services = ServiceCounters::default();
        for number in 0..limits::SERVICES_COUNTED + 2 {
            services.ended(&label(&format!("acme--s{number}")), 1, OK);
        }
        services.ended(&label("acme--s0"), 1, OK);
        let reports = services.report();
        assert_eq!(reports.len(), limits::SERVICES_COUNTED + 1);
        let of = |name: &str| {
            reports
                .iter()
                .find(|report| &*report.label == name)
                .unwrap()
                .stats
                .requests()
        };
        assert_eq!((of(OTHER), of("acme--s0@1"), of("acme--s7@1")), (2, 2, 1));
        services.retain(&Directory::default());
        services.ended(&label("acme--new"), 1, OK);
        assert_eq!(
            services
                .report()
                .iter()
                .map(|report| &*report.label)
                .collect::<Vec<_>>(),
            ["acme--new@1", OTHER]
        );
    }

    #[test]
    fn a_service_that_is_created_again_is_counted_from_zero() {
        let services = ServiceCounters::default();
        for created_ms in [1, 1, 2, 1, 2, 2] {
            services.ended(&label("acme--api"), created_ms, OK);
        }
        let [report] = &services.report()[..] else {
            panic!("one service")
        };
        assert_eq!(
            (&*report.label, report.stats.requests()),
            ("acme--api@2", 3)
        );
    }

    #[test]
    fn workers_are_added_and_since_returns_the_difference() {
        let one = ServiceCounters::default();
        let two = ServiceCounters::default();
        one.ended(&label("b--b"), 1, OK);
        two.ended(&label("a--a"), 1, OK);
        two.ended(&label("b--b"), 1, LIMITED);
        let both = [one.report(), two.report()].concat();
        let sums = merged(&both);
        assert_eq!(
            sums.iter()
                .map(|sum| (&*sum.label, sum.stats.requests()))
                .collect::<Vec<_>>(),
            [("a--a", 1), ("b--b", 2)]
        );

        let before = &one.report()[0].stats;
        let now = &sums[1].stats;
        assert_eq!(
            now.since(before),
            two.report()
                .iter()
                .find(|report| &*report.label == "b--b@1")
                .unwrap()
                .stats
        );
        assert_eq!(now.since(now), ServiceStats::default());
        assert_eq!(before.since(now), *before, "counting restarted");
    }
}
