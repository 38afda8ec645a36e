//! Forwards a request from its tunnel stream to a backend and relays the response.

pub(crate) mod slots;
pub(crate) mod upgrade;

use std::cell::Cell;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use futures_util::future::{Either, select};
use gw_shared::error_code::AgentErrorCode;
use gw_shared::http::fields::{self, X_GW_AGENT_ERROR, X_GW_TIMING};
use gw_shared::http::{Framing, InvalidHead, Part};
use gw_shared::runtime;
use gw_shared::tunnel::incoming::Incoming;
use gw_shared::tunnel::response::{InterimBudget, InvalidResponse, check_fields, check_status};
use gw_shared::tunnel::stream::{self, Received};
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::header::{self, HeaderMap, HeaderValue};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};

use crate::backend::{ConnectError, Head, Lease, Offer, Pool, RequestHalf, ResponseError, ResponseHalf};
use crate::forward::slots::Slot;
use crate::telemetry::request_scope::RequestScope;

/// Why a request was not forwarded. The gateway passes code and message on to the caller.
#[derive(Debug)]
pub(crate) struct ForwardError {
    code: AgentErrorCode,
    message: String,
}

impl ForwardError {
    /// No slot is free.
    pub(crate) fn concurrency_limit() -> Self {
        let message = "Concurrent backend request limit exceeded".to_owned();
        Self { code: AgentErrorCode::ConcurrencyLimit, message }
    }
}

impl From<ConnectError> for ForwardError {
    fn from(error: ConnectError) -> Self {
        Self { code: error.code(), message: error.to_string() }
    }
}

impl From<ResponseError> for ForwardError {
    fn from(error: ResponseError) -> Self {
        Self { code: error.code(), message: error.message() }
    }
}

/// Forwards a request and relays its response. A reset of the stream closes the backend connection at once. `_slot` is
/// freed on return.
pub(crate) async fn forward(
    pool: &Pool,
    _slot: Slot,
    scope: RequestScope,
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
) {
    if was_reset(&mut respond) {
        // The backend has not seen the request yet.
        return;
    }
    let (mut parts, body) = request.into_parts();
    if parts.method == Method::CONNECT {
        // Boxed, like connecting, so that rare cases do not enlarge the task of every request.
        return Box::pin(upgrade::forward(pool, scope, parts, body, respond)).await;
    }
    fields::join_cookies(&mut parts.headers);
    let Ok(framing) = framing(&parts, &body) else {
        // A gateway never sends this.
        return respond.send_reset(Reason::PROTOCOL_ERROR);
    };
    let mut body = Incoming::new(body);
    let mut reused = pool.reuse();
    let mut is_retry = false;
    loop {
        let lease = match reused.take() {
            Some(lease) => lease,
            None => {
                let connect = body.gather_while(unless_reset(&mut respond, pool.connect(Offer::Any, &scope)));
                match Box::pin(connect).await {
                    Some(Ok(lease)) => lease,
                    Some(Err(error)) => return refuse(&mut respond, &scope, &error.into()),
                    None => return,
                }
            }
        };
        scope.connected(|| lease.describe());
        let progress = Progress { scope: &scope, body_consumed: Cell::default(), request_sent: Cell::default() };
        match exchange(&lease, &parts, framing, &mut body, &mut respond, &progress).await {
            Ok(Reusable(reusable)) => {
                scope.complete();
                if reusable {
                    lease.give_back();
                }
                return;
            }
            Err(ExchangeError::Reset) => return lease.abort(),
            Err(ExchangeError::NoResponse(error)) => {
                if is_retry || !may_retry(&lease, &parts, framing, &progress) || !lease.is_unprocessed(&error) {
                    return refuse(&mut respond, &scope, &error.into());
                }
            }
        }
        is_retry = true;
    }
}

