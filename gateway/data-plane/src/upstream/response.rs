//! Responses of agents. An agent is not trusted: every check that the genuine agent applies to a
//! backend is repeated here.

use std::task::{Context, Poll, ready};
use std::time::Duration;

use crate::limits;
use bytes::Bytes;
use gw_base::error::Error;
use gw_shared::error_code::AgentErrorCode;
use gw_shared::http::fields;
use gw_shared::http::{self as http1, Fields, Framing, Part, UpgradeProtocol};
use gw_shared::text::printable;
use gw_shared::tunnel::body::{BrokenBody, ReceivedBody};
use gw_shared::tunnel::connection::StreamReceiver;
use gw_shared::tunnel::endpoint::{Closed, ReceivedPart};
use gw_shared::tunnel::frame::Kind;
use gw_shared::tunnel::head::{self, AgentResponse, OutboundRequest, Refusal};
use gw_shared::tunnel::response::{InterimBudget, InvalidResponse, check_fields, check_status};
use gw_shared::tunnel::timing::AgentTiming;
use http::header::{self, HeaderValue};
use http::{Method, StatusCode};

use super::attempts::{self, AttemptError, Attempts, AttemptsFailed};
use super::cross_node::{OnNode, Refused, parse_notice, read_refusal, timing};
use super::{BodySource, Download, PendingResponse};
use crate::http_message::{FailedAttempt, OpenedStream, Progress, RelayedHead};
use crate::memory::relay::at_account_limit;
use crate::tunnel::InFlight;

/// The parts of a request that decide how its response is read.
#[derive(Debug)]
pub(crate) struct RequestTraits {
    is_head: bool,
    /// The protocol to switch to. Boxed because it is rare: every request reserves memory for it.
    protocol: Option<Box<UpgradeProtocol>>,
}

impl RequestTraits {
    pub(super) fn of(request: &OutboundRequest) -> Self {
        Self {
            is_head: request.method == Method::HEAD,
            protocol: request.upgrade.clone().map(Box::new),
        }
    }

    /// Method that decides the framing of the response (RFC 9112 §6.3): HEAD, or GET for all
    /// others.
    fn method(&self) -> &'static Method {
        if self.is_head {
            &Method::HEAD
        } else {
            &Method::GET
        }
    }
}

/// The connection with the stream of a request, which counts the request until it is dropped.
pub(super) enum Carrier {
    /// A tunnel of this worker.
    Tunnel(InFlight),
    /// A link to the node that owns the service.
    Node(Box<OnNode>),
}

impl Carrier {
    /// The stream on the tunnel of the agent, once it is known.
    fn opened(&self) -> Option<OpenedStream> {
        match self {
            Self::Tunnel(in_flight) => Some(in_flight.stream()),
            Self::Node(on_node) => on_node.notice.opened.clone(),
        }
    }

    /// Error of a stream that ended before the response began.
    pub(super) fn lost(&self) -> Error {
        match self {
            Self::Tunnel(_) => Error::TunnelLost,
            Self::Node(_) => Error::NodeLost,
        }
    }

    /// Error of a stream that was reset before the response began.
    fn reset(&self) -> Error {
        match self {
            Self::Tunnel(_) => Error::TunnelProtocol,
            Self::Node(_) => Error::NodeLost,
        }
    }

    /// Reports the outcome of the request to the health of its tunnel: the latency of a response if
    /// it is known, or the failure.
    fn observe(&self, outcome: Result<Option<Duration>, &AttemptError>) {
        let Self::Tunnel(in_flight) = self else {
            return;
        };
        match outcome {
            Ok(latency) => in_flight.succeeded(latency),
            Err(AttemptError { error, is_unsent }) => {
                let reason = attempts::reason_of(error, false);
                in_flight.failed(reason.and_then(|reason| attempts::verdict(reason, *is_unsent)));
            }
        }
    }

    /// The received timing, if there is one, limited to the time that the request has taken.
    fn timing(&self, received: AgentTiming) -> Option<AgentTiming> {
        match self {
            Self::Tunnel(in_flight) => Some(received.within(in_flight.open_for())),
            Self::Node(on_node) => timing(received, on_node.sent.elapsed()),
        }
    }

