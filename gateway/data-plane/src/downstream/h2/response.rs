//! Responses on streams of HTTP/2.

use std::cell::RefCell;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use crate::limits;
use bytes::Bytes;
use gw_shared::http::fields::X_GW_REQUEST_ID;
use gw_shared::http::framing::{content_length, set_content_length};
use gw_shared::http::{Fields, Framing};
use gw_shared::http2::stream;
use gw_shared::runtime;
use h2::server::SendResponse;
use h2::{Reason, SendStream};
use http::{Method, Response, StatusCode};

use crate::connections::ConnectionGuard;
use crate::http_message::{CallerGone, RelayedHead, ResponseSink, size_of_fields};
use crate::http2::frame_meter::Meter;
use crate::http2::unsent::Unsent;

/// The response direction of a stream.
pub(super) enum ResponseStream {
    /// No final head was sent.
    Asked(SendResponse<Bytes>),
    Answering(SendStream<Bytes>),
}

impl ResponseStream {
    /// Resolves when the caller has reset the stream, or the connection is gone.
    pub(super) fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<CallerGone> {
        self.poll_end(cx).map(|_| CallerGone)
    }

    /// Whether the caller has reset the stream, and not only ended the connection.
    pub(super) fn is_reset(&mut self) -> bool {
        let ended = self.poll_end(&mut Context::from_waker(Waker::noop()));
        matches!(ended, Poll::Ready(Ok(_)))
    }

    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<Result<Reason, h2::Error>> {
        match self {
            Self::Asked(respond) => respond.poll_reset(cx),
            Self::Answering(stream) => stream.poll_reset(cx),
        }
    }

    pub(super) fn reset(&mut self, reason: Reason) {
        match self {
            Self::Asked(respond) => respond.send_reset(reason),
            Self::Answering(stream) => stream.send_reset(reason),
        }
    }
}

pub(super) struct H2ResponseSink<'a> {
    is_head: bool,
    /// The response has no body, whatever follows.
    is_bodiless: bool,
    /// h2 was given the end of the stream.
    ended: bool,
    /// Bytes of heads and data that h2 was given and may not have sent.
    queued: usize,
    /// Data that [`ResponseSink::end`] waits for.
    unsent: Option<Unsent>,
    stream: &'a RefCell<ResponseStream>,
    meter: &'a Meter,
    guard: &'a ConnectionGuard,
}

/// Bytes of a response that may still wait in h2 when the response is complete. A larger response
/// keeps its charge until h2 has sent them.
const LEFT_IN_H2: usize = 16 * 1024;

impl<'a> H2ResponseSink<'a> {
    /// `is_head` says whether the request's method is HEAD.
    pub(super) fn new(
        is_head: bool,
        stream: &'a RefCell<ResponseStream>,
        meter: &'a Meter,
        guard: &'a ConnectionGuard,
    ) -> Self {
        Self {
            is_head,
            is_bodiless: false,
            ended: false,
            queued: 0,
            unsent: None,
            stream,
            meter,
            guard,
        }
    }

    /// Gives h2 the data, or the end of the stream if there is none. Watches what is over
    /// [`LEFT_IN_H2`].
    async fn send(&mut self, mut data: Bytes, last: bool) -> Result<(), CallerGone> {
        self.queued += data.len();
        if self.queued > LEFT_IN_H2 {
            data = self.unsent.get_or_insert_with(Unsent::new).watch(data);
        }
        if data.is_empty()
            && let ResponseStream::Answering(stream) = &mut *self.stream.borrow_mut()
        {
            return stream.send_data(data, last).map_err(|_| CallerGone);
        }
        std::future::poll_fn(|cx| self.poll_data(cx, &mut data, last)).await
    }

    /// Gives h2 the end of the stream.
    async fn finish(&mut self, trailers: Option<Fields>) -> Result<(), CallerGone> {
        let Some(trailers) = trailers else {
            return self.send(Bytes::new(), true).await;
        };
        self.queued += size_of_fields(&trailers);
        if self.queued > LEFT_IN_H2 && self.unsent.is_none() {
            // h2 sends the trailers behind this data.
            self.send(Bytes::new(), false).await?;
        }
        match &mut *self.stream.borrow_mut() {
            ResponseStream::Answering(stream) => stream
                .send_trailers(trailers.into())
                .map_err(|_| CallerGone),
            ResponseStream::Asked(_) => Err(CallerGone),
        }
    }

    /// Waits until h2 has sent a response that is over [`LEFT_IN_H2`].
    async fn sent(&mut self) {
        match self.unsent.take() {
            Some(unsent) => unsent.sent().await,
            // Only small heads. The connection sends them in its next turn.
            None => runtime::yield_now().await,
        }
        // Heads and trailers need no window.
        self.meter.until_not_blocked().await;
    }

