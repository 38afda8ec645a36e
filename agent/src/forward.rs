//! One request's way through the agent: from its tunnel stream to the backend and back.

use std::cell::Cell;

use bytes::Bytes;
use futures_util::future::{Either, select};
use gw_shared::http::fields::{self, X_GW_AGENT_ERROR};
use gw_shared::http::{Framing, Part};
use gw_shared::tunnel::stream::{self, Received};
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::header::{self, HeaderValue};
use http::request::Parts;
use http::uri::{Authority, PathAndQuery};
use http::{Method, Request, Response, StatusCode};

use crate::backend::{Body, Connection, Pool, ResponseError};
use crate::slots::Slot;

/// Why a request could not be forwarded, as the gateway tells its caller.
#[derive(Debug)]
pub(crate) struct ForwardError {
    code: &'static str,
    message: String,
}

impl ForwardError {
    /// No slot is free.
    pub(crate) fn concurrency_limit() -> Self {
        Self { code: "GW_AGENT_CONCURRENCY_LIMIT", message: "Concurrent backend request limit exceeded".to_owned() }
    }
}

/// Forwards a request and relays its response. A reset of the stream closes the backend connection at once; the slot
/// is free again however this ends.
pub(crate) async fn forward(pool: &Pool, _slot: Slot, request: Request<RecvStream>, mut respond: SendResponse<Bytes>) {
    let (parts, mut body) = request.into_parts();
    let framing = framing(&parts, &body);
    // A kept connection may close under our hands. A second try is safe for a method that may be repeated
    // (RFC 9110 §9.2.2), without a body, of which the backend took no byte.
    let repeatable = framing == Framing::None && parts.method.is_idempotent();
    let mut kept = pool.take();
    loop {
        let retry = repeatable && kept.is_some();
        let connection = match kept.take() {
            Some(connection) => connection,
            None => match unless_reset(&mut respond, pool.connect()).await {
                Some(Ok(connection)) => connection,
                Some(Err(error)) => {
                    let message = format!("the backend {} cannot be reached: {error}", pool.backend());
                    return refuse(&mut respond, &ForwardError { code: "GW_BACKEND_UNREACHABLE", message });
                }
                None => return,
            },
        };
        match exchange(&connection, &parts, framing, &mut body, &mut respond).await {
            Ok(Reusable(true)) => return pool.give_back(connection),
            Ok(Reusable(false)) | Err(Failure::Over) => return,
            Err(Failure::NoResponse(ResponseError::Reset(_))) if retry && !connection.took_the_request() => {}
            Err(Failure::NoResponse(error)) => return refuse(&mut respond, &error.into()),
        }
    }
}

/// Answers a request with an error of the agent's own.
pub(crate) fn refuse(respond: &mut SendResponse<Bytes>, error: &ForwardError) {
    let mut response = Response::new(());
    *response.status_mut() = StatusCode::BAD_GATEWAY;
    response.headers_mut().insert(X_GW_AGENT_ERROR, HeaderValue::from_static(error.code));
    // Fails only when the stream is gone, and its caller with it.
    if let Ok(mut stream) = respond.send_response(response, false) {
        let _ = stream.send_data(Bytes::copy_from_slice(error.message.as_bytes()), true);
    }
}

/// The connection's response was read to its end, and it may take another request.
struct Reusable(bool);

enum Failure {
    /// Nothing of a response was relayed: the caller can still be told.
    NoResponse(ResponseError),
    /// The stream was reset, by the caller or because its response broke off.
    Over,
}

/// Sends the request and relays the response at the same time: either may end first.
async fn exchange(
    connection: &Connection,
    parts: &Parts,
    framing: Framing,
    body: &mut RecvStream,
    respond: &mut SendResponse<Bytes>,
) -> Result<Reusable, Failure> {
    let sent_whole = Cell::new(false);
    let up = std::pin::pin!(send_request(connection, parts, framing, body, &sent_whole));
    let down = std::pin::pin!(relay_response(connection, &parts.method, respond));
    let kept_alive = match select(down, up).await {
        Either::Left((kept_alive, _)) => kept_alive?,
        Either::Right((Err(CallerGone), _)) => return Err(Failure::Over),
        Either::Right((Ok(()), down)) => down.await?,
    };
    Ok(Reusable(kept_alive && sent_whole.get()))
}

