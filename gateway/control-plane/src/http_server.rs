//! HTTP/1.1 of the control plane on one connection, with bounds on heads, bodies and waits.

use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::http::Extensions;
use axum::middleware::map_request;
use axum::{BoxError, Router};
use bytes::Bytes;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio::time::{Sleep, sleep};

/// Serves one connection, whose requests get these `extensions`: a layer for them would copy all routes. A request head has
/// at most `head` bytes; `idle` is the time from the begin of the connection or from a response to the last byte of the next
/// head. Ends after the running request once `closing` is `true`.
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

/// Makes the bodies of requests fail that do not arrive `within` this time after their heads.
pub(crate) fn with_timed_bodies(router: Router, within: Duration) -> Router {
    let timed = move |request: Request| async move {
        request.map(|body| Body::new(TimedBody::new(body, within)))
    };
    router.layer(map_request(timed))
}

/// A request body that must arrive within a time.
struct TimedBody {
    body: Body,
    late: Pin<Box<Sleep>>,
}

impl TimedBody {
    fn new(body: Body, within: Duration) -> Self {
        Self {
            body,
            late: Box::pin(sleep(within)),
        }
    }
}

impl HttpBody for TimedBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.late.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err("the body did not arrive in time".into())));
        }
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