/// Whether the request can be sent again if the backend has not processed it.
fn may_retry(lease: &Lease<'_>, parts: &Parts, framing: Framing, progress: &Progress<'_>) -> bool {
    if lease.is_http2() {
        // The backend reports unprocessed requests explicitly.
        !progress.body_consumed.get()
    } else {
        // The backend may close an idle connection while a request is being sent on it. A retry is safe for an idempotent
        // method (RFC 9110 §9.2.2) without a body.
        lease.is_reused && !framing.has_body() && parts.method.is_idempotent()
    }
}

/// Answers a request with an error of the agent.
pub(crate) fn refuse(respond: &mut SendResponse<Bytes>, scope: &RequestScope, error: &ForwardError) {
    let (request_id, trace_id) = (scope.request_id(), scope.trace_id());
    tracing::debug!(request_id, trace_id, code = error.code.as_str(), reason = error.message, "not forwarded");
    let mut response = Response::new(());
    *response.status_mut() = StatusCode::BAD_GATEWAY;
    response.headers_mut().insert(X_GW_AGENT_ERROR, HeaderValue::from_static(error.code.as_str()));
    response.headers_mut().insert(X_GW_TIMING, scope.failed(error.code));
    // Fails only if the stream is closed, in which case the caller is gone.
    if let Ok(mut stream) = respond.send_response(response, false) {
        let _ = stream.send_data(Bytes::copy_from_slice(error.message.as_bytes()), true);
    }
}

/// Progress of a request.
struct Progress<'a> {
    scope: &'a RequestScope,
    /// Part of the body has been read from the tunnel, so the request cannot be sent again.
    body_consumed: Cell<bool>,
    /// The whole request has been sent.
    request_sent: Cell<bool>,
}

/// Whether the connection can serve another request after a complete exchange.
struct Reusable(bool);

/// Why an exchange with a backend was not completed.
pub(crate) enum ExchangeError {
    /// No part of a response was relayed, so the agent can still answer with an error.
    NoResponse(ResponseError),
    /// The stream was reset: by the gateway, or by the agent because the response was cut short.
    Reset,
}

/// Sends the request and relays the response concurrently. Either may end first.
async fn exchange(
    lease: &Lease<'_>,
    parts: &Parts,
    framing: Framing,
    body: &mut Incoming,
    respond: &mut SendResponse<Bytes>,
    progress: &Progress<'_>,
) -> Result<Reusable, ExchangeError> {
    let (request, response) = lease.exchange(parts, framing).map_err(ExchangeError::NoResponse)?;
    let up = std::pin::pin!(send_request(request, lease, parts, framing, body, progress));
    let down = std::pin::pin!(relay_response(response, &parts.method, respond, progress.scope));
    let kept_alive = match select(down, up).await {
        Either::Left((kept_alive, _)) => kept_alive?,
        Either::Right((Err(RequestReset), _)) => return Err(ExchangeError::Reset),
        Either::Right((Ok(()), down)) => down.await?,
    };
    Ok(Reusable(kept_alive && progress.request_sent.get()))
}

/// The gateway reset the stream before the request was complete.
pub(crate) struct RequestReset;

async fn send_request(
    mut request: RequestHalf<'_>,
    lease: &Lease<'_>,
    parts: &Parts,
    framing: Framing,
    body: &mut Incoming,
    progress: &Progress<'_>,
) -> Result<(), RequestReset> {
    // A backend may answer without reading the whole request. Errors are reported when the response is read.
    if body.gather_while(request.head(parts, lease.authority(parts))).await.is_err() {
        return Ok(());
    }
    if !framing.has_body() {
        progress.request_sent.set(true);
        return Ok(());
    }
    progress.request_sent.set(send_body(&mut request, body, progress.scope, &progress.body_consumed).await?.is_ok());
    Ok(())
}

