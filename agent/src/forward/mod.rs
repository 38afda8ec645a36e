//! Forwards a request from its tunnel stream to a backend and relays the response.

pub(crate) mod slots;
pub(crate) mod upgrade;
mod upload;

use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use futures_util::future::{Either, FutureExt, select};
use gw_shared::error_code::AgentErrorCode;
use gw_shared::http::caller_connection::CallerConnection;
use gw_shared::http::{Fields, Framing, Part, RequestHead, fields};
use gw_shared::tunnel::body::ReceivedBody;
use gw_shared::tunnel::connection::{StreamReceiver, StreamSender};
use gw_shared::tunnel::endpoint::ReceivedPart;
use gw_shared::tunnel::frame::Kind;
use gw_shared::tunnel::head;
use gw_shared::tunnel::response::{InterimBudget, InvalidResponse, check_fields, check_status};
use http::{Method, StatusCode};

use self::upload::{RequestReset, RequestUpload, Sent, send_body};
use crate::backend::{
    BackendHead, CallerPool, ConnectError, Lease, Offer, Pool, RequestHalf, ResponseError,
    ResponseHalf,
};
use crate::forward::slots::Slot;
use crate::telemetry::request_scope::RequestScope;

/// A request of the gateway.
pub(crate) struct TunnelRequest {
    pub(crate) head: RequestHead,
    caller: Option<CallerConnection>,
    delivery: RequestDelivery,
    pub(crate) sender: StreamSender,
    receiver: StreamReceiver,
}

impl TunnelRequest {
    /// Reads the head of a stream that the gateway has opened. Resets the stream if the head is
    /// invalid.
    pub(crate) fn read((sender, receiver): (StreamSender, StreamReceiver)) -> Option<Self> {
        // The head has arrived with the stream.
        let part = receiver.poll_receive(&mut Context::from_waker(Waker::noop()));
        let Poll::Ready(Ok(ReceivedPart::Head(Kind::Request, payload))) = part else {
            return None;
        };
        match head::parse_request(&payload, receiver.ended_with_head()) {
            Ok(mut head) => {
                // Only a body can wait for the acceptance.
                let has_body = !receiver.ended_with_head();
                let delivery = if has_body {
                    RequestDelivery::begin(&mut head.headers)
                } else {
                    RequestDelivery::Unprocessed
                };
                let caller = CallerConnection::take(&mut head.headers);
                Some(Self {
                    head,
                    caller,
                    delivery,
                    sender,
                    receiver,
                })
            }
            Err(error) => {
                // A gateway never sends this.
                tracing::warn!(%error, "invalid request on the tunnel");
                None
            }
        }
    }
}

/// How far a request has come towards a backend. A refusal tells it to the gateway, which gives a
/// request that no backend processed to another agent, whatever its method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequestDelivery {
    /// Nothing was sent, and the gateway asks for a notice of acceptance before that.
    AwaitsAcceptance,
    /// Nothing was sent, or no backend processed any of it.
    Unprocessed,
    /// A backend may have processed a part of the request, or the gateway was told to send the rest
    /// of it.
    MaybeProcessed,
}

impl RequestDelivery {
    /// The state of a request that has arrived. Removes the field that asks for a notice.
    fn begin(headers: &mut Fields) -> Self {
        if headers.remove(head::AWAIT_ACCEPTANCE).is_some() {
            Self::AwaitsAcceptance
        } else {
            Self::Unprocessed
        }
    }

    /// Records that the request has a slot and a connection to a backend. Sends the notice that the
    /// gateway asked for.
    pub(crate) fn accept(&mut self, sender: &StreamSender) {
        if *self == Self::AwaitsAcceptance {
            *self = Self::MaybeProcessed;
            // Fails only if the stream is closed, which the exchange notices.
            let _ = sender.send_head(Kind::Interim, false, head::write_acceptance);
        }
    }
}

/// Why a request was not forwarded. The gateway passes code and message on to the caller.
#[derive(Debug)]
pub(crate) struct ForwardError {
    code: AgentErrorCode,
    message: String,
    delivery: RequestDelivery,
}

impl ForwardError {
    /// No slot is free.
    pub(crate) fn concurrency_limit() -> Self {
        let message = "Concurrent backend request limit exceeded".to_owned();
        Self {
            code: AgentErrorCode::ConcurrencyLimit,
            message,
            delivery: RequestDelivery::Unprocessed,
        }
    }

    /// No connection to a backend could be opened. An earlier connection may have received the
    /// request.
    pub(crate) fn no_connection(error: &ConnectError, delivery: RequestDelivery) -> Self {
        Self {
            code: error.code(),
            message: error.to_string(),
            delivery,
        }
    }

