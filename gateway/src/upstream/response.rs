//! Responses of agents. An agent is not trusted: every check that the genuine agent applies to a backend is repeated
//! here.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::task::{Context, Poll, ready};

use gw_shared::error_code::AgentErrorCode;
use gw_shared::http::UpgradeProtocol;
use gw_shared::http::fields::{self, X_GW_AGENT_ERROR, X_GW_TIMING, X_GW_UPGRADE, X_GW_UPGRADE_METHOD};
use gw_shared::http::framing::{check_values_of_http2, content_length};
use gw_shared::runtime;
use gw_shared::tunnel::incoming::Incoming;
use gw_shared::tunnel::response::{InterimBudget, InvalidResponse, check_fields, check_status};
use gw_shared::tunnel::stream::{self, Received, StreamClosed};
use gw_shared::tunnel::text::printable;
use gw_shared::tunnel::timing::AgentTiming;
use h2::ext::Protocol;
use http::header::{self, HeaderMap, HeaderValue};
use http::response::Parts;
use http::{Method, Request, Response, StatusCode};

use super::{Frame, Progress, Source};
use crate::error::Error;
use crate::http_message::ResponseHead;
use crate::limits;
use crate::tunnel::session::InFlight;

/// Fields that a response gets on its way to the caller: its request id, and `Date` if absent.
const ADDED_FIELDS: usize = 2;

/// The parts of a request that decide how its response is read.
#[derive(Debug)]
pub(crate) struct RequestTraits {
    is_head: bool,
    /// The protocol to switch to. Boxed because it is rare: every request reserves memory for it.
    protocol: Option<Box<Protocol>>,
}

impl RequestTraits {
    pub(super) fn of(request: &Request<()>) -> Self {
        let was_head = request.headers().get(X_GW_UPGRADE_METHOD).is_some_and(|method| method == "HEAD");
        Self {
            is_head: request.method() == Method::HEAD || was_head,
            protocol: request.extensions().get::<Protocol>().cloned().map(Box::new),
        }
    }
}

/// A response that is expected on a stream of a tunnel.
pub(crate) struct TunnelResponse {
    /// `None` once the agent has sent an invalid response.
    stream: Option<(h2::client::ResponseFuture, InFlight)>,
    invalid: Option<Box<(InvalidResponse, Progress)>>,
    request: RequestTraits,
    budget: InterimBudget,
    /// Interim responses received while an earlier one was passed on. Bounded by the budget.
    waiting: VecDeque<ResponseHead>,
}

impl TunnelResponse {
    pub(super) fn new(response: h2::client::ResponseFuture, in_flight: InFlight, request: RequestTraits) -> Self {
        Self {
            stream: Some((response, in_flight)),
            invalid: None,
            request,
            budget: InterimBudget::default(),
            waiting: VecDeque::new(),
        }
    }

    pub(super) fn progress(&self) -> Progress {
        self.stream.as_ref().map(|(_, in_flight)| Progress::opened_here(in_flight.stream())).unwrap_or_default()
    }

    /// The next interim response; `None` if a final response or an error is next.
    pub(super) async fn interim(&mut self) -> Option<ResponseHead> {
        match self.waiting.pop_front() {
            Some(waiting) => Some(waiting),
            None => std::future::poll_fn(|cx| self.poll_interim(cx)).await,
        }
    }

    /// Takes interim responses out of h2, which queues them without a bound, and counts them. Never resolves: poll it
    /// while the previous interim response is passed on.
    pub(super) async fn gather(&mut self) -> Infallible {
        std::future::poll_fn(|cx| {
            while let Poll::Ready(Some(interim)) = self.poll_interim(cx) {
                self.waiting.push_back(interim);
            }
            Poll::Pending
        })
        .await
    }

    fn poll_interim(&mut self, cx: &mut Context<'_>) -> Poll<Option<ResponseHead>> {
        let Some((response, in_flight)) = &mut self.stream else { return Poll::Ready(None) };
        let Some(Ok(interim)) = ready!(response.poll_informational(cx)) else { return Poll::Ready(None) };
        in_flight.took_interim();
        let (Parts { status, headers, .. }, ()) = interim.into_parts();
        let mut headers = fields::end_to_end(headers, fields::is_own, 0);
        match check_values(&headers).and_then(|()| self.budget.take(status, &mut headers)) {
            Ok(()) => Poll::Ready(Some(ResponseHead { status, headers, has_body: false, upgrade: None })),
            Err(invalid) => {
                // Resets the stream and drops later data of the agent.
                self.invalid = self
                    .stream
                    .take()
                    .map(|(_, in_flight)| Box::new((invalid, Progress::opened_here(in_flight.stream()))));
                Poll::Ready(None)
            }
        }
    }

    /// The final head; call it after the last interim response.
    pub(super) async fn head(self) -> (Progress, Result<(ResponseHead, Source), Error>) {
        let (response, in_flight) = match (self.stream, self.invalid) {
            (Some(stream), _) => stream,
            (None, Some(invalid)) => {
                let (invalid, progress) = *invalid;
                return (progress, Err(Error::invalid_response(invalid)));
            }
            (None, None) => return (Progress::default(), Err(Error::TunnelLost)),
        };
        let mut progress = Progress::opened_here(in_flight.stream());
        let received = match response.await {
            Ok(response) => receive(response, in_flight, &self.request, &mut progress).await,
            // The h2 crate found malformed frames on the stream (RFC 9113 §8.1.1).
            Err(error) if error.is_reset() && error.is_library() => {
                Err(Error::invalid_response(InvalidResponse::Http2))
            }
            Err(_) => Err(Error::TunnelLost),
        };
        (progress, received)
    }
}

