//! Callers that speak HTTP/1.1 (RFC 9112).

use std::cell::Cell;
use std::io::IoSlice;
use std::net::IpAddr;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use gw_shared::http::body::{self, BodyDecoder};
use gw_shared::http::head::{self, Framing, HeadLimits, HeadScanner, RequestHead, Version};
use gw_shared::http::{Connection, InvalidHead, Part, UnreadHead};
use gw_shared::net::TlsStream;
use gw_shared::runtime;
use http::header::HeaderMap;
use http::{Method, StatusCode};

use super::{BodyError, CallerGone, Refusals, RequestBody, ResponseSink};
use crate::client_address::Peer;
use crate::connections::Registered;
use crate::error::Error;
use crate::limits;
use crate::relay::{self, Outcome};
use crate::upstream::ResponseHead;
use crate::worker::Core;

/// Largest rest of a request body that is read and thrown away to keep a connection, in bytes.
const DISCARD_MAX: u64 = 64 * 1024;

/// Serves one connection until either side ends it: requests one after another, answered in order.
pub(crate) async fn serve(core: Rc<Core>, stream: TlsStream, peer: IpAddr, registered: Registered) {
    let mut buffer = BytesMut::new();
    let mut refusals = Refusals::new(&core, peer);
    let peer = Peer::new(peer, Some(registered.socket_use()));
    registered.expect_by(Instant::now() + limits::HEAD);
    loop {
        let head = match read_or_refuse(&stream, &mut buffer, &registered, limits::REQUEST_HEAD).await {
            Ok(Some(head)) => head,
            Ok(None) => break,
            Err(refused) => return refuse_unread(&core, &stream, refused, &peer, &registered).await,
        };
        registered.busy();
        match serve_request(&core, &stream, &mut buffer, head, &peer, &registered).await {
            // In a drain too, if the response has promised it: the next one says that the connection ends.
            Next::KeepAlive => {}
            Next::Refused if !refusals.count() => {
                core.counters.abused("refusals");
                return linger(&stream, &registered).await;
            }
            // Of those that were sent at once, none waits for anything: others get their turn in between.
            Next::Refused => runtime::yield_now().await,
            Next::Close => return linger(&stream, &registered).await,
            Next::Abort => return,
        }
        registered.idle_until(Instant::now() + limits::IDLE);
    }
    registered.closes();
    // The caller may be gone already.
    let _ = stream.close().await;
}

/// What becomes of a connection after a request.
enum Next {
    KeepAlive,
    /// The same, after a refusal to a stranger.
    Refused,
    /// The response is whole; what the caller still sends is of no use.
    Close,
    /// The response is not whole. The connection ends without `close_notify` (RFC 8446 §6.1) and by a reset, since some
    /// callers take any other end for the end of a body that has no length.
    Abort,
}

/// Reads one request head; `None` when the caller has nothing more to ask, or took too long to.
pub(crate) async fn read_head(
    stream: &TlsStream,
    buffer: &mut BytesMut,
    registered: &Registered,
    head_limits: HeadLimits,
) -> Result<Option<RequestHead>, InvalidHead> {
    read_or_refuse(stream, buffer, registered, head_limits).await.map_err(|refused| refused.invalid)
}

/// Refused head, with its received bytes.
struct RefusedHead {
    invalid: InvalidHead,
    received: Bytes,
}

/// As [`read_head`]; keeps a head that is refused.
async fn read_or_refuse(
    stream: &TlsStream,
    buffer: &mut BytesMut,
    registered: &Registered,
    head_limits: HeadLimits,
) -> Result<Option<RequestHead>, RefusedHead> {
    let mut scanner = HeadScanner::default();
    let mut begun = false;
    loop {
        match scanner.find_end(buffer, head_limits) {
            Ok(Some(end)) => {
                let received = buffer.split_to(end).freeze();
                let parsed = head::parse_request(&received, head_limits);
                return parsed.map(Some).map_err(|invalid| RefusedHead { invalid, received });
            }
            Ok(None) => {}
            Err(invalid) => return Err(RefusedHead { invalid, received: buffer.split().freeze() }),
        }
        if buffer.is_empty() {
            // An idle connection keeps no buffer.
            *buffer = BytesMut::new();
        } else if !begun {
            begun = true;
            registered.expect_by(Instant::now() + limits::HEAD);
        }
        match std::future::poll_fn(|cx| stream.poll_read_buf(cx, buffer)).await {
            Ok(1..) => {}
            Ok(0) | Err(_) => return Ok(None),
        }
    }
}