    /// The backend of this connection gave no response.
    pub(crate) fn no_response(
        error: &ResponseError,
        lease: &Lease<'_>,
        delivery: RequestDelivery,
    ) -> Self {
        Self {
            code: error.code(),
            message: error.message(lease.is_tls()),
            delivery,
        }
    }
}

/// Forwards a request and relays its response. A reset of the stream closes the backend connection
/// at once. The request ends when its response and its body have: a backend may answer early and
/// read on.
pub(crate) async fn forward(pool: &Pool, slot: Slot, scope: RequestScope, request: TunnelRequest) {
    let TunnelRequest {
        head: request,
        caller,
        delivery,
        sender,
        receiver,
    } = request;
    if sender.is_reset() {
        // The backend has not seen the request yet.
        return;
    }
    let pool = CallerPool { pool, caller };
    let upload = RequestUpload::default();
    // Boxed, like connecting, so that rare cases do not enlarge the task of every request.
    let (ended, _body) = if request.upgrade.is_some() {
        let content = request.framing.content_length().unwrap_or(0);
        let mut body = ReceivedBody::upgraded(receiver, content);
        (
            Box::pin(upgrade::forward(
                pool, &scope, request, delivery, &mut body, &sender, &upload,
            ))
            .await,
            body,
        )
    } else {
        let mut body = ReceivedBody::new(receiver, request.framing);
        (
            forward_message(
                pool, &scope, &request, delivery, &mut body, &sender, &upload,
            )
            .await,
            body,
        )
    };
    if let Ok(Complete) = ended {
        scope.complete();
        // First, so that the slot is free when the gateway opens the next stream.
        drop(slot);
        sender.report_upload(Some(upload.taken()));
    }
}

/// Both directions of a request have ended.
pub(crate) struct Complete;

/// The request was refused, reset or broken off.
pub(crate) struct Failed;

/// Connects to a backend. Refuses the request if there is no connection.
async fn connect<'a>(
    pool: CallerPool<'a>,
    request: &RequestHead,
    offer: Offer,
    scope: &RequestScope,
    delivery: RequestDelivery,
    sender: &StreamSender,
) -> Result<Lease<'a>, Failed> {
    match unless_reset(sender, pool.connect(request, offer, scope)).await {
        Some(Ok(lease)) => Ok(lease),
        Some(Err(error)) => {
            let error = ForwardError::no_connection(&error, delivery);
            Err(refuse(sender, scope, &error))
        }
        None => Err(Failed),
    }
}

async fn forward_message(
    pool: CallerPool<'_>,
    scope: &RequestScope,
    request: &RequestHead,
    mut delivery: RequestDelivery,
    body: &mut ReceivedBody,
    sender: &StreamSender,
    upload: &RequestUpload,
) -> Result<Complete, Failed> {
    let is_repeatable = pool.pool.may_repeat(request);
    let mut reused = pool.reuse(request, is_repeatable);
    let mut offer = Offer::Any;
    let mut resent = 0;
    let mut is_repeated = false;
    loop {
        let lease = match reused.take() {
            Some(lease) => lease,
            None => Box::pin(connect(pool, request, offer, scope, delivery, sender)).await?,
        };
        scope.connected(|| lease.describe());
        delivery.accept(sender);
        let may_move = is_repeatable && !is_repeated;
        let ended = exchange(&lease, request, may_move, body, sender, scope, upload).await;
        let error = match ended {
            Ok(Reusable(reusable)) => {
                if reusable {
                    lease.give_back();
                }
                return Ok(Complete);
            }
            Err(ExchangeError::Reset) => {
                lease.abort();
                return Err(Failed);
            }
            Err(ExchangeError::NoResponse(error)) => error,
        };
        let is_kept = upload.is_repeatable() && !upload.has_response();
        let is_sent_again = if offer == Offer::Any && is_kept && lease.needs_http1(&error) {
            offer = Offer::Http1;
            true
        } else if is_unprocessed(&lease, &error, upload) {
            resent += 1;
            resent <= error.resent_most() && upload.is_repeatable()
        } else {
            delivery = RequestDelivery::MaybeProcessed;
            is_repeated = true;
            may_move && lease.is_lost(&error) && !upload.has_response()
        };
        if !is_sent_again {
            let error = ForwardError::no_response(&error, &lease, delivery);
            return Err(refuse(sender, scope, &error));
        }
    }
}

/// Whether `error` proves that the backend has not processed any part of the request.
pub(crate) fn is_unprocessed(
    lease: &Lease<'_>,
    error: &ResponseError,
    upload: &RequestUpload,
) -> bool {
    lease.is_unprocessed(error) && !upload.has_response()
}