/// Sends the request body until it ends or the backend accepts no more. Sets `consumed` once it has read from the tunnel.
pub(crate) async fn send_body(
    request: &mut RequestHalf<'_>,
    body: &mut Incoming,
    scope: &RequestScope,
    consumed: &Cell<bool>,
) -> Result<std::io::Result<()>, RequestReset> {
    let mut trailers = None;
    loop {
        let received = body.receive().await.map_err(|_| RequestReset)?;
        consumed.set(true);
        match received {
            Received::Data(data) => {
                let length = data.len();
                scope.counts.sent(length);
                let sent = body.gather_while(request.data(data)).await;
                body.release(length);
                if sent.is_err() {
                    return Ok(sent);
                }
            }
            Received::Trailers(fields) => trailers = Some(fields),
            Received::End => break,
        }
    }
    Ok(request.finish(trailers.map(fields::end_to_end_trailers)).await)
}

/// Relays the response. Returns whether the backend keeps the connection open.
async fn relay_response(
    mut response: ResponseHalf<'_>,
    method: &Method,
    respond: &mut SendResponse<Bytes>,
    scope: &RequestScope,
) -> Result<bool, ExchangeError> {
    let head = final_head(&mut response, method, respond).await?;
    if head.status == StatusCode::SWITCHING_PROTOCOLS {
        return Err(ExchangeError::NoResponse(ResponseError::UnrequestedUpgrade));
    }
    let keep_alive = head.keep_alive;
    relay_final(head, response, respond, scope).await?;
    Ok(keep_alive)
}

/// Waits for the final response or 101, and relays the interim responses before it.
pub(crate) async fn final_head(
    response: &mut ResponseHalf<'_>,
    method: &Method,
    respond: &mut SendResponse<Bytes>,
) -> Result<Head, ExchangeError> {
    let mut budget = InterimBudget::default();
    let invalid = |error: InvalidResponse| ExchangeError::NoResponse(error.into());
    loop {
        let head = match unless_reset(respond, response.head(method)).await {
            Some(head) => head.map_err(ExchangeError::NoResponse)?,
            None => return Err(ExchangeError::Reset),
        };
        if head.status == StatusCode::SWITCHING_PROTOCOLS {
            return Ok(head);
        }
        if !head.status.is_informational() {
            check_status(head.status).and_then(|()| check_fields(&head.headers)).map_err(invalid)?;
            return Ok(head);
        }
        let mut interim = tunnel_response(head.status, head.headers);
        budget.take(head.status, interim.headers_mut()).map_err(invalid)?;
        respond.send_informational(interim).map_err(|_| ExchangeError::Reset)?;
    }
}

/// Relays a final response. If the beginning of the body is already available and invalid, nothing has been relayed and
/// the result is [`ExchangeError::NoResponse`].
pub(crate) async fn relay_final(
    head: Head,
    mut response: ResponseHalf<'_>,
    respond: &mut SendResponse<Bytes>,
    scope: &RequestScope,
) -> Result<(), ExchangeError> {
    let is_done = response.is_done();
    // Polls once, so that the body does not delay the head.
    let first = if is_done { Poll::Pending } else { futures_util::poll!(pin!(response.part())) };
    let first = match first {
        Poll::Ready(part) => Some(part.map_err(ExchangeError::NoResponse)?),
        Poll::Pending => None,
    };
    let timing = scope.responded(head.status);
    let mut head = tunnel_response(head.status, head.headers);
    head.headers_mut().insert(X_GW_TIMING, timing);
    // Trailers before the announced length are a stream error (RFC 9113 §8.1.1), and h2 closes connections with many of
    // them.
    let by_reset = head.headers().contains_key(header::CONTENT_LENGTH);
    let mut stream = respond.send_response(head, is_done).map_err(|_| ExchangeError::Reset)?;
    if let Some(part) = first {
        relay_part(part, &mut response, &mut stream, scope).await?;
    }
    relay_body(&mut response, &mut stream, scope, by_reset).await
}