    /// A part of the answer that was received already.
    fn take_first(&mut self) -> Option<ReceivedPart> {
        match self {
            Self::Tunnel(_) => None,
            Self::Node(on_node) => on_node.first.take(),
        }
    }

    /// Takes a notice of the owner of the service: an interim response that goes no further.
    fn take_notice(&mut self, payload: &Bytes) -> bool {
        let Self::Node(on_node) = self else {
            return false;
        };
        let notice = parse_notice(payload);
        let is_notice = notice.is_some();
        if let Some(notice) = notice {
            on_node.notice = notice;
        }
        is_notice
    }
}

/// A response that is expected on a stream of a tunnel, or of a link to another node.
pub(crate) struct StreamResponse {
    stream: StreamReceiver,
    carrier: Carrier,
    request: RequestTraits,
    budget: InterimBudget,
    /// Part or error that followed the last interim response.
    received: Option<Result<ReceivedPart, Error>>,
    /// `None` if there is no further attempt.
    attempts: Option<Box<Attempts>>,
    /// Attempts that failed before this one, which is the last.
    pub(crate) failed_before: Box<[FailedAttempt]>,
    /// Cookie of the gateway for the final head. Boxed because it is rare.
    pub(super) set_cookie: Option<Box<HeaderValue>>,
}

/// What follows the interim responses.
#[expect(
    clippy::large_enum_variant,
    reason = "nearly every response is an answer, which costs no allocation"
)]
pub(crate) enum Final {
    Answer(Progress, Result<(RelayedHead, Download), Error>),
    /// The attempt has failed, and another one may follow.
    Failed(Box<FailedResponse>),
}

impl StreamResponse {
    pub(super) fn new(stream: StreamReceiver, carrier: Carrier, request: RequestTraits) -> Self {
        Self {
            stream,
            carrier,
            request,
            budget: InterimBudget::default(),
            received: None,
            attempts: None,
            failed_before: Box::default(),
            set_cookie: None,
        }
    }

    pub(super) fn with_attempts(self, attempts: Box<Attempts>) -> Self {
        Self {
            attempts: Some(attempts),
            ..self
        }
    }

    /// Whether the request was sent with `Upgrade`.
    pub(super) fn may_switch(&self) -> bool {
        self.request.protocol.is_some()
    }

    pub(super) fn progress(&self) -> Progress {
        let at_owner = match &self.carrier {
            Carrier::Tunnel(_) => &[],
            Carrier::Node(on_node) => &on_node.notice.failed_attempts[..],
        };
        Progress {
            stream: self.carrier.opened(),
            failed_attempts: self.failed_before.iter().chain(at_owner).cloned().collect(),
            ..Progress::default()
        }
    }

    /// The next interim response; `None` if a final response or an error is next.
    pub(super) async fn interim(&mut self) -> Option<RelayedHead> {
        if self.received.is_some() {
            return None;
        }
        let ended = loop {
            let part = match self.carrier.take_first() {
                Some(part) => Ok(part),
                None => self.receive().await,
            };
            match part {
                Ok(ReceivedPart::Head(Kind::Interim, payload)) if self.take_notice(&payload) => {}
                Ok(ReceivedPart::Head(Kind::Interim, payload)) => {
                    match interim_head(&payload, &mut self.budget) {
                        Ok(head) => {
                            self.attempts
                                .iter_mut()
                                .for_each(|attempts| attempts.passes_on());
                            return Some(head);
                        }
                        Err(invalid) => break Err(Error::invalid_response(invalid)),
                    }
                }
                Ok(part) => break Ok(part),
                // The endpoint had no room for a head.
                Err(Closed::Here) => break Err(at_account_limit()),
                Err(Closed::Reset(_)) => break Err(self.carrier.reset()),
                Err(Closed::Lost) => break Err(self.carrier.lost()),
            }
        };
        self.received = Some(ended);
        None
    }

    async fn receive(&mut self) -> Result<ReceivedPart, Closed> {
        let Self {
            stream, attempts, ..
        } = self;
        let Some(attempts) = attempts else {
            return stream.receive().await;
        };
        std::future::poll_fn(|cx| attempts.poll_receive(cx, stream)).await
    }