async fn serve_request(
    core: &Rc<Core>,
    stream: &TlsStream,
    buffer: &mut BytesMut,
    head: RequestHead,
    peer: &Peer,
    registered: &Registered,
) -> Next {
    let awaits_continue = Cell::new(head.expects_continue);
    let mut body = Body {
        stream,
        buffer,
        decoder: BodyDecoder::new(head.framing),
        awaits_continue: &awaits_continue,
        switched: false,
        registered,
    };
    let mut response = Response {
        core,
        stream,
        version: head.version,
        is_head: head.method == Method::HEAD,
        keep_alive: head.keep_alive,
        framing: Framing::None,
        out: Vec::new(),
        begun: false,
        body_ended: false,
        switched: false,
        awaits_continue: Some(&awaits_continue),
        registered,
    };
    let outcome = relay::relay(core, head, peer, &mut body, &mut response).await;
    let keep_alive = response.keep_alive;
    // The response is written: what is left to read of the request has a time limit again.
    registered.expect_by(Instant::now() + limits::LINGER);
    match outcome {
        Outcome::Complete if keep_alive && body.discard().await => Next::KeepAlive,
        Outcome::Refused if keep_alive && body.discard().await => Next::Refused,
        Outcome::Complete | Outcome::Refused => Next::Close,
        Outcome::Cut => {
            stream.socket().reset_when_dropped();
            // Flushes the bytes before the break first, because a reset discards unacknowledged bytes.
            let said = async {
                response.flush().await?;
                stream.socket().acknowledged().await;
                Ok::<_, CallerGone>(())
            };
            let _ = runtime::timeout(limits::LINGER, said).await;
            Next::Abort
        }
        Outcome::CallerGone => {
            stream.socket().reset_when_dropped();
            Next::Abort
        }
    }
}

/// Answers a request that could not be understood, and closes: nothing after it can be trusted to be a request.
async fn refuse_unread(
    core: &Rc<Core>,
    stream: &TlsStream,
    refused: RefusedHead,
    peer: &Peer,
    registered: &Registered,
) {
    registered.expect_by(Instant::now() + limits::LINGER);
    let head = UnreadHead::of_http1(&refused.received);
    let mut response = error_sink(core, stream, registered, false);
    // The caller may not wait for the answer; the connection closes either way.
    let _ = relay::refuse_unread(core, head, peer, &Error::invalid_head(refused.invalid), &mut response).await;
    linger(stream, registered).await;
}

/// Answers before a request could be understood, and closes: nothing after it can be trusted to be a request.
pub(crate) async fn refuse_and_close(core: &Rc<Core>, stream: &TlsStream, error: &Error, registered: &Registered) {
    core.counters.refused(error);
    registered.expect_by(Instant::now() + limits::LINGER);
    // The caller may not wait for the answer; the connection closes either way.
    let _ = write_error(core, stream, error, registered, false).await;
    linger(stream, registered).await;
}

/// Answers a request without a body that another is to follow.
pub(crate) async fn answer(
    core: &Rc<Core>,
    stream: &TlsStream,
    error: &Error,
    registered: &Registered,
) -> Result<(), CallerGone> {
    write_error(core, stream, error, registered, true).await
}

async fn write_error(
    core: &Rc<Core>,
    stream: &TlsStream,
    error: &Error,
    registered: &Registered,
    keep_alive: bool,
) -> Result<(), CallerGone> {
    let mut response = error_sink(core, stream, registered, keep_alive);
    response.whole(core.dated(error.response(core.ids.next_id()))).await
}

fn error_sink<'a>(core: &'a Core, stream: &'a TlsStream, registered: &'a Registered, keep_alive: bool) -> Response<'a> {
    Response {
        core,
        stream,
        version: Version::Http11,
        is_head: false,
        keep_alive,
        framing: Framing::None,
        out: Vec::new(),
        begun: false,
        body_ended: false,
        switched: false,
        awaits_continue: None,
        registered,
    }
}

