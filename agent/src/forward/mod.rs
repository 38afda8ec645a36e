//! One request's way through the agent: from its tunnel stream to the backend and back.

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

use crate::backend::{ConnectError, Head, Lease, Pool, RequestHalf, ResponseError, ResponseHalf, Wanted};
use crate::forward::slots::Slot;
use crate::telemetry::request_scope::Passage;

/// Why a request could not be forwarded, as the gateway tells its caller.
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

/// Forwards a request and relays its response. A reset of the stream closes the backend connection at once; the slot
/// is free again however this ends.
pub(crate) async fn forward(
    pool: &Pool,
    _slot: Slot,
    passage: Passage,
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
) {
    if was_reset(&mut respond) {
        // Before the backend had to know of it.
        return;
    }
    let (mut parts, body) = request.into_parts();
    if parts.method == Method::CONNECT {
        // In a box, as is connecting: what is rare is not to make the task of every request larger.
        return Box::pin(upgrade::forward(pool, passage, parts, body, respond)).await;
    }
    fields::join_cookies(&mut parts.headers);
    let Ok(framing) = framing(&parts, &body) else {
        // Not what a gateway sends.
        return respond.send_reset(Reason::PROTOCOL_ERROR);
    };
    let mut body = Incoming::new(body);
    let mut kept = pool.kept();
    let mut is_second = false;
    loop {
        let lease = match kept.take() {
            Some(lease) => lease,
            None => {
                let connect = body.gather_while(unless_reset(&mut respond, pool.connect(Wanted::Any, &passage)));
                match Box::pin(connect).await {
                    Some(Ok(lease)) => lease,
                    Some(Err(error)) => return refuse(&mut respond, &passage, &error.into()),
                    None => return,
                }
            }
        };
        passage.connected(&lease);
        let progress = Progress { passage: &passage, took_of_body: Cell::default(), sent_whole: Cell::default() };
        match exchange(&lease, &parts, framing, &mut body, &mut respond, &progress).await {
            Ok(Reusable(reusable)) => {
                passage.complete();
                if reusable {
                    lease.give_back();
                }
                return;
            }
            Err(Failure::Over) => return lease.abort(),
            Err(Failure::NoResponse(error)) => {
                if is_second || !may_be_repeated(&lease, &parts, framing, &progress) || !lease.did_not_begin(&error) {
                    return refuse(&mut respond, &passage, &error.into());
                }
            }
        }
        is_second = true;
    }
}

/// Whether the request can be sent again if the backend has not begun with it.
fn may_be_repeated(lease: &Lease<'_>, parts: &Parts, framing: Framing, progress: &Progress<'_>) -> bool {
    if lease.is_http2() {
        // The backend itself says what it has not begun with.
        !progress.took_of_body.get()
    } else {
        // A kept connection may close under our hands. A second try is safe for a method that may be repeated
        // (RFC 9110 §9.2.2), without a body, which the backend has not read.
        lease.was_kept && !framing.has_body() && parts.method.is_idempotent()
    }
}

/// Answers a request with an error of the agent's own.
pub(crate) fn refuse(respond: &mut SendResponse<Bytes>, passage: &Passage, error: &ForwardError) {
    let (request_id, trace_id) = (passage.request_id(), passage.trace_id());
    tracing::debug!(request_id, trace_id, code = error.code.as_str(), reason = error.message, "not forwarded");
    let mut response = Response::new(());
    *response.status_mut() = StatusCode::BAD_GATEWAY;
    response.headers_mut().insert(X_GW_AGENT_ERROR, HeaderValue::from_static(error.code.as_str()));
    response.headers_mut().insert(X_GW_TIMING, passage.failed(error.code));
    // Fails only when the stream is gone, and its caller with it.
    if let Ok(mut stream) = respond.send_response(response, false) {
        let _ = stream.send_data(Bytes::copy_from_slice(error.message.as_bytes()), true);
    }
}

/// How far a request has got.
struct Progress<'a> {
    passage: &'a Passage,
    /// Something of the body has left the tunnel: it cannot be had again.
    took_of_body: Cell<bool>,
    sent_whole: Cell<bool>,
}

/// The connection's response was read to its end, and it may take another request.
pub(crate) struct Reusable(pub(crate) bool);

pub(crate) enum Failure {
    /// Nothing of a response was relayed: the caller can still be told.
    NoResponse(ResponseError),
    /// The stream was reset, by the caller or because its response broke off.
    Over,
}