    /// Takes an interim response that goes no further.
    fn take_notice(&mut self, payload: &Bytes) -> bool {
        let is_acceptance = self
            .attempts
            .as_mut()
            .is_some_and(|attempts| attempts.take_acceptance(payload));
        is_acceptance || self.carrier.take_notice(payload)
    }

    /// The final head, or another attempt; call it after the last interim response. A response that
    /// is already known to be broken behind its head is an error: nothing of it was passed on.
    pub(super) fn head(mut self) -> Final {
        let mut progress = self.progress();
        let received = self.received.take();
        let attempts = self.attempts.take();
        let set_cookie = self.set_cookie.take();
        let head = match received {
            Some(Ok(part)) => self.receive_head(part, &mut progress),
            Some(Err(error)) => Err(error.into()),
            None => Err(self.carrier.lost().into()),
        };
        let Self {
            stream, carrier, ..
        } = self;
        let (mut head, framing) = match head {
            Ok(head) => head,
            Err(failure) => return after(failure, attempts, &carrier, set_cookie, progress),
        };
        let body = match head.upgrade {
            Some(_) => ReceivedBody::upgraded(stream, 0),
            None => ReceivedBody::new(stream, framing),
        };
        let mut download = Download::new(BodySource::Stream {
            body,
            has_body: head.has_body,
            carrier,
        });
        if let Err(error) = download.begin() {
            let BodySource::Stream { carrier, .. } = &download.source else {
                return Final::Answer(progress, Err(error));
            };
            return after(error.into(), attempts, carrier, set_cookie, progress);
        }
        if let BodySource::Stream { carrier, .. } = &download.source {
            carrier.observe(Ok(attempts
                .as_ref()
                .and_then(|attempts| attempts.latency())));
        }
        if let Some(attempts) = attempts {
            progress.failed_attempts = attempts.answered().into();
        }
        if let Some(cookie) = set_cookie {
            head.headers.append(header::SET_COOKIE, *cookie);
        }
        Final::Answer(progress, Ok((head, download)))
    }

    fn receive_head(
        &self,
        part: ReceivedPart,
        progress: &mut Progress,
    ) -> Result<(RelayedHead, Framing), AttemptError> {
        let payload = match part {
            ReceivedPart::Head(Kind::Response, payload) => payload,
            ReceivedPart::Head(Kind::Refused, payload) => {
                let refusal = head::parse_refusal(payload).ok_or(Error::TunnelProtocol)?;
                progress.timing = self.carrier.timing(refusal.timing);
                return Err(AttemptError {
                    error: self.refusal(&refusal),
                    is_unsent: refusal.unsent,
                });
            }
            // The endpoint allows nothing else before the head.
            _ => return Err(Error::TunnelProtocol.into()),
        };
        let response =
            head::parse_response(payload, self.request.method()).map_err(|_| malformed())?;
        progress.timing = self.carrier.timing(response.timing);
        Ok(final_head(response, &self.request, self.stream.is_done())
            .map_err(Error::invalid_response)?)
    }

    /// The error in place of a response.
    fn refusal(&self, refusal: &Refusal) -> Error {
        match &self.carrier {
            Carrier::Tunnel(_) => {
                let message = printable(&refusal.message, limits::AGENT_MESSAGE);
                Error::from_agent(AgentErrorCode::parse(&refusal.code), &message)
            }
            Carrier::Node(_) => match read_refusal(refusal) {
                Refused::Error(error) => error,
                // The request was accepted before.
                Refused::NotOwner { .. } | Refused::Ending { .. } | Refused::Waits => {
                    Error::TunnelProtocol
                }
            },
        }
    }
}

/// What follows a failed attempt: another one if there is more than one tunnel, or the error.
fn after(
    failure: AttemptError,
    attempts: Option<Box<Attempts>>,
    carrier: &Carrier,
    set_cookie: Option<Box<HeaderValue>>,
    progress: Progress,
) -> Final {
    carrier.observe(Err(&failure));
    match attempts {
        Some(attempts) => Final::Failed(Box::new(FailedResponse {
            failure,
            attempts,
            set_cookie,
            progress,
        })),
        None => Final::Answer(progress, Err(failure.error)),
    }
}

/// A failed attempt of a request that another one may follow.
pub(crate) struct FailedResponse {
    failure: AttemptError,
    attempts: Box<Attempts>,
    set_cookie: Option<Box<HeaderValue>>,
    progress: Progress,
}