/// Number of fields that the agent adds to a response: `X-Gw-Timing`.
const ADDED_FIELDS: usize = 1;

/// Builds the response head for the gateway, without hop-by-hop fields and without fields that only the gateway sets.
pub(crate) fn tunnel_response(status: StatusCode, headers: HeaderMap) -> Response<()> {
    let mut response = Response::new(());
    *response.status_mut() = status;
    *response.headers_mut() = fields::end_to_end(headers, fields::is_own, ADDED_FIELDS);
    response
}

/// Relays the response body to its end. A body that is cut short ends the stream with a reset or with trailers that name
/// the error: see [`abort_response`].
pub(crate) async fn relay_body(
    response: &mut ResponseHalf<'_>,
    stream: &mut SendStream<Bytes>,
    scope: &RequestScope,
    by_reset: bool,
) -> Result<(), ExchangeError> {
    while !response.is_done() {
        let part = {
            let part = std::pin::pin!(response.part());
            let reset = std::pin::pin!(std::future::poll_fn(|cx| stream.poll_reset(cx)));
            match select(part, reset).await {
                Either::Left((part, _)) => part,
                Either::Right(_) => return Err(ExchangeError::Reset),
            }
        };
        match part {
            Ok(part) => relay_part(part, response, stream, scope).await?,
            Err(error) => {
                scope.cut(error.code());
                let (request_id, trace_id) = (scope.request_id(), scope.trace_id());
                tracing::debug!(request_id, trace_id, %error, "response cut short");
                abort_response(&error, stream, by_reset).await;
                return Err(ExchangeError::Reset);
            }
        }
    }
    Ok(())
}

/// Tells the gateway that the response was cut short, after all data before. The caller drops the stream afterwards.
async fn abort_response(error: &ResponseError, stream: &mut SendStream<Bytes>, by_reset: bool) {
    if by_reset {
        // Dropping the stream resets it. Unlike an explicit reset, that never overtakes the head, but it discards queued
        // data, so the connection gets a turn to send the data first.
        runtime::yield_now().await;
    } else {
        let code = HeaderValue::from_static(error.code().as_str());
        // Fails only if the stream is closed, in which case the caller is gone.
        let _ = stream.send_trailers(HeaderMap::from_iter([(X_GW_AGENT_ERROR, code)]));
    }
}

async fn relay_part(
    part: Part,
    response: &mut ResponseHalf<'_>,
    stream: &mut SendStream<Bytes>,
    scope: &RequestScope,
) -> Result<(), ExchangeError> {
    let sent = match part {
        Part::Data(data) => {
            let length = data.len();
            scope.counts.received(length);
            let sent = stream::send(stream, data, response.is_done()).await;
            response.release(length);
            sent
        }
        Part::Trailers(trailers) => stream::finish(stream, Some(fields::end_to_end_trailers(trailers))),
        Part::End => stream::finish(stream, None),
    };
    sent.map_err(|_| ExchangeError::Reset)
}

/// Whether the gateway has reset the stream.
fn was_reset(respond: &mut SendResponse<Bytes>) -> bool {
    respond.poll_reset(&mut Context::from_waker(Waker::noop())).is_ready()
}

/// Returns the result of `future`, or `None` if the gateway resets the stream first.
pub(crate) async fn unless_reset<T>(respond: &mut SendResponse<Bytes>, future: impl Future<Output = T>) -> Option<T> {
    let reset = std::pin::pin!(std::future::poll_fn(|cx| respond.poll_reset(cx)));
    match select(std::pin::pin!(future), reset).await {
        Either::Left((output, _)) => Some(output),
        Either::Right(_) => None,
    }
}

/// The framing of the request body, from the gateway's fields, which are checked again here.
fn framing(parts: &Parts, body: &RecvStream) -> Result<Framing, InvalidHead> {
    Framing::of_stream(&parts.headers, !body.is_end_stream())
}

#[cfg(test)]
mod tests;