/// Sends the request and relays the response at the same time: either may end first.
async fn exchange(
    lease: &Lease<'_>,
    parts: &Parts,
    framing: Framing,
    body: &mut Incoming,
    respond: &mut SendResponse<Bytes>,
    progress: &Progress<'_>,
) -> Result<Reusable, Failure> {
    let (request, response) = lease.exchange(parts, framing).map_err(Failure::NoResponse)?;
    let up = std::pin::pin!(send_request(request, lease, parts, framing, body, progress));
    let down = std::pin::pin!(relay_response(response, &parts.method, respond, progress.passage));
    let kept_alive = match select(down, up).await {
        Either::Left((kept_alive, _)) => kept_alive?,
        Either::Right((Err(CallerGone), _)) => return Err(Failure::Over),
        Either::Right((Ok(()), down)) => down.await?,
    };
    Ok(Reusable(kept_alive && progress.sent_whole.get()))
}

/// The caller took its request back before it was complete.
pub(crate) struct CallerGone;

async fn send_request(
    mut request: RequestHalf<'_>,
    lease: &Lease<'_>,
    parts: &Parts,
    framing: Framing,
    body: &mut Incoming,
    progress: &Progress<'_>,
) -> Result<(), CallerGone> {
    // A backend that does not take all of it may still answer: what went wrong shows when the response is read.
    if body.gather_while(request.head(parts, lease.authority(parts))).await.is_err() {
        return Ok(());
    }
    if !framing.has_body() {
        progress.sent_whole.set(true);
        return Ok(());
    }
    progress.sent_whole.set(send_body(&mut request, body, progress.passage, &progress.took_of_body).await?.is_ok());
    Ok(())
}

