//! Reports an ended request to counters, time series, request log and trace.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use gw_shared::tunnel::timing::micros;
use http::uri::Authority;

use super::{ApexRequest, RequestScope, RequestSummary};
use crate::http_message::{FailedAttempt, Outcome};
use crate::telemetry::counters::services::Sample;
use crate::telemetry::request_log::{APEX_LABEL, ATTEMPTS_MAX, RecordedAttempt, RequestRecord, Timing};
use crate::telemetry::trace::GatewaySpan;

/// Longest target of an apex request that is kept, in bytes.
const APEX_TARGET_MAX: usize = 512;

impl RequestScope {
    pub(super) fn report(&self, outcome: Outcome) {
        self.observers.counters.ended(outcome);
        let total = self.began.elapsed();
        self.count_for_service(total);
        let in_log = self.is_logged() || self.is_recorded_at_apex();
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

    fn count_for_service(&self, total: Duration) {
        let Some(service) = self.service.get() else { return };
        let sample = Sample {
            status: self.status.get().map(|status| status.as_u16()),
            code: self.code.get(),
            bytes_in: self.bytes_in.get(),
            bytes_out: self.bytes_out.get(),
            total,
            response_head: self.answered.get().map(|at| at.saturating_duration_since(self.began)),
        };
        self.observers.counters.services.ended(&service.label, sample);
    }

    /// Whether this is an apex request with a record. Records of anonymous requests are limited by rate, so that they
    /// do not fill the log.
    fn is_recorded_at_apex(&self) -> bool {
        let Some(apex) = self.apex.get() else { return false };
        let is_recorded =
            apex == ApexRequest::Authenticated || self.observers.apex_records.borrow_mut().take(Instant::now()).is_ok();
        if !is_recorded {
            self.observers.counters.apex_records_left_out.increment();
        }
        is_recorded
    }

    fn timing(&self, total: Duration) -> Timing {
        let progress = self.progress.borrow();
        let between = |from: Instant, to: Instant| micros(to.saturating_duration_since(from));
        let authenticated = self.authenticated.get();
        let agent = progress.timing;
        Timing {
            authenticate: authenticated.map_or(0, |at| between(self.began, at)),
            wait: authenticated.zip(progress.opened()).map(|(from, opened)| between(from, opened.at)),
            agent: agent.map(|timing| timing.agent_us),
            backend_first_byte: agent.and_then(|timing| timing.backend_first_byte_us),
            response_head: self.answered.get().map(|at| between(self.began, at)),
            total: u64::try_from(total.as_micros()).unwrap_or(u64::MAX),
        }
    }

    fn end_span(&self, timing: Timing, outcome: Outcome) {
        let (Some(context), Some(summary)) = (&self.span, self.summary.get()) else { return };
        let now = SystemTime::now();
        self.observers.tracing.end(GatewaySpan {
            context: *context,
            start: now.checked_sub(Duration::from_micros(timing.total)).unwrap_or(now),
            timing,
            id: self.id,
            method: summary.method.clone(),
            path: self.observers.tracing.path(path_of(summary.target.as_str())),
            authority: summary.authority.as_ref().and_then(owned),
            client: self.client,
            protocol: self.protocol,
            service: self.service.get().map(|service| Arc::clone(&service.label)),
            agent: self.progress.borrow().opened().map(|opened| opened.agent.clone()),
            status: self.status.get().map(|status| status.as_u16()),
            code: self.code.get(),
            ended: outcome.into(),
        });
    }

    fn record(&self, timing: Timing, outcome: Outcome, in_log: bool) {
        let Some(RequestSummary { method, target, trace_id, .. }) = self.summary.get() else { return };
        let label = self.service.get().map(|service| Arc::clone(&service.label));
        let target = if label.is_some() { target.as_str().into() } else { without_values(target.as_str()) };
        let progress = self.progress.take();
        let opened = progress.opened();
        let record = RequestRecord {
            id: self.id,
            method: method.clone(),
            target,
            caller: self.client,
            protocol: self.protocol,
            by: self.by.take(),
            status: self.status.get().map(|status| status.as_u16()),
            code: self.code.get(),
            ended: outcome.into(),
            bytes_in: self.bytes_in.get(),
            // An agent is not trusted to name more than it was sent.
            bytes_taken: self.bytes_taken.get().map(|taken| taken.min(self.bytes_in.get())),
            bytes_out: self.bytes_out.get(),
            timing,
            agent: opened.map(|opened| opened.agent.clone()),
            attempts: progress.failed_attempts.iter().take(ATTEMPTS_MAX).map(recorded).collect(),
            replayed_from: self.replayed_from,
            trace_id: *trace_id,
            capture: self.capturing.finish(self.answered.get().is_some()).filter(|_| opened.is_some()),
        };
        self.observers.recorder.borrow_mut().add(&label.unwrap_or_else(|| APEX_LABEL.into()), record, in_log);
    }
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

/// Path and query of an apex request, without the values of the query: they can be secrets that no pattern recognises.
fn without_values(target: &str) -> Box<str> {
    const KEPT: &str = "enrollment_id";
    let target = if target.len() > APEX_TARGET_MAX {
        // A secret that is cut would not be recognised when the record is masked: drop the cut word.
        let is_word = |char: char| char.is_ascii() && !"/?&=".contains(char);
        target[..target.floor_char_boundary(APEX_TARGET_MAX)].trim_end_matches(is_word)
    } else {
        target
    };
    let Some((path, query)) = target.split_once('?') else { return target.into() };
    let parameters = query.split('&').map(|parameter| match parameter.split_once('=') {
        Some((KEPT, _)) => parameter.to_owned(),
        Some((name, _)) => format!("{name}=***"),
        None if parameter.is_empty() => String::new(),
        None => "***".to_owned(),
    });
    format!("{path}?{}", parameters.collect::<Vec<_>>().join("&")).into()
}

/// A copy that does not hold the received buffer; `None` if it is longer than a host name and a port can be.
fn owned(authority: &Authority) -> Option<Authority> {
    const MAX: usize = 255 + ":65535".len();
    let text = authority.as_str();
    if text.len() <= MAX { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_the_query_are_left_out() {
        for (target, kept) in [
            ("/oauth/token", "/oauth/token"),
            ("/enroll/status?enrollment_id=en_1&x=", "/enroll/status?enrollment_id=en_1&x=***"),
            ("/oauth/token?client_secret=a=b&c&&d?e=f", "/oauth/token?client_secret=***&***&&d?e=***"),
            ("*", "*"),
            ("", ""),
        ] {
            assert_eq!(&*without_values(target), kept);
        }
        assert_eq!(without_values(&format!("/{}", "\u{e4}".repeat(400))).len(), APEX_TARGET_MAX - 1);
        // The word at the cut is left out.
        let before = format!("/{}/", "a".repeat(APEX_TARGET_MAX - 6));
        assert_eq!(*without_values(&format!("{before}0123456789")), before);
    }
}