/// Closes after a response to a request that was not read to its end: what still arrives is thrown away for a while,
/// because closing with unread data resets the connection and can take the response with it (RFC 9112 §9.6).
async fn linger(stream: &TlsStream, registered: &Registered) {
    registered.expect_by(Instant::now() + limits::LINGER);
    registered.closes();
    if stream.close().await.is_ok() {
        stream.closer().linger(limits::LINGER_BYTES).await;
    }
}

/// A request body, and the watch on its caller.
struct Body<'a> {
    stream: &'a TlsStream,
    buffer: &'a mut BytesMut,
    decoder: BodyDecoder,
    /// The caller may be waiting for `100 Continue`, and send nothing before.
    awaits_continue: &'a Cell<bool>,
    /// The bytes are of another protocol.
    switched: bool,
    registered: &'a Registered,
}

impl Body<'_> {
    /// Reads the rest of the body away if that is cheaper than a new connection; whether the next request can follow.
    async fn discard(&mut self) -> bool {
        if self.awaits_continue.get() && !self.decoder.is_done() {
            return false;
        }
        while !self.decoder.is_done() {
            if self.decoder.remaining().is_none_or(|rest| rest > DISCARD_MAX) || self.part().await.is_err() {
                return false;
            }
        }
        true
    }

    fn poll_part(&mut self, cx: &mut Context<'_>) -> Poll<Result<Part, BodyError>> {
        loop {
            if let Some(part) = self.decoder.decode(self.buffer).map_err(BodyError::Malformed)? {
                return Poll::Ready(Ok(part));
            }
            match ready!(self.stream.poll_read_buf(cx, self.buffer)) {
                Ok(1..) => {
                    self.registered.carried();
                    self.awaits_continue.set(false);
                }
                // Of another protocol this direction has ended; the other may go on.
                Ok(0) if self.switched => self.decoder.finish().map_err(BodyError::Malformed)?,
                Ok(0) | Err(_) => return Poll::Ready(Err(BodyError::Gone)),
            }
        }
    }

    /// Reads ahead a little, to see the end of the connection behind what was pipelined. Beyond that, what is not read
    /// stays with the caller, and the connection is looked at from outside.
    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<CallerGone> {
        if self.switched && self.decoder.is_done() {
            return self.registered.poll_broken(cx).map(|()| CallerGone);
        }
        while self.buffer.len() < limits::READ_AHEAD {
            match ready!(self.stream.poll_read_buf(cx, self.buffer)) {
                Ok(1..) => {}
                Ok(0) | Err(_) => return Poll::Ready(CallerGone),
            }
        }
        self.registered.poll_hung_up(cx).map(|()| CallerGone)
    }
}

impl RequestBody for Body<'_> {
    async fn part(&mut self) -> Result<Part, BodyError> {
        std::future::poll_fn(|cx| self.poll_part(cx)).await
    }

    fn is_done(&self) -> bool {
        self.decoder.is_done()
    }

    async fn gone(&mut self) -> CallerGone {
        std::future::poll_fn(|cx| self.poll_gone(cx)).await
    }

    fn switch_protocols(&mut self) {
        self.decoder = BodyDecoder::new(Framing::UntilClose);
        self.switched = true;
    }
}

/// The response to one request.
struct Response<'a> {
    core: &'a Core,
    stream: &'a TlsStream,
    version: Version,
    is_head: bool,
    /// The connection can take another request after this response.
    keep_alive: bool,
    framing: Framing,
    /// Head and other small pieces, until they leave together with what follows them.
    out: Vec<u8>,
    begun: bool,
    /// The end of the body was written with its last piece.
    body_ended: bool,
    /// What is written is of another protocol.
    switched: bool,
    awaits_continue: Option<&'a Cell<bool>>,
    registered: &'a Registered,
}