/// Sends what comes from the tunnel, to its end or until the backend takes no more.
pub(crate) async fn send_body(
    request: &mut RequestHalf<'_>,
    body: &mut Incoming,
    passage: &Passage,
    took: &Cell<bool>,
) -> Result<std::io::Result<()>, CallerGone> {
    let mut trailers = None;
    loop {
        let received = body.receive().await.map_err(|_| CallerGone)?;
        took.set(true);
        match received {
            Received::Data(data) => {
                let length = data.len();
                passage.counts.sent(length);
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

/// Relays the response; tells whether the backend keeps the connection.
async fn relay_response(
    mut response: ResponseHalf<'_>,
    method: &Method,
    respond: &mut SendResponse<Bytes>,
    passage: &Passage,
) -> Result<bool, Failure> {
    let head = final_head(&mut response, method, respond).await?;
    if head.status == StatusCode::SWITCHING_PROTOCOLS {
        return Err(Failure::NoResponse(ResponseError::Unasked));
    }
    let keep_alive = head.keep_alive;
    relay_final(head, response, respond, passage).await?;
    Ok(keep_alive)
}

/// Waits for the final response, 101 among them, and passes on the interim ones before it.
pub(crate) async fn final_head(
    response: &mut ResponseHalf<'_>,
    method: &Method,
    respond: &mut SendResponse<Bytes>,
) -> Result<Head, Failure> {
    let mut budget = InterimBudget::default();
    let invalid = |error: InvalidResponse| Failure::NoResponse(error.into());
    loop {
        let head = match unless_reset(respond, response.head(method)).await {
            Some(head) => head.map_err(Failure::NoResponse)?,
            None => return Err(Failure::Over),
        };
        if head.status == StatusCode::SWITCHING_PROTOCOLS {
            return Ok(head);
        }
        if !head.status.is_informational() {
            check_status(head.status).and_then(|()| check_fields(&head.headers)).map_err(invalid)?;
            return Ok(head);
        }
        let mut interim = on_the_tunnel(head.status, head.headers);
        budget.take(head.status, interim.headers_mut()).map_err(invalid)?;
        respond.send_informational(interim).map_err(|_| Failure::Over)?;
    }
}

/// Relays a final response, whose body is still to come. If the body is seen to be broken before the head has left,
/// there was no response.
pub(crate) async fn relay_final(
    head: Head,
    mut response: ResponseHalf<'_>,
    respond: &mut SendResponse<Bytes>,
    passage: &Passage,
) -> Result<(), Failure> {
    let is_done = response.is_done();
    // Polls once without waiting: the head is not delayed by its body.
    let first = if is_done { Poll::Pending } else { futures_util::poll!(pin!(response.part())) };
    let first = match first {
        Poll::Ready(part) => Some(part.map_err(Failure::NoResponse)?),
        Poll::Pending => None,
    };
    let timing = passage.responded(head.status);
    let mut head = on_the_tunnel(head.status, head.headers);
    head.headers_mut().insert(X_GW_TIMING, timing);
    // An end before the announced length is a stream error (RFC 9113 §8.1.1), and h2 ends connections that had many.
    let by_reset = head.headers().contains_key(header::CONTENT_LENGTH);
    let mut stream = respond.send_response(head, is_done).map_err(|_| Failure::Over)?;
    if let Some(part) = first {
        relay_part(part, &mut response, &mut stream, passage).await?;
    }
    relay_body(&mut response, &mut stream, passage, by_reset).await
}

/// Fields that a response gets here: where its time went.
const ADDED_FIELDS: usize = 1;

/// A response head as it goes to the gateway, without the fields of the connection that it came on and without those that
/// only the gateway sets.
pub(crate) fn on_the_tunnel(status: StatusCode, headers: HeaderMap) -> Response<()> {
    let mut response = Response::new(());
    *response.status_mut() = status;
    *response.headers_mut() = fields::end_to_end(headers, fields::is_own, ADDED_FIELDS);
    response
}

/// Relays what the backend sends until it ends. If that breaks off, so does the stream: [by a reset](break_off), or by
/// trailers that name the error.
pub(crate) async fn relay_body(
    response: &mut ResponseHalf<'_>,
    stream: &mut SendStream<Bytes>,
    passage: &Passage,
    by_reset: bool,
) -> Result<(), Failure> {
    while !response.is_done() {
        let part = {
            let part = std::pin::pin!(response.part());
            let reset = std::pin::pin!(std::future::poll_fn(|cx| stream.poll_reset(cx)));
            match select(part, reset).await {
                Either::Left((part, _)) => part,
                Either::Right(_) => return Err(Failure::Over),
            }
        };
        match part {
            Ok(part) => relay_part(part, response, stream, passage).await?,
            Err(error) => {
                passage.cut(error.code());
                let (request_id, trace_id) = (passage.request_id(), passage.trace_id());
                tracing::debug!(request_id, trace_id, %error, "response cut short");
                break_off(&error, stream, by_reset).await;
                return Err(Failure::Over);
            }
        }
    }
    Ok(())
}

/// Tells the gateway, behind everything that came before, that the response broke off. The stream is to be dropped then.
async fn break_off(error: &ResponseError, stream: &mut SendStream<Bytes>, by_reset: bool) {
    if by_reset {
        // By the drop: such a reset never overtakes the head, unlike an explicit one. It discards data that is still
        // queued, so the connection gets a turn to send it first.
        runtime::yield_now().await;
    } else {
        let code = HeaderValue::from_static(error.code().as_str());
        // Fails only when the stream is gone, and its caller with it.
        let _ = stream.send_trailers(HeaderMap::from_iter([(X_GW_AGENT_ERROR, code)]));
    }
}

async fn relay_part(
    part: Part,
    response: &mut ResponseHalf<'_>,
    stream: &mut SendStream<Bytes>,
    passage: &Passage,
) -> Result<(), Failure> {
    let sent = match part {
        Part::Data(data) => {
            let length = data.len();
            passage.counts.received(length);
            let sent = stream::send(stream, data, response.is_done()).await;
            response.release(length);
            sent
        }
        Part::Trailers(trailers) => stream::finish(stream, Some(fields::end_to_end_trailers(trailers))),
        Part::End => stream::finish(stream, None),
    };
    sent.map_err(|_| Failure::Over)
}

/// Whether the gateway has reset the stream already.
fn was_reset(respond: &mut SendResponse<Bytes>) -> bool {
    respond.poll_reset(&mut Context::from_waker(Waker::noop())).is_ready()
}

/// Waits for `future`, but not beyond a reset of the stream by the gateway.
pub(crate) async fn unless_reset<T>(respond: &mut SendResponse<Bytes>, future: impl Future<Output = T>) -> Option<T> {
    let reset = std::pin::pin!(std::future::poll_fn(|cx| respond.poll_reset(cx)));
    match select(std::pin::pin!(future), reset).await {
        Either::Left((output, _)) => Some(output),
        Either::Right(_) => None,
    }
}

/// How the request body is framed for the backend: as the gateway announces it, checked again here.
fn framing(parts: &Parts, body: &RecvStream) -> Result<Framing, InvalidHead> {
    Framing::of_stream(&parts.headers, !body.is_end_stream())
}

#[cfg(test)]
mod tests;