impl FailedResponse {
    /// Makes another attempt, if there can be one.
    pub(crate) async fn again(self: Box<Self>) -> Result<PendingResponse, (Progress, Error)> {
        let Self {
            failure,
            attempts,
            set_cookie,
            mut progress,
        } = *self;
        match attempts.again(failure).await {
            Ok(next) => Ok(PendingResponse::Stream(StreamResponse {
                set_cookie,
                ..next
            })),
            Err(AttemptsFailed { error, failed }) => {
                progress.failed_attempts = failed.into();
                Err((progress, error))
            }
        }
    }
}

fn malformed() -> Error {
    Error::invalid_response(InvalidResponse::Malformed)
}

fn interim_head(
    payload: &Bytes,
    budget: &mut InterimBudget,
) -> Result<RelayedHead, InvalidResponse> {
    let http1::ResponseHead {
        status, headers, ..
    } = head::parse_interim(payload).map_err(|_| InvalidResponse::Malformed)?;
    let mut headers = fields::end_to_end_response(headers);
    budget.take(status, &mut headers)?;
    Ok(RelayedHead {
        status,
        headers,
        has_body: false,
        upgrade: None,
    })
}

/// Checks a final head and cleans its fields for the next hop. `is_whole` tells whether the
/// response ended with it.
fn final_head(
    response: AgentResponse,
    request: &RequestTraits,
    is_whole: bool,
) -> Result<(RelayedHead, Framing), InvalidResponse> {
    let http1::ResponseHead {
        mut status,
        headers,
        framing,
        ..
    } = response.head;
    let switches = status == StatusCode::SWITCHING_PROTOCOLS;
    let upgrade = if switches {
        Some(switched_to(&headers, request)?)
    } else {
        None
    };
    if switches {
        // A connection to a caller writes the status of a switch in its version of HTTP.
        status = StatusCode::OK;
    }
    check_status(status)?;
    let mut headers = fields::end_to_end_response(headers);
    check_fields(&headers)?;
    // An upgraded stream has no length (RFC 9110 §8.6), and neither has a response without a body.
    if switches || status == StatusCode::NO_CONTENT {
        headers.remove(header::CONTENT_LENGTH);
    }
    let has_body = match framing {
        _ if switches => true,
        Framing::None | Framing::Described(_) => false,
        Framing::Length(length) if is_whole && length > 0 => {
            return Err(InvalidResponse::Malformed);
        }
        Framing::Length(_) | Framing::Chunked | Framing::UntilClose => !is_whole,
    };
    Ok((
        RelayedHead {
            status,
            headers,
            has_body,
            upgrade,
        },
        framing,
    ))
}

/// The protocol that the backend has switched to: the one that the request asked for.
fn switched_to(
    headers: &Fields,
    request: &RequestTraits,
) -> Result<UpgradeProtocol, InvalidResponse> {
    let protocol = request
        .protocol
        .as_deref()
        .ok_or(InvalidResponse::Unasked)?;
    let mut named = headers.get_all(header::UPGRADE);
    match (named.next(), named.next()) {
        (Some(value), None) if protocol.is(value.as_bytes()) => Ok(protocol.clone()),
        _ => Err(InvalidResponse::OtherProtocol),
    }
}

/// The next part of a body from a tunnel.
pub(super) fn poll_part(
    body: &mut ReceivedBody,
    cx: &mut Context<'_>,
) -> Poll<Result<Part, Error>> {
    Poll::Ready(match ready!(body.poll_receive(cx)) {
        Ok(Part::Trailers(trailers)) => {
            let trailers = fields::end_to_end_trailers(trailers);
            check_fields(&trailers)
                .map(|()| Part::Trailers(trailers))
                .map_err(Error::invalid_response)
        }
        Ok(part) => Ok(part),
        Err(BrokenBody::Reset(code)) => Err(Error::broken_response(match &code[..] {
            b"" => Some(AgentErrorCode::BackendReset),
            code => AgentErrorCode::parse(code),
        })),
        Err(BrokenBody::Lost) => Err(Error::TunnelLost),
        Err(BrokenBody::Length | BrokenBody::Malformed) => Err(malformed()),
    })
}

#[cfg(test)]
mod tests;
