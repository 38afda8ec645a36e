//! Reports an ended request to counters, time series, request log and trace.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use gw_shared::clock;
use gw_shared::id::AgentId;
use gw_shared::tunnel::timing::micros;
use gw_telemetry::counters::services::Sample;
use gw_telemetry::request_log::{APEX_LABEL, ATTEMPTS_MAX, RecordedAttempt, RequestRecord, Timing};
use gw_telemetry::trace::{EndedAttempt, GatewaySpan};
use http::uri::Authority;

use super::{ApexRequest, RequestScope, RequestSummary};
use crate::http_message::{FailedAttempt, Outcome};

impl RequestScope {
    pub(super) fn observe(&self, outcome: Outcome) {
        self.observers.counters.ended(outcome);
        let total = self.began.elapsed();
        let is_wanted = self.is_logged() || self.apex.get().is_some();
        let in_log = is_wanted && self.has_room_in_log();
        self.count_for_service(total, is_wanted && !in_log);
        let is_recorded = in_log || self.observers.records_all;
        if !self.is_traced() && !is_recorded {
            return;
        }
        let timing = self.timing(total);
        if self.is_traced() {
            self.end_span(timing, outcome);
        }
        if is_recorded {
            self.record(timing, outcome, in_log);
        }
    }

    fn count_for_service(&self, total: Duration, is_left_out: bool) {
        let Some(service) = self.service.get() else {
            if is_left_out {
                self.observers.counters.apex_records_left_out.increment();
            }
            return;
        };
        let sample = Sample {
            status: self.status.get().map(|status| status.as_u16()),
            code: self.code.get(),
            bytes_in: self.bytes_in.get(),
            bytes_out: self.bytes_out.get(),
            total,
            response_head: self
                .answered
                .get()
                .map(|at| at.saturating_duration_since(self.began)),
            is_left_out,
        };
        self.observers
            .counters
            .services
            .ended(&service.label, service.created_ms, sample);
    }

    /// Whether the log takes the record: of each authenticated request, and of others at a rate.
    fn has_room_in_log(&self) -> bool {
        let by = self.by.take();
        let is_authenticated = by.is_some() || self.apex.get() == Some(ApexRequest::Authenticated);
        self.by.set(by);
        is_authenticated
            || self
                .observers
                .unauthenticated
                .borrow_mut()
                .take(self.label(), Instant::now())
    }

    /// Label of the service in records.
    fn label(&self) -> Arc<str> {
        let service = self.service.get();
        service.map_or_else(|| APEX_LABEL.into(), |service| Arc::clone(&service.label))
    }

    fn timing(&self, total: Duration) -> Timing {
        let progress = self.progress.borrow();
        let between = |from: Instant, to: Instant| micros(to.saturating_duration_since(from));
        let authenticated = self.authenticated.get();
        let agent = progress.timing;
        Timing {
            authenticate: authenticated.map_or(0, |at| between(self.began, at)),
            wait: authenticated
                .zip(progress.opened())
                .map(|(from, opened)| between(from, opened.at)),
            agent: agent.map(|timing| timing.agent_us),
            backend_first_byte: agent.and_then(|timing| timing.backend_first_byte_us),
            response_head: self.answered.get().map(|at| between(self.began, at)),
            total: u64::try_from(total.as_micros()).unwrap_or(u64::MAX),
        }
    }

    fn end_span(&self, timing: Timing, outcome: Outcome) {
        let (Some(context), Some(summary)) = (&self.span, self.summary.get()) else {
            return;
        };
        let now = clock::now();
        let start = now
            .checked_sub(Duration::from_micros(timing.total))
            .unwrap_or(now);
        let span = GatewaySpan {
            context: *context,
            start,
            timing,
            id: self.id,
            method: summary.method.clone(),
            path: self
                .observers
                .tracing
                .path(path_of(summary.target.as_str())),
            authority: summary.authority.as_ref().and_then(owned),
            client: self.client,
            protocol: self.protocol,
            service: self.service.get().map(|service| Arc::clone(&service.label)),
            agent: self
                .progress
                .borrow()
                .opened()
                .map(|opened| opened.agent.clone()),
            status: self.status.get().map(|status| status.as_u16()),
            code: self.code.get(),
            ended: outcome.into(),
        };
        let progress = self.progress.borrow();
        // The response did not come from a stream if the gateway answered with an error.
        let opened = progress.opened().filter(|_| self.code.get().is_none());
        let opened = opened.map(|opened| {
            (
                opened.agent.clone(),
                opened.at.saturating_duration_since(self.began),
            )
        });
        self.observers.tracing.end(
            span,
            ended_attempts(&progress.failed_attempts, opened, start, &timing),
        );
    }

    fn record(&self, timing: Timing, outcome: Outcome, in_log: bool) {
        let Some(RequestSummary {
            method,
            target,
            trace_id,
            ..
        }) = self.summary.get()
        else {
            return;
        };
        let target = if self.service.get().is_some() {
            target.as_str().into()
        } else {
            without_values(target.as_str())
        };
        let progress = self.progress.take();
        let opened = progress.opened();
        let record = RequestRecord {
            id: self.id,
            method: method.clone(),
            target,
            caller: self.client,
            protocol: self.protocol,
            by: self.by.take(),
            at_apex: self.apex.get() == Some(ApexRequest::Authenticated),
            status: self.status.get().map(|status| status.as_u16()),
            code: self.code.get(),
            ended: outcome.into(),
            bytes_in: self.bytes_in.get(),
            // An agent is not trusted to name more than it was sent.
            bytes_taken: self
                .bytes_taken
                .get()
                .map(|taken| taken.min(self.bytes_in.get())),
            bytes_out: self.bytes_out.get(),
            timing,
            agent: opened.map(|opened| opened.agent.clone()),
            attempts: progress
                .failed_attempts
                .iter()
                .take(ATTEMPTS_MAX)
                .map(recorded)
                .collect(),
            replayed_from: self.replayed_from,
            trace_id: *trace_id,
            capture: self
                .capturing
                .finish(self.answered.get().is_some())
                .filter(|_| opened.is_some()),
        };
        let mut recorder = self.observers.recorder.borrow_mut();
        recorder.add(&self.label(), record, in_log);
    }
}

