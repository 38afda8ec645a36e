//! Callers that speak HTTP/1.1 (RFC 9112).

use std::cell::Cell;
use std::io::IoSlice;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use crate::limits;
use bytes::{Bytes, BytesMut};
use gw_base::error::Error;
use gw_shared::http::body::{self, BodyDecoder};
use gw_shared::http::head::{self, Framing, HttpVersion, RequestHead};
use gw_shared::http::{ConnectionField, Fields, InvalidHeadParts, Part};
use gw_shared::net::TlsStream;
use gw_shared::runtime;
use gw_shared::tunnel::head::broken_off;
use http::{Method, StatusCode};

use super::Refusals;
use crate::connections::ConnectionGuard;
use crate::http_message::{BodyError, CallerGone, Outcome, RelayedHead, RequestBody, ResponseSink};
use crate::http1;
use crate::peer::Peer;
use crate::route::Router;

/// Largest buffer of a head, in bytes, that is kept while a body follows. A larger head is also
/// written apart from the body, because its charge covers one copy.
const HEAD_BUFFER_KEPT: usize = 4 * 1024;

/// Serves one connection until either side ends it: requests one after another, responses in the
/// same order.
///
/// Not an async function: the future of an async function stores its arguments twice.
pub(crate) fn serve(
    router: Rc<Router>,
    stream: TlsStream,
    peer: Peer,
    guard: ConnectionGuard,
) -> impl Future<Output = ()> {
    let mut refusals = Refusals::new(&router, peer.address());
    guard.expect_by(Instant::now() + limits::HEAD);
    async move {
        let mut buffer = BytesMut::new();
        loop {
            let head = match http1::read_head_or_refuse(
                &stream,
                &mut buffer,
                &guard,
                limits::REQUEST_HEAD,
            )
            .await
            {
                Ok(Some(head)) => head,
                Ok(None) => break,
                Err(refused) => {
                    return Box::pin(refuse_invalid_head(
                        &router, &stream, refused, &peer, &guard,
                    ))
                    .await;
                }
            };
            guard.busy();
            // Boxed: an idle connection does not keep the memory of a request.
            match Box::pin(serve_request(
                &router,
                &stream,
                &mut buffer,
                head,
                &peer,
                &guard,
            ))
            .await
            {
                // Also in a drain, if the response announced a persistent connection: the next
                // response announces the close.
                AfterRequest::KeepAlive => {}
                AfterRequest::Refused if !refusals.count() => {
                    router.observers.counters.abused("refusals");
                    return Box::pin(http1::linger(&stream, &guard)).await;
                }
                // Pipelined refusals never wait for I/O: yield between them.
                AfterRequest::Refused => runtime::yield_now().await,
                AfterRequest::Close => return Box::pin(http1::linger(&stream, &guard)).await,
                AfterRequest::Abort => return,
            }
            guard.idle_until(Instant::now() + limits::IDLE);
        }
        guard.closes();
        // Fails if the caller has closed the connection.
        let _ = stream.close().await;
    }
}

/// What happens to a connection after a request.
enum AfterRequest {
    KeepAlive,
    /// Keep the connection, and count the refusal of an unauthenticated request.
    Refused,
    /// The response is complete; the rest of the request is not read.
    Close,
    /// The response is incomplete, or the rest of the request does not end. The connection ends
    /// with a reset and without `close_notify` (RFC 8446 §6.1): some callers take any other end for
    /// the end of a body without a length.
    Abort,
}