    fn poll_data(
        &self,
        cx: &mut Context<'_>,
        data: &mut Bytes,
        last: bool,
    ) -> Poll<Result<(), CallerGone>> {
        match &mut *self.stream.borrow_mut() {
            ResponseStream::Answering(stream) => {
                stream::poll_send(stream, cx, data, last).map_err(|_| CallerGone)
            }
            ResponseStream::Asked(_) => Poll::Ready(Err(CallerGone)),
        }
    }
}

impl ResponseSink for H2ResponseSink<'_> {
    async fn interim(&mut self, mut head: RelayedHead) -> Result<(), CallerGone> {
        // An upgraded stream has no length (RFC 9113 §8.6).
        if head.status == StatusCode::SWITCHING_PROTOCOLS {
            return Ok(());
        }
        set_content_length(&mut head.headers, Framing::None);
        // h2 queues any number of heads.
        self.meter.until_not_blocked().await;
        self.queued += size_of_fields(&head.headers);
        match &mut *self.stream.borrow_mut() {
            ResponseStream::Asked(respond) => respond
                .send_informational(response(head))
                .map_err(|_| CallerGone),
            ResponseStream::Answering(_) => Ok(()),
        }
    }

    async fn head(&mut self, mut head: RelayedHead) -> Result<(), CallerGone> {
        let announced = content_length(&head.headers)
            .ok()
            .flatten()
            .map_or(Framing::Chunked, Framing::Length);
        let framing = if head.upgrade.is_some() {
            head.status = StatusCode::OK;
            Framing::UntilClose
        } else {
            announced.of_response(
                head.status,
                if self.is_head {
                    &Method::HEAD
                } else {
                    &Method::GET
                },
            )
        };
        set_content_length(&mut head.headers, framing);
        self.is_bodiless =
            !head.has_body || matches!(framing, Framing::None | Framing::Described(_));
        self.queued += size_of_fields(&head.headers);
        // A large head does not end the stream: only data behind it tells when h2 has sent it.
        let ends = self.is_bodiless && self.queued <= LEFT_IN_H2;
        let mut stream = self.stream.borrow_mut();
        let ResponseStream::Asked(respond) = &mut *stream else {
            return Err(CallerGone);
        };
        let request_id = tracing::enabled!(tracing::Level::DEBUG)
            .then(|| head.headers.get(X_GW_REQUEST_ID).cloned());
        let answering = respond
            .send_response(response(head), ends)
            .map_err(|error| {
                let request_id = request_id.flatten();
                let request_id = request_id.as_ref().and_then(|id| id.to_str().ok());
                tracing::debug!(request_id, %error, "response head not sent");
                CallerGone
            })?;
        *stream = ResponseStream::Answering(answering);
        self.ended = ends;
        Ok(())
    }

    async fn data(&mut self, data: Bytes, last: bool) -> Result<(), CallerGone> {
        if self.ended || self.is_bodiless || data.is_empty() {
            return Ok(());
        }
        self.send(data, last).await?;
        self.ended = last;
        Ok(())
    }

    async fn end(&mut self, trailers: Option<Fields>) -> Result<(), CallerGone> {
        if !self.ended {
            self.finish(trailers).await?;
            self.ended = true;
        }
        if self.queued > LEFT_IN_H2 {
            self.sent().await;
            self.queued = 0;
        }
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), CallerGone> {
        // The task of the connection sends queued frames.
        Ok(())
    }

    fn unsent(&self) -> usize {
        // h2 does not tell how much of its buffer is used.
        limits::HTTP2_SEND_BUFFER
    }

    fn is_whole(&self) -> bool {
        self.ended && self.queued <= LEFT_IN_H2
    }

    fn has_begun(&self) -> bool {
        matches!(*self.stream.borrow(), ResponseStream::Answering(_))
    }

    fn begin_own_response(&mut self, _request_is_readable: bool) {}

    /// Waits for a caller without an open window, as long as for a head.
    async fn whole(&mut self, response: Response<Vec<u8>>) -> Result<(), CallerGone> {
        let (parts, body) = response.into_parts();
        let head = RelayedHead {
            status: parts.status,
            headers: parts.headers.into(),
            has_body: !body.is_empty(),
            upgrade: None,
        };
        let guard = self.guard;
        let mut sent = pin!(async {
            self.head(head).await?;
            self.data(body.into(), true).await?;
            self.end(None).await
        });
        if let Poll::Ready(sent) = futures_util::poll!(&mut sent) {
            return sent;
        }
        guard.unread_refusal(sent).await.unwrap_or(Err(CallerGone))
    }
}

fn response(head: RelayedHead) -> Response<()> {
    let mut response = Response::new(());
    *response.status_mut() = head.status;
    *response.headers_mut() = head.headers.into();
    response
}