/// The caller took its request back before it was complete.
struct CallerGone;

async fn send_request(
    connection: &Connection,
    parts: &Parts,
    framing: Framing,
    body: &mut RecvStream,
    sent_whole: &Cell<bool>,
) -> Result<(), CallerGone> {
    let target = parts.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    let host = parts.uri.authority().map_or("", Authority::as_str);
    // A backend that does not take all of it may still answer: what went wrong shows when the response is read.
    if connection.send_head(&parts.method, &target, host.as_bytes(), &parts.headers, framing).await.is_err() {
        return Ok(());
    }
    if framing == Framing::None {
        sent_whole.set(true);
        return Ok(());
    }
    let mut trailers = None;
    loop {
        match std::future::poll_fn(|cx| stream::poll_receive(body, cx)).await.map_err(|_| CallerGone)? {
            Received::Data(data) => {
                let sent = connection.send_data(&data, framing).await;
                stream::release(body, data.len());
                if sent.is_err() {
                    return Ok(());
                }
            }
            Received::Trailers(fields) => trailers = Some(fields),
            Received::End => break,
        }
    }
    sent_whole.set(connection.finish(framing, trailers.as_ref()).await.is_ok());
    Ok(())
}

/// Relays the response; tells whether the backend keeps the connection.
async fn relay_response(
    connection: &Connection,
    method: &Method,
    respond: &mut SendResponse<Bytes>,
) -> Result<bool, Failure> {
    let head = match unless_reset(respond, connection.response_head(method)).await {
        Some(head) => head.map_err(Failure::NoResponse)?,
        None => return Err(Failure::Over),
    };
    let mut response = Response::new(());
    *response.status_mut() = head.status;
    // Nobody but the gateway speaks in its name.
    *response.headers_mut() = fields::end_to_end(head.headers, fields::is_own);

    let mut body = Body::new(connection, head.framing);
    let mut stream = respond.send_response(response, body.is_done()).map_err(|_| Failure::Over)?;
    while !body.is_done() {
        let part = {
            let part = std::pin::pin!(body.part());
            let reset = std::pin::pin!(std::future::poll_fn(|cx| stream.poll_reset(cx)));
            match select(part, reset).await {
                Either::Left((part, _)) => part,
                Either::Right(_) => return Err(Failure::Over),
            }
        };
        let sent = match part {
            Ok(Part::Data(data)) => stream::send(&mut stream, data, body.is_done()).await,
            Ok(Part::Trailers(trailers)) => stream::finish(&mut stream, Some(fields::end_to_end_trailers(trailers))),
            Ok(Part::End) => stream::finish(&mut stream, None),
            Err(error) => {
                tracing::debug!(%error, "response cut short");
                stream.send_reset(Reason::INTERNAL_ERROR);
                return Err(Failure::Over);
            }
        };
        sent.map_err(|_| Failure::Over)?;
    }
    Ok(head.keep_alive)
}

/// Waits for `future`, but not beyond a reset of the stream by the gateway.
async fn unless_reset<T>(respond: &mut SendResponse<Bytes>, future: impl Future<Output = T>) -> Option<T> {
    let reset = std::pin::pin!(std::future::poll_fn(|cx| respond.poll_reset(cx)));
    match select(std::pin::pin!(future), reset).await {
        Either::Left((output, _)) => Some(output),
        Either::Right(_) => None,
    }
}

/// How the request body is framed for the backend: as the caller announced it.
fn framing(parts: &Parts, body: &RecvStream) -> Framing {
    let length = parts.headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    match length {
        Some(length) if length > 0 => Framing::Length(length),
        None if !body.is_end_stream() => Framing::Chunked,
        Some(_) | None => Framing::None,
    }
}

impl From<ResponseError> for ForwardError {
    fn from(error: ResponseError) -> Self {
        let code = match &error {
            ResponseError::Reset(_) => "GW_BACKEND_RESET",
            ResponseError::Head(_) | ResponseError::Body(_) | ResponseError::Upgrade => "GW_BACKEND_INVALID_RESPONSE",
        };
        Self { code, message: error.to_string() }
    }
}