async fn serve_request(
    router: &Router,
    stream: &TlsStream,
    buffer: &mut BytesMut,
    head: RequestHead,
    peer: &Peer,
    guard: &ConnectionGuard,
) -> AfterRequest {
    let rest = Cell::new(Rest::of(&head));
    let mut body = H1RequestBody {
        stream,
        buffer,
        decoder: BodyDecoder::new(head.framing),
        rest: &rest,
        switched: false,
        broken_off: false,
        guard,
    };
    let mut response = H1ResponseSink {
        stream,
        version: head.version,
        is_head: head.method == Method::HEAD,
        // After a declined upgrade, bytes that the caller sent in advance could be of the other
        // protocol.
        keep_alive: head.keep_alive && head.upgrade.is_none(),
        unwritten: Framing::None,
        out: Vec::new(),
        begun: false,
        switched: false,
        rest: &rest,
        guard,
    };
    let outcome = router.serve(head, peer, &mut body, &mut response).await;
    let keep_alive = response.keep_alive;
    match outcome {
        Outcome::Complete if keep_alive => body.finish(AfterRequest::KeepAlive).await,
        Outcome::Refused if keep_alive => body.finish(AfterRequest::Refused).await,
        Outcome::Complete | Outcome::Refused => AfterRequest::Close,
        Outcome::Cut => {
            guard.expect_by(Instant::now() + limits::LINGER);
            stream.socket().reset_when_dropped();
            // Flushes the bytes before the break first, because a reset discards unacknowledged
            // bytes.
            let said = async {
                response.flush().await?;
                stream.socket().acknowledged().await;
                Ok::<_, CallerGone>(())
            };
            let _ = runtime::timeout(limits::LINGER, said).await;
            AfterRequest::Abort
        }
        Outcome::CallerGone => {
            if !response.is_whole() {
                stream.socket().reset_when_dropped();
            }
            AfterRequest::Abort
        }
    }
}

/// Refuses a request whose head is invalid, and closes: bytes after it cannot be trusted to be a
/// request.
async fn refuse_invalid_head(
    router: &Router,
    stream: &TlsStream,
    refused: http1::RefusedHead,
    peer: &Peer,
    guard: &ConnectionGuard,
) {
    guard.expect_by(Instant::now() + limits::LINGER);
    let http1::RefusedHead { invalid, received } = refused;
    let head = InvalidHeadParts::of_http1(&received);
    drop(received);
    guard.has_shaken_hands();
    let mut response = H1ResponseSink {
        stream,
        version: HttpVersion::Http11,
        is_head: false,
        keep_alive: false,
        unwritten: Framing::None,
        out: Vec::new(),
        begun: false,
        switched: false,
        rest: &Cell::new(Rest::Received),
        guard,
    };
    // The caller may not wait for the answer; the connection closes either way.
    let _ = router
        .refuse_invalid_head(head, peer, &Error::invalid_head(invalid), &mut response)
        .await;
    http1::linger(stream, guard).await;
}

/// The part of a request body that has not been received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rest {
    /// The caller may wait for `100 Continue` before it sends the body (RFC 9110 §10.1.1).
    Withheld,
    Coming,
    Received,
}

impl Rest {
    fn of(head: &RequestHead) -> Self {
        match head.expects_continue {
            true => Self::Withheld,
            false if head.framing.has_body() => Self::Coming,
            false => Self::Received,
        }
    }
}

/// The body of one request.
struct H1RequestBody<'a> {
    stream: &'a TlsStream,
    buffer: &'a mut BytesMut,
    decoder: BodyDecoder,
    rest: &'a Cell<Rest>,
    /// An upgrade took place: the bytes are not HTTP.
    switched: bool,
    /// The caller ended an upgraded connection without `close_notify`.
    broken_off: bool,
    guard: &'a ConnectionGuard,
}

impl H1RequestBody<'_> {
    /// Receives the rest of the body after its response, for a limited time. Returns `whole` if the
    /// next request can follow.
    async fn finish(&mut self, whole: AfterRequest) -> AfterRequest {
        if self.decoder.is_done() {
            return whole;
        }
        let guard = self.guard;
        guard.discards();
        match guard
            .discard(self.discard(Some(limits::DISCARD_PAUSE)))
            .await
        {
            Some(Ok(())) => whole,
            Some(Err(BodyError::Malformed(_))) => AfterRequest::Close,
            // A drain ends the discard. The caller gets a moment to take its response.
            Some(Err(BodyError::Gone)) | None if guard.is_draining() => AfterRequest::Close,
            Some(Err(BodyError::Gone)) | None => AfterRequest::Abort,
        }
    }

    fn poll_part(&mut self, cx: &mut Context<'_>) -> Poll<Result<Part, BodyError>> {
        loop {
            if let Some(part) = self
                .decoder
                .decode(self.buffer)
                .map_err(BodyError::Malformed)?
            {
                self.rest.set(if self.decoder.is_done() {
                    Rest::Received
                } else {
                    Rest::Coming
                });
                return Poll::Ready(Ok(part));
            }
            match ready!(self.stream.poll_read_buf(cx, self.buffer)) {
                Ok(1..) => {
                    self.guard.carried();
                    self.rest.set(Rest::Coming);
                }
                // After an upgrade, this direction has ended and the other may continue.
                Ok(0) if self.switched => self.decoder.finish().map_err(BodyError::Malformed)?,
                Err(_) if self.switched => {
                    self.decoder.finish().map_err(BodyError::Malformed)?;
                    self.broken_off = true;
                    return Poll::Ready(Ok(Part::Trailers(broken_off())));
                }
                Ok(0) | Err(_) => return Poll::Ready(Err(BodyError::Gone)),
            }
        }
    }

    /// Reads ahead up to a limit, to notice the end of the connection behind pipelined requests.
    /// Beyond the limit, bytes stay in the kernel and the socket is watched for a hang-up.
    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<CallerGone> {
        // After an upgrade, a caller may end its direction while its last bytes still wait for the
        // backend.
        let has_ended = self.switched && self.decoder.is_done();
        if self.broken_off {
            return Poll::Ready(CallerGone);
        }
        while !has_ended && self.buffer.len() < limits::READ_AHEAD {
            match ready!(self.stream.poll_read_buf(cx, self.buffer)) {
                Ok(1..) if self.rest.get() == Rest::Withheld => self.rest.set(Rest::Coming),
                Ok(1..) => {}
                Ok(0) if self.switched => break,
                Ok(0) | Err(_) => return Poll::Ready(CallerGone),
            }
        }
        match self.switched {
            true => self.guard.poll_broken(cx),
            false => self.guard.poll_hung_up(cx),
        }
        .map(|()| CallerGone)
    }
}