/// Attempts of a request that began at `start`, in order; none if its first attempt did not fail.
/// `opened` has the agent that the response came from, and the time until the stream to it was
/// open.
fn ended_attempts(
    failed: &[FailedAttempt],
    opened: Option<(AgentId, Duration)>,
    start: SystemTime,
    timing: &Timing,
) -> Vec<EndedAttempt> {
    if failed.is_empty() {
        return Vec::new();
    }
    let total = Duration::from_micros(timing.total);
    // Only the durations of failed attempts are known. They follow one another until the last
    // stream was open, or until the error was sent.
    let mut end = opened.as_ref().map_or(total, |(_, until)| *until);
    let mut attempts = Vec::with_capacity(failed.len() + 1);
    if let Some((agent, until)) = opened {
        let head = timing
            .response_head
            .map_or(total, |head| Duration::from_micros(head.into()));
        attempts.push(EndedAttempt {
            agent: Some(agent),
            start: start + until,
            took: head.saturating_sub(until),
            failure: None,
        });
    }
    for FailedAttempt {
        agent,
        reason,
        took,
    } in failed.iter().take(ATTEMPTS_MAX).rev()
    {
        end = end.saturating_sub(*took);
        attempts.push(EndedAttempt {
            agent: agent.clone(),
            start: start + end,
            took: *took,
            failure: Some(*reason),
        });
    }
    attempts.reverse();
    attempts
}

fn recorded(attempt: &FailedAttempt) -> RecordedAttempt {
    RecordedAttempt {
        agent_id: attempt.agent.clone(),
        reason: attempt.reason.as_str(),
        duration_us: micros(attempt.took),
    }
}

fn path_of(target: &str) -> &str {
    target.split_once('?').map_or(target, |(path, _)| path)
}

/// Path and query of an apex request, without the values of the query: they can be secrets that no
/// pattern recognises.
fn without_values(target: &str) -> Box<str> {
    const KEPT: &str = "enrollment_id";
    let Some((path, query)) = target.split_once('?') else {
        return target.into();
    };
    let parameters = query
        .split('&')
        .map(|parameter| match parameter.split_once('=') {
            Some((KEPT, _)) => parameter.to_owned(),
            Some((name, _)) => format!("{name}=***"),
            None if parameter.is_empty() => String::new(),
            None => "***".to_owned(),
        });
    format!("{path}?{}", parameters.collect::<Vec<_>>().join("&")).into()
}

/// A copy that does not hold the received buffer; `None` if it is longer than a host name and a
/// port can be.
fn owned(authority: &Authority) -> Option<Authority> {
    const MAX: usize = 255 + ":65535".len();
    let text = authority.as_str();
    if text.len() <= MAX {
        text.parse().ok()
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;
    use crate::http_message::AttemptFailure;

    #[test]
    fn failed_attempts_precede_the_last_one() {
        let agents: Vec<AgentId> = (0..3).map(|_| AgentId::random()).collect();
        let failed = |agent: usize, micros| FailedAttempt {
            agent: Some(agents[agent].clone()),
            reason: AttemptFailure::BackendUnreachable,
            took: Duration::from_micros(micros),
        };
        let times =
            |failed: &[FailedAttempt], opened, timing: &Timing| -> Vec<(usize, u128, u128, bool)> {
                let of = |attempt: EndedAttempt| {
                    let agent = agents
                        .iter()
                        .position(|agent| Some(agent) == attempt.agent.as_ref())
                        .unwrap();
                    let start = attempt
                        .start
                        .duration_since(UNIX_EPOCH)
                        .unwrap()
                        .as_micros();
                    (
                        agent,
                        start,
                        attempt.took.as_micros(),
                        attempt.failure.is_some(),
                    )
                };
                ended_attempts(failed, opened, UNIX_EPOCH, timing)
                    .into_iter()
                    .map(of)
                    .collect()
            };
        let opened = || Some((agents[2].clone(), Duration::from_micros(100)));
        let answered = Timing {
            response_head: Some(150),
            total: 200,
            ..Timing::default()
        };
        let both = [failed(0, 30), failed(1, 20)];
        assert_eq!(
            times(&both, opened(), &answered),
            [(0, 50, 30, true), (1, 80, 20, true), (2, 100, 50, false)]
        );
        let refused = Timing {
            total: 200,
            ..Timing::default()
        };
        assert_eq!(
            times(&both, None, &refused),
            [(0, 150, 30, true), (1, 180, 20, true)]
        );
        assert_eq!(times(&[], opened(), &answered), []);
        // More time than the gateway measured.
        assert_eq!(
            times(&[failed(0, 500)], opened(), &answered)[0],
            (0, 0, 500, true)
        );
    }

    #[test]
    fn values_of_the_query_are_left_out() {
        for (target, kept) in [
            ("/oauth/token", "/oauth/token"),
            (
                "/enroll/status?enrollment_id=en_1&x=",
                "/enroll/status?enrollment_id=en_1&x=***",
            ),
            (
                "/oauth/token?client_secret=a=b&c&&d?e=f",
                "/oauth/token?client_secret=***&***&&d?e=***",
            ),
            ("*", "*"),
            ("", ""),
        ] {
            assert_eq!(&*without_values(target), kept);
        }
    }
}