/// Answers a request with an error of the agent.
pub(crate) fn refuse(sender: &StreamSender, scope: &RequestScope, error: &ForwardError) -> Failed {
    let request_id = scope.request_id();
    let trace_id = scope.trace_id();
    tracing::debug!(
        request_id,
        trace_id,
        code = error.code.as_str(),
        reason = error.message,
        "not forwarded"
    );
    let timing = scope.failed(error.code);
    // Fails only if the stream is closed, in which case the caller is gone.
    let _ = sender.send_head(Kind::Refused, true, |out| {
        let unsent = error.delivery != RequestDelivery::MaybeProcessed;
        head::write_refusal(out, timing, unsent, error.code.as_str(), &error.message);
    });
    Failed
}

/// Whether the connection can serve another request after a complete exchange.
struct Reusable(bool);

/// Why an exchange with a backend was not completed.
pub(crate) enum ExchangeError {
    /// No part of a response was relayed, so the agent can still answer with an error.
    NoResponse(ResponseError),
    /// The stream was reset by the gateway, or the response was broken off.
    Reset,
}

/// Sends the request and relays the response concurrently. Either may end first.
async fn exchange(
    lease: &Lease<'_>,
    request: &RequestHead,
    may_move: bool,
    body: &mut ReceivedBody,
    sender: &StreamSender,
    scope: &RequestScope,
    upload: &RequestUpload,
) -> Result<Reusable, ExchangeError> {
    let (up, down) = lease
        .exchange(request, may_move)
        .map_err(ExchangeError::NoResponse)?;
    let up = pin!(send_request(up, lease, request, body, scope, upload));
    let mut down = pin!(relay_response(down, lease, request, sender, scope, upload));
    let (kept_alive, sent) = match select(down.as_mut(), up).await {
        Either::Left((kept_alive, up)) if request.framing.has_body() => {
            let kept_alive = kept_alive?;
            // A backend that does not read blocks the upload, which does not notice a reset then.
            (
                kept_alive,
                unless_reset(sender, up).await.ok_or(ExchangeError::Reset)?,
            )
        }
        // The gateway may open the next stream now, so the slot is freed without another wait.
        Either::Left((kept_alive, up)) => {
            (kept_alive?, up.now_or_never().unwrap_or(Ok(Sent::Partly)))
        }
        Either::Right((Ok(sent), _)) => (upload_ended(sent, down, sender, upload).await?, Ok(sent)),
        Either::Right((reset, _)) => (false, reset),
    };
    let sent = sent.map_err(|RequestReset| ExchangeError::Reset)?;
    Ok(Reusable(kept_alive && sent == Sent::Whole))
}

/// Waits for the end of the response, after the request was sent or the backend has stopped reading
/// it.
async fn upload_ended(
    sent: Sent,
    mut response: Pin<&mut impl Future<Output = Result<bool, ExchangeError>>>,
    sender: &StreamSender,
    upload: &RequestUpload,
) -> Result<bool, ExchangeError> {
    if sent == Sent::Partly && upload.is_consumed() {
        // An HTTP/2 stream that was reset has its error at hand, after which the body may be sent
        // again.
        if let Poll::Ready(ended) = futures_util::poll!(response.as_mut()) {
            return ended;
        }
        // Lets the gateway discard the rest now: its caller may read the response only after the
        // whole request.
        sender.report_upload(Some(upload.taken()));
    }
    response.await
}

async fn send_request(
    mut up: RequestHalf<'_>,
    lease: &Lease<'_>,
    request: &RequestHead,
    body: &mut ReceivedBody,
    scope: &RequestScope,
    upload: &RequestUpload,
) -> Result<Sent, RequestReset> {
    // A backend may answer without reading the whole request. Errors are reported when the response
    // is read.
    if up.head(request, lease.authority(request)).await.is_err() {
        return Ok(Sent::Partly);
    }
    if request.framing.has_body() {
        send_body(&mut up, body, scope, upload).await
    } else {
        Ok(Sent::Whole)
    }
}

/// Relays the response. Returns whether the backend keeps the connection open.
async fn relay_response(
    mut response: ResponseHalf<'_>,
    lease: &Lease<'_>,
    request: &RequestHead,
    sender: &StreamSender,
    scope: &RequestScope,
    upload: &RequestUpload,
) -> Result<bool, ExchangeError> {
    let mut head = final_head(&mut response, &request.method, sender, upload).await?;
    head.headers = lease.map_back(request, head.headers);
    if head.status == StatusCode::SWITCHING_PROTOCOLS {
        return Err(ExchangeError::NoResponse(ResponseError::UnrequestedUpgrade));
    }
    let keep_alive = head.keep_alive;
    relay_final(head, response, sender, scope).await?;
    Ok(keep_alive)
}