async fn receive(
    response: Response<h2::RecvStream>,
    mut in_flight: InFlight,
    request: &RequestTraits,
    progress: &mut Progress,
) -> Result<(ResponseHead, Source), Error> {
    let (parts, mut body) = response.into_parts();
    let took = in_flight.open_for();
    progress.timing = parts.headers.get(X_GW_TIMING).and_then(AgentTiming::parse).map(|timing| timing.within(took));
    if let Some(code) = parts.headers.get(X_GW_AGENT_ERROR) {
        let code = AgentErrorCode::parse(code);
        return Err(match Error::from_agent(code, "") {
            Error::AgentForward(_) => Error::from_agent(code, &read_message(&mut body).await),
            error => error,
        });
    }
    let head = final_head(parts, request, body.is_end_stream()).map_err(Error::invalid_response)?;
    if !head.has_body {
        // Data that the agent sends nevertheless is reset with the stream.
        return Ok((head, Source::Nothing));
    }
    in_flight.watch(&mut body);
    Ok((head, Source::Tunnel { body: Incoming::new(body), _in_flight: in_flight }))
}

/// Checks a final head and cleans its fields for the next hop.
fn final_head(parts: Parts, request: &RequestTraits, is_whole: bool) -> Result<ResponseHead, InvalidResponse> {
    let Parts { status, headers, .. } = parts;
    let switches = headers.contains_key(X_GW_UPGRADE);
    let upgrade = if switches { Some(switched_to(status, &headers, request)?) } else { None };
    check_status(status)?;
    let mut headers = fields::end_to_end(headers, fields::is_own, ADDED_FIELDS);
    check_fields(&headers)?;
    check_values(&headers)?;
    // An upgraded stream has no length (RFC 9110 §8.6), and neither has a response without a body.
    if switches || status == StatusCode::NO_CONTENT {
        headers.remove(header::CONTENT_LENGTH);
    }
    // The head writer writes the length in its canonical form.
    content_length(&headers).map_err(|_| InvalidResponse::Http2)?;
    let never_has_body = request.is_head || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    Ok(ResponseHead { status, headers, has_body: switches || !(never_has_body || is_whole), upgrade })
}

/// Checks that h2 leaves out: values that an HTTP/2 caller would have to treat as malformed.
fn check_values(fields: &HeaderMap) -> Result<(), InvalidResponse> {
    check_values_of_http2(fields).map_err(|_| InvalidResponse::Http2)
}

/// The protocol that the backend has switched to: the one that the request asked for.
fn switched_to(
    status: StatusCode,
    headers: &HeaderMap,
    request: &RequestTraits,
) -> Result<UpgradeProtocol, InvalidResponse> {
    let protocol = request.protocol.as_ref().ok_or(InvalidResponse::Unasked)?.as_str();
    let mut named = headers.get_all(X_GW_UPGRADE).iter();
    let is_asked = |value: &HeaderValue| value.as_bytes().eq_ignore_ascii_case(protocol.as_bytes());
    match (named.next(), named.next()) {
        (Some(value), None) if is_asked(value) && status == StatusCode::OK => {
            UpgradeProtocol::parse_str(protocol).ok_or(InvalidResponse::OtherProtocol)
        }
        _ => Err(InvalidResponse::OtherProtocol),
    }
}

/// The error text of an agent: bounded in length and time, without characters that could forge a log line.
async fn read_message(body: &mut h2::RecvStream) -> String {
    let mut message = Vec::new();
    let reading = async {
        while message.len() < limits::AGENT_MESSAGE
            && let Ok(Received::Data(data)) = std::future::poll_fn(|cx| stream::poll_receive(body, cx)).await
        {
            stream::release(body, data.len());
            message.extend_from_slice(&data[..data.len().min(limits::AGENT_MESSAGE - message.len())]);
        }
    };
    // The message is cut at the time limit.
    let _ = runtime::timeout(limits::AGENT_MESSAGE_WITHIN, reading).await;
    printable(&message, limits::AGENT_MESSAGE)
}

/// The next frame of a body from a tunnel.
pub(super) fn poll_frame(body: &mut Incoming, cx: &mut Context<'_>) -> Poll<Result<Frame, Error>> {
    Poll::Ready(match ready!(body.poll_receive(cx)) {
        Ok(Received::Data(data)) => Ok(Frame::Data(data)),
        Ok(Received::Trailers(trailers)) => match trailers.get(X_GW_AGENT_ERROR) {
            Some(code) => Err(Error::broken_response(AgentErrorCode::parse(code))),
            None => {
                let trailers = fields::end_to_end_trailers(trailers);
                let checked = check_fields(&trailers).and_then(|()| check_values(&trailers));
                checked.map(|()| Frame::Trailers(trailers)).map_err(Error::invalid_response)
            }
        },
        Ok(Received::End) => Ok(Frame::End),
        Err(StreamClosed { is_reset: true }) => Err(Error::broken_response(Some(AgentErrorCode::BackendReset))),
        Err(StreamClosed { is_reset: false }) => Err(Error::TunnelLost),
    })
}
