//! HTTP/1.1 of the control plane on one connection, with bounds on heads, bodies and waits.

#[cfg(test)]
mod tests;

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::limits;
use axum::body::{Body, HttpBody};
use axum::extract::{DefaultBodyLimit, Request};
use axum::http::Extensions;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::{BoxError, Router};
use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt, stream};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, timeout_at};

/// Serves one connection, whose requests get these `extensions`: a layer for them would copy all
/// routes. A request head has at most `head` bytes; `idle` is the time from the begin of the
/// connection or from a response to the last byte of the next head. Ends after the running request
/// once `closing` is `true`.
pub(crate) async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    extensions: Extensions,
    head: usize,
    idle: Duration,
    mut closing: watch::Receiver<bool>,
) -> hyper::Result<()> {
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: hyper::Request<Incoming>| {
        request.extensions_mut().extend(extensions.clone());
        router.call(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(idle)
        .max_buf_size(head)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    let closing = async { drop(closing.wait_for(|is_closing| *is_closing).await) };
    tokio::select! {
        ended = connection.as_mut() => ended,
        () = closing => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    }
}

/// Most bytes of the body of a request. The limit that is set last before the body is read counts.
#[derive(Clone)]
struct BodyMax(Arc<AtomicUsize>);

const LATE: &str = "the body was not whole in time; send it again, faster";
/// Text of the response to a request whose body waited for others and was late.
pub(crate) const NO_ROOM: &str = "large bodies of other requests took all room; send it again";

/// Bounds the bodies of requests. Each has at most `bytes`, unless [`limit_body`] sets another
/// limit for its route, and must be whole `within` this time after its head. Those that are not
/// whole have `room` bytes in all, and others wait, except bodies of at most
/// [`limits::SMALL_BODY`]. One that waited and is late gets the response `no_room`. Nothing of a
/// body is received before a handler reads it, which is behind authentication.
pub(crate) fn with_bounded_bodies(
    router: Router,
    bytes: usize,
    room: usize,
    within: Duration,
    no_room: fn() -> Response,
) -> Router {
    let room = Arc::new(Semaphore::new(room));
    router.layer(from_fn(move |mut request: Request, next: Next| {
        let room = Arc::clone(&room);
        let max = BodyMax(Arc::new(AtomicUsize::new(bytes)));
        DefaultBodyLimit::max(bytes).apply(&mut request);
        request.extensions_mut().insert(max.clone());
        let until = Instant::now() + within;
        let has_no_room = Arc::<AtomicBool>::default();
        let of_body = Arc::clone(&has_no_room);
        let request = request.map(|body| {
            Body::from_stream(stream::once(async move {
                timeout_at(until, receive(body, max, room, &of_body))
                    .await
                    .unwrap_or_else(|_| Err(LATE.into()))
            }))
        });
        async move {
            let response = next.run(request).await;
            let is_late = has_no_room.load(Ordering::Relaxed);
            if is_late { no_room() } else { response }
        }
    }))
}

/// Lets the body of a request have at most `BYTES`. A longer one is refused with 413.
pub(crate) async fn limit_body<const BYTES: usize>(mut request: Request) -> Request {
    DefaultBodyLimit::max(BYTES).apply(&mut request);
    if let Some(max) = request.extensions().get::<BodyMax>() {
        max.0.store(BYTES, Ordering::Relaxed);
    }
    request
}

/// Receives a whole body; `waits` is true from a wait for room to its end. Returns one byte too
/// many of a body that is too long.
async fn receive(
    body: Body,
    max: BodyMax,
    room: Arc<Semaphore>,
    waits: &AtomicBool,
) -> Result<Bytes, BoxError> {
    let max = max.0.load(Ordering::Relaxed);
    let announced = body.size_hint().upper();
    let bytes = announced.map_or(max, |announced| max.min(announced as usize));
    let charged = if bytes > limits::SMALL_BODY { bytes } else { 0 };
    waits.store(room.available_permits() < charged, Ordering::Relaxed);
    let _charge = room.acquire_many(charged as u32).await?;
    let mut whole = BytesMut::with_capacity(bytes + 1);
    let mut pieces = body.into_data_stream();
    while whole.len() <= bytes
        && let Some(piece) = pieces.next().await.transpose()?
    {
        // Copied: a piece of a few bytes keeps a whole buffer of its connection.
        let fits = piece.len().min(bytes + 1 - whole.len());
        whole.extend_from_slice(&piece[..fits]);
    }
    waits.store(false, Ordering::Relaxed);
    Ok(whole.freeze())
}