/// Waits for the final response or 101, and relays the interim responses before it.
pub(crate) async fn final_head(
    response: &mut ResponseHalf<'_>,
    method: &Method,
    sender: &StreamSender,
    upload: &RequestUpload,
) -> Result<BackendHead, ExchangeError> {
    let mut budget = InterimBudget::default();
    let invalid = |error: InvalidResponse| ExchangeError::NoResponse(error.into());
    loop {
        let head = match unless_reset(sender, response.head(method)).await {
            Some(head) => head.map_err(ExchangeError::NoResponse)?,
            None => return Err(ExchangeError::Reset),
        };
        upload.response_began();
        if head.status == StatusCode::SWITCHING_PROTOCOLS {
            return Ok(head);
        }
        if !head.status.is_informational() {
            check_status(head.status)
                .and_then(|()| check_fields(&head.headers))
                .map_err(invalid)?;
            return Ok(head);
        }
        let mut headers = fields::end_to_end_response(head.headers);
        budget.take(head.status, &mut headers).map_err(invalid)?;
        sender
            .send_head(Kind::Interim, false, |out| {
                head::write_interim(out, head.status, &headers);
            })
            .map_err(|_| ExchangeError::Reset)?;
    }
}

/// Relays a final response. If the beginning of the body is already available and invalid, nothing
/// has been relayed and the result is [`ExchangeError::NoResponse`].
pub(crate) async fn relay_final(
    head: BackendHead,
    mut response: ResponseHalf<'_>,
    sender: &StreamSender,
    scope: &RequestScope,
) -> Result<(), ExchangeError> {
    let is_done = response.is_done();
    // Polls once, so that the body does not delay the head.
    let first = if is_done {
        Poll::Pending
    } else {
        futures_util::poll!(pin!(response.part()))
    };
    let first = match first {
        Poll::Ready(part) => Some(part.map_err(ExchangeError::NoResponse)?),
        Poll::Pending => None,
    };
    let framing = match head.framing {
        // HTTP/2 ends a body without announcing its length.
        Framing::Chunked | Framing::UntilClose if is_done => Framing::None,
        Framing::UntilClose => Framing::Chunked,
        framing => framing,
    };
    let timing = scope.responded(head.status);
    let headers = fields::end_to_end_response(head.headers);
    sender
        .send_head(Kind::Response, is_done, |out| {
            head::write_response(out, timing, head.status, &headers, framing, None);
        })
        .map_err(|_| ExchangeError::Reset)?;
    if let Some(part) = first {
        relay_part(part, &mut response, sender, scope).await?;
    }
    relay_body(&mut response, sender, scope).await
}

/// Relays the response body to its end. If it is cut short, breaks off the stream with the code of
/// the error.
pub(crate) async fn relay_body(
    response: &mut ResponseHalf<'_>,
    sender: &StreamSender,
    scope: &RequestScope,
) -> Result<(), ExchangeError> {
    while !response.is_done() {
        match unless_reset(sender, response.part()).await {
            Some(Ok(part)) => relay_part(part, response, sender, scope).await?,
            Some(Err(error)) => {
                scope.cut(error.code());
                let request_id = scope.request_id();
                let trace_id = scope.trace_id();
                tracing::debug!(request_id, trace_id, %error, "response cut short");
                // Fails only if the stream is closed, in which case the caller is gone.
                let _ = sender.break_off(error.code().as_str());
                return Err(ExchangeError::Reset);
            }
            None => return Err(ExchangeError::Reset),
        }
    }
    Ok(())
}

async fn relay_part(
    part: Part,
    response: &mut ResponseHalf<'_>,
    sender: &StreamSender,
    scope: &RequestScope,
) -> Result<(), ExchangeError> {
    let sent = match part {
        Part::Data(data) => {
            let length = data.len();
            scope.counts.received(length);
            let sent = sender.send(data, response.is_done()).await;
            response.release(length);
            sent
        }
        Part::Trailers(trailers) => sender
            .finish_with_trailers(head::write_trailers(&fields::end_to_end_trailers(trailers))),
        Part::End => sender.finish(),
    };
    sent.map_err(|_| ExchangeError::Reset)
}

/// Returns the result of `future`, or `None` if the gateway resets the stream first.
pub(crate) async fn unless_reset<T>(
    sender: &StreamSender,
    future: impl Future<Output = T>,
) -> Option<T> {
    let reset = std::pin::pin!(std::future::poll_fn(|cx| sender.poll_reset(cx)));
    match select(std::pin::pin!(future), reset).await {
        Either::Left((output, _)) => Some(output),
        Either::Right(_) => None,
    }
}

#[cfg(test)]
mod tests;