impl RequestBody for H1RequestBody<'_> {
    async fn part(&mut self) -> Result<Part, BodyError> {
        std::future::poll_fn(|cx| self.poll_part(cx)).await
    }

    fn is_done(&self) -> bool {
        self.decoder.is_done()
    }

    async fn gone(&mut self) -> CallerGone {
        std::future::poll_fn(|cx| self.poll_gone(cx)).await
    }

    fn is_reset(&mut self) -> bool {
        !self.switched && !self.decoder.is_done() && self.guard.is_broken()
    }

    fn switch_protocols(&mut self) {
        self.decoder = BodyDecoder::new(Framing::UntilClose);
        self.switched = true;
    }
}

/// The response to one request.
struct H1ResponseSink<'a> {
    stream: &'a TlsStream,
    version: HttpVersion,
    is_head: bool,
    /// The connection can take another request after this response.
    keep_alive: bool,
    /// Framing of the part of the body that was not written: [`Framing::None`] after the end.
    unwritten: Framing,
    /// Head and other small pieces that are sent together with the next data.
    out: Vec<u8>,
    begun: bool,
    /// An upgrade took place: the written bytes are not HTTP.
    switched: bool,
    rest: &'a Cell<Rest>,
    guard: &'a ConnectionGuard,
}

impl H1ResponseSink<'_> {
    fn framing_of(&self, head: &RelayedHead) -> Framing {
        let announced = match (head::content_length(&head.headers), self.version) {
            (Ok(Some(length)), _) => Framing::Length(length),
            (Ok(None) | Err(_), HttpVersion::Http11 | HttpVersion::Http2) => Framing::Chunked,
            (Ok(None) | Err(_), HttpVersion::Http10) => Framing::UntilClose,
        };
        let framing = announced.of_response(
            head.status,
            if self.is_head {
                &Method::HEAD
            } else {
                &Method::GET
            },
        );
        // The upstream stream ended with the head.
        if framing.has_body() && !head.has_body {
            Framing::Length(0)
        } else {
            framing
        }
    }

    async fn write(&mut self, data: &[u8], last: bool) -> Result<(), CallerGone> {
        if self.out.len() > HEAD_BUFFER_KEPT {
            self.write_out().await?;
        }
        let mut size = [0; 18];
        let (start, end): (&[u8], &[u8]) = match self.unwritten {
            Framing::Chunked if last => (
                body::chunk_start(data.len(), &mut size),
                body::LAST_CHUNK_END,
            ),
            Framing::Chunked => (body::chunk_start(data.len(), &mut size), body::CHUNK_END),
            _ => (&[], &[]),
        };
        let mut pieces = [&self.out, start, data, end].map(IoSlice::new);
        self.stream
            .write_all(&mut pieces)
            .await
            .map_err(|_| CallerGone)?;
        self.guard.carried();
        self.out.clear();
        self.unwritten = match self.unwritten {
            Framing::Length(length) => Framing::Length(length.saturating_sub(data.len() as u64)),
            Framing::Chunked if last => Framing::None,
            unwritten => unwritten,
        };
        // The response is complete for its caller, also if its stream does not end.
        if !last && self.unwritten == Framing::Length(0) {
            self.flush().await?;
        }
        Ok(())
    }

    async fn write_out(&mut self) -> Result<(), CallerGone> {
        let mut pieces = [IoSlice::new(&self.out)];
        self.stream
            .write_all(&mut pieces)
            .await
            .map_err(|_| CallerGone)?;
        self.out.clear();
        self.out.shrink_to(HEAD_BUFFER_KEPT);
        Ok(())
    }
}