impl Response<'_> {
    fn framing_of(&self, head: &ResponseHead) -> Framing {
        let announced = match (head::content_length(&head.headers), self.version) {
            (Ok(Some(length)), _) => Framing::Length(length),
            (Ok(None) | Err(_), Version::Http11 | Version::Http2) => Framing::Chunked,
            (Ok(None) | Err(_), Version::Http10) => Framing::UntilClose,
        };
        let framing = announced.of_response(head.status, if self.is_head { &Method::HEAD } else { &Method::GET });
        // The stream that it came on has ended already.
        if framing.has_body() && !head.has_body { Framing::Length(0) } else { framing }
    }

    async fn write(&mut self, data: &[u8], last: bool) -> Result<(), CallerGone> {
        let mut size = [0; 18];
        let (start, end): (&[u8], &[u8]) = match self.framing {
            Framing::Chunked if last => (body::chunk_start(data.len(), &mut size), body::LAST_CHUNK_END),
            Framing::Chunked => (body::chunk_start(data.len(), &mut size), body::CHUNK_END),
            _ => (&[], &[]),
        };
        let mut pieces = [&self.out, start, data, end].map(IoSlice::new);
        self.stream.write_all(&mut pieces).await.map_err(|_| CallerGone)?;
        self.registered.carried();
        self.out.clear();
        self.body_ended = last;
        Ok(())
    }
}

impl ResponseSink for Response<'_> {
    async fn interim(&mut self, head: ResponseHead) -> Result<(), CallerGone> {
        // HTTP/1.0 has none (RFC 9110 §15.2). A switch is no interim response: [`Self::head`] announces it.
        if self.version == Version::Http10 || head.status == StatusCode::SWITCHING_PROTOCOLS {
            return Ok(());
        }
        if head.status == StatusCode::CONTINUE
            && let Some(awaits_continue) = self.awaits_continue
        {
            awaits_continue.set(false);
        }
        head::write_response(&mut self.out, head.status, &head.headers, Framing::None, Connection::Persists);
        self.flush().await
    }

    async fn head(&mut self, head: ResponseHead) -> Result<(), CallerGone> {
        self.begun = true;
        if let Some(protocol) = &head.upgrade {
            (self.switched, self.keep_alive, self.framing) = (true, false, Framing::UntilClose);
            let (status, connection) = (StatusCode::SWITCHING_PROTOCOLS, Connection::Upgrade(protocol));
            head::write_response(&mut self.out, status, &head.headers, self.framing, connection);
            return Ok(());
        }
        self.framing = self.framing_of(&head);
        // Whether a body that was not called for will come, nobody can tell.
        let awaits_continue = self.awaits_continue.is_some_and(Cell::get);
        self.keep_alive &= self.framing != Framing::UntilClose && !awaits_continue && !self.core.is_draining();
        let connection = match (self.keep_alive, self.version) {
            (false, _) => Connection::Close,
            (true, Version::Http10) => Connection::KeepAlive,
            (true, Version::Http11 | Version::Http2) => Connection::Persists,
        };
        self.out.reserve(512);
        head::write_response(&mut self.out, head.status, &head.headers, self.framing, connection);
        Ok(())
    }

    async fn data(&mut self, data: Bytes, last: bool) -> Result<(), CallerGone> {
        // An empty chunk would be the last; a response without a body has nothing to put data into.
        if data.is_empty() || !self.framing.has_body() {
            return Ok(());
        }
        self.write(&data, last).await
    }

    async fn end(&mut self, trailers: Option<HeaderMap>) -> Result<(), CallerGone> {
        if self.framing == Framing::Chunked && !self.body_ended {
            body::write_last_chunk(&mut self.out, trailers.as_ref());
        }
        self.flush().await?;
        // The end of our half: the caller's may go on.
        if self.switched { self.stream.close().await.map_err(|_| CallerGone) } else { Ok(()) }
    }

    async fn flush(&mut self) -> Result<(), CallerGone> {
        if !self.out.is_empty() {
            let mut pieces = [IoSlice::new(&self.out)];
            self.stream.write_all(&mut pieces).await.map_err(|_| CallerGone)?;
            self.out.clear();
        }
        self.stream.flush().await.map_err(|_| CallerGone)
    }

    fn has_begun(&self) -> bool {
        self.begun
    }

    fn begin_refusal(&mut self, request_is_readable: bool) {
        self.keep_alive &= request_is_readable;
        self.registered.expect_by(Instant::now() + limits::HEAD);
    }
}
