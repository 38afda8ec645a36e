//! A caller of HTTP/1.1 of a worker in memory.
//!
//! Everything between the bytes of a request and the bytes of its response runs as in the product:
//! head, route, directory, service key, bucket, tunnel, response, counters, and the record for the
//! request log. Not included: TLS, sockets, and the table of connections with its deadlines. This
//! module repeats what `downstream` does there, such as the choice of the response's framing.

use std::rc::Rc;

use crate::limits;
use bytes::{Bytes, BytesMut};
use gw_shared::http::body::{self, BodyDecoder};
use gw_shared::http::head::{self, Framing, HeadScanner};
use gw_shared::http::{ConnectionField, Fields, Part};
use http::Method;

use crate::http_message::{BodyError, CallerGone, Outcome, RelayedHead, RequestBody, ResponseSink};
use crate::peer::Peer;
use crate::support::memory_worker::{CALLER, MemoryWorker};

/// A connection of HTTP/1.1.
pub struct Http1Caller {
    gateway: Rc<MemoryWorker>,
    peer: Peer,
    /// Bytes that were received and not read yet.
    buffer: BytesMut,
    /// Bytes of the last response.
    sent: Vec<u8>,
}

impl Http1Caller {
    /// Creates a connection that `gateway` serves.
    pub fn new(gateway: &Rc<MemoryWorker>) -> Self {
        Self {
            gateway: Rc::clone(gateway),
            peer: Peer::new(CALLER, None, None),
            buffer: BytesMut::new(),
            sent: Vec::new(),
        }
    }

    /// Relays a request. Returns the response; `None` if it is not complete.
    pub async fn relay(&mut self, request: &[u8]) -> Option<&[u8]> {
        let Self {
            gateway,
            peer,
            buffer,
            sent,
        } = self;
        buffer.extend_from_slice(request);
        sent.clear();
        let end = HeadScanner::default()
            .find_end(buffer, limits::REQUEST_HEAD)
            .ok()??;
        let head =
            head::parse_request(&buffer.split_to(end).freeze(), limits::REQUEST_HEAD).ok()?;
        let is_head = head.method == Method::HEAD;
        let mut body = WholeBody {
            decoder: BodyDecoder::new(head.framing),
            buffer,
        };
        let mut sink = Http1Sink {
            sent,
            is_head,
            framing: Framing::None,
            out: Vec::new(),
            begun: false,
            ended: false,
        };
        let router = &gateway.worker.router;
        let outcome = router.serve(head, peer, &mut body, &mut sink).await;
        (outcome == Outcome::Complete && buffer.is_empty()).then_some(sent)
    }
}

/// A request body that has arrived whole.
struct WholeBody<'a> {
    decoder: BodyDecoder,
    buffer: &'a mut BytesMut,
}

impl RequestBody for WholeBody<'_> {
    async fn part(&mut self) -> Result<Part, BodyError> {
        match self
            .decoder
            .decode(self.buffer)
            .map_err(BodyError::Malformed)?
        {
            Some(part) => Ok(part),
            None => Err(BodyError::Gone),
        }
    }

    fn is_done(&self) -> bool {
        self.decoder.is_done()
    }

    async fn gone(&mut self) -> CallerGone {
        std::future::pending().await
    }

    fn switch_protocols(&mut self) {}
}

/// Writes a response of HTTP/1.1 as [`crate::downstream::h1`] does.
struct Http1Sink<'a> {
    sent: &'a mut Vec<u8>,
    is_head: bool,
    framing: Framing,
    /// Head and other small pieces that are sent together with the next data.
    out: Vec<u8>,
    begun: bool,
    /// The end of the body was written with its last piece.
    ended: bool,
}

impl ResponseSink for Http1Sink<'_> {
    async fn interim(&mut self, head: RelayedHead) -> Result<(), CallerGone> {
        head::write_response(
            &mut self.out,
            head.status,
            &head.headers,
            Framing::None,
            ConnectionField::Persists,
        );
        self.flush().await
    }

    async fn head(&mut self, head: RelayedHead) -> Result<(), CallerGone> {
        self.begun = true;
        let announced = match head::content_length(&head.headers) {
            Ok(Some(length)) => Framing::Length(length),
            Ok(None) | Err(_) => Framing::Chunked,
        };
        let framing = announced.of_response(
            head.status,
            if self.is_head {
                &Method::HEAD
            } else {
                &Method::GET
            },
        );
        self.framing = if framing.has_body() && !head.has_body {
            Framing::Length(0)
        } else {
            framing
        };
        self.out.reserve(512);
        head::write_response(
            &mut self.out,
            head.status,
            &head.headers,
            self.framing,
            ConnectionField::Persists,
        );
        Ok(())
    }

    async fn data(&mut self, data: Bytes, last: bool) -> Result<(), CallerGone> {
        if data.is_empty() || !self.framing.has_body() {
            return Ok(());
        }
        let mut size = [0; 18];
        let (start, end): (&[u8], &[u8]) = match self.framing {
            Framing::Chunked if last => (
                body::chunk_start(data.len(), &mut size),
                body::LAST_CHUNK_END,
            ),
            Framing::Chunked => (body::chunk_start(data.len(), &mut size), body::CHUNK_END),
            _ => (&[], &[]),
        };
        for piece in [&self.out, start, &data, end] {
            self.sent.extend_from_slice(piece);
        }
        self.out.clear();
        self.ended = last;
        Ok(())
    }

    async fn end(&mut self, trailers: Option<Fields>) -> Result<(), CallerGone> {
        if self.framing == Framing::Chunked && !self.ended {
            body::write_last_chunk(&mut self.out, trailers.as_ref());
        }
        self.flush().await
    }

    async fn flush(&mut self) -> Result<(), CallerGone> {
        self.sent.append(&mut self.out);
        Ok(())
    }

    fn has_begun(&self) -> bool {
        self.begun
    }

    fn begin_own_response(&mut self, _: bool) {}
}