impl ResponseSink for H1ResponseSink<'_> {
    async fn interim(&mut self, head: RelayedHead) -> Result<(), CallerGone> {
        // HTTP/1.0 has no interim responses (RFC 9110 §15.2). 101 is written by [`Self::head`].
        if self.version == HttpVersion::Http10 || head.status == StatusCode::SWITCHING_PROTOCOLS {
            return Ok(());
        }
        if head.status == StatusCode::CONTINUE && self.rest.get() == Rest::Withheld {
            self.rest.set(Rest::Coming);
        }
        head::write_response(
            &mut self.out,
            head.status,
            &head.headers,
            Framing::None,
            ConnectionField::Persists,
        );
        drop(head);
        self.flush().await
    }

    async fn head(&mut self, head: RelayedHead) -> Result<(), CallerGone> {
        self.begun = true;
        if let Some(protocol) = &head.upgrade {
            (self.switched, self.keep_alive, self.unwritten) = (true, false, Framing::UntilClose);
            let status = StatusCode::SWITCHING_PROTOCOLS;
            let connection = ConnectionField::Upgrade(protocol);
            head::write_response(
                &mut self.out,
                status,
                &head.headers,
                self.unwritten,
                connection,
            );
            return Ok(());
        }
        self.unwritten = self.framing_of(&head);
        // No 100 was sent, so a body may or may not follow: close. A caller that is told of a close
        // stops sending, so a response before the end of its request does not announce the close of
        // a drain.
        let is_drained = self.guard.is_draining() && self.rest.get() == Rest::Received;
        self.keep_alive &=
            self.unwritten != Framing::UntilClose && !self.has_withheld_body() && !is_drained;
        let connection = match (self.keep_alive, self.version) {
            (false, _) => ConnectionField::Close,
            (true, HttpVersion::Http10) => ConnectionField::KeepAlive,
            (true, HttpVersion::Http11 | HttpVersion::Http2) => ConnectionField::Persists,
        };
        self.out.reserve(512);
        head::write_response(
            &mut self.out,
            head.status,
            &head.headers,
            self.unwritten,
            connection,
        );
        Ok(())
    }

    async fn data(&mut self, data: Bytes, last: bool) -> Result<(), CallerGone> {
        // An empty chunk would end the body. A response without a body drops data.
        if data.is_empty() || !self.unwritten.has_body() {
            return Ok(());
        }
        self.write(&data, last).await
    }

    async fn end(&mut self, trailers: Option<Fields>) -> Result<(), CallerGone> {
        if self.unwritten == Framing::Chunked {
            body::write_last_chunk(&mut self.out, trailers.as_ref());
        }
        self.flush().await?;
        self.unwritten = Framing::None;
        // Ends this direction; the direction from the caller may continue.
        if self.switched {
            self.stream.close().await.map_err(|_| CallerGone)
        } else {
            Ok(())
        }
    }

    async fn flush(&mut self) -> Result<(), CallerGone> {
        if !self.out.is_empty() {
            self.write_out().await?;
        }
        self.stream.flush().await.map_err(|_| CallerGone)
    }

    fn unsent(&self) -> usize {
        self.stream.unsent()
    }

    fn is_whole(&self) -> bool {
        self.begun
            && !self.switched
            && !self.unwritten.has_body()
            && self.out.is_empty()
            && self.stream.unsent() == 0
    }

    fn has_withheld_body(&self) -> bool {
        self.rest.get() == Rest::Withheld
    }

    fn has_begun(&self) -> bool {
        self.begun
    }

    fn begin_own_response(&mut self, request_is_readable: bool) {
        self.keep_alive &= request_is_readable;
        self.guard.expect_by(Instant::now() + limits::HEAD);
    }
}
