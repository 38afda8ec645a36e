//! Message heads. Parsing is strict: a head that two parsers could read differently is refused.

mod http1;
mod http2;

use std::sync::LazyLock;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use http::header::{self, HeaderValue};
use http::uri::{Authority, PathAndQuery};
use http::{Method, StatusCode};
use memchr::memmem;

pub use super::framing::{Framing, content_length, set_content_length};
pub use super::limits::{HeadLimits, InvalidHead};
use super::upgrade::UpgradeProtocol;
pub use super::version::HttpVersion;
pub use super::write::{ConnectionField, write_request, write_response};
use crate::http::Fields;
pub use http1::{parse_request, parse_response};
pub(super) use http2::authority_of_http2;
pub use http2::request_of_http2;

/// Parsed head of a request.
#[derive(Debug, Clone)]
pub struct RequestHead {
    pub method: Method,
    /// Path and query as received, or `*`; for an absolute-form target, the part after the
    /// authority. Contains visible ASCII characters except `#`, and UTF-8.
    pub target: PathAndQuery,
    /// Host and optional port: from an absolute-form target, else from `Host` (RFC 9112 §3.2.2).
    pub authority: Authority,
    pub version: HttpVersion,
    /// Fields in order of arrival, without `Host` in HTTP/1.1. Includes fields that frame the
    /// message; [`write_request`] skips them.
    pub headers: Fields,
    pub framing: Framing,
    /// Whether the connection persists after this message (RFC 9112 §9.3).
    pub keep_alive: bool,
    /// Whether the sender waits for `100 Continue` before it sends the body (RFC 9110 §10.1.1).
    pub expects_continue: bool,
    /// Protocol of a request to switch protocols: from `Upgrade` (RFC 9110 §7.8), or from an
    /// extended CONNECT (RFC 8441 §4), whose `method` is GET here.
    pub upgrade: Option<UpgradeProtocol>,
}

/// Parsed head of a response.
#[derive(Debug)]
pub struct ResponseHead {
    pub status: StatusCode,
    pub version: HttpVersion,
    /// Fields in order of arrival; see [`RequestHead::headers`].
    pub headers: Fields,
    pub framing: Framing,
    pub keep_alive: bool,
}

/// Reads a head; see [`HeadScanner::poll_head`].
pub async fn read_head<E: From<InvalidHead>>(
    buffer: &mut BytesMut,
    limits: HeadLimits,
    mut receive: impl FnMut(&mut Context<'_>, &mut BytesMut) -> Poll<Result<usize, E>>,
) -> Result<Option<Bytes>, E> {
    let mut scanner = HeadScanner::default();
    std::future::poll_fn(|cx| scanner.poll_head(cx, buffer, limits, &mut receive)).await
}

/// Finds the end of a head in a growing buffer without scanning any byte twice.
#[derive(Debug, Default)]
pub struct HeadScanner {
    scanned: usize,
    /// Whether anything other than an empty line has arrived.
    started: bool,
}

impl HeadScanner {
    /// Takes a whole head out of `buffer`, with its final empty line; `None` if the connection ends
    /// before. `receive` appends received bytes to `buffer` and returns their number, 0 at the end
    /// of the connection.
    pub fn poll_head<E: From<InvalidHead>>(
        &mut self,
        cx: &mut Context<'_>,
        buffer: &mut BytesMut,
        limits: HeadLimits,
        mut receive: impl FnMut(&mut Context<'_>, &mut BytesMut) -> Poll<Result<usize, E>>,
    ) -> Poll<Result<Option<Bytes>, E>> {
        loop {
            if let Some(end) = self.find_end(buffer, limits)? {
                return Poll::Ready(Ok(Some(buffer.split_to(end).freeze())));
            }
            if ready!(receive(cx, buffer))? == 0 {
                return Poll::Ready(Ok(None));
            }
        }
    }

    /// Returns the length of the head at the front of `buffer`, with its final empty line, once it
    /// is complete.
    ///
    /// Removes empty lines before the head from `buffer` (RFC 9112 §2.2).
    pub fn find_end(
        &mut self,
        buffer: &mut BytesMut,
        limits: HeadLimits,
    ) -> Result<Option<usize>, InvalidHead> {
        if !self.started {
            while buffer.starts_with(b"\r\n") {
                buffer.advance(2);
            }
            if matches!(&buffer[..], b"" | b"\r") {
                return Ok(None);
            }
            self.started = true;
        }
        // Reads may split the empty line that ends the head.
        let from = self.scanned.saturating_sub(3);
        let end = END_OF_HEAD.find(&buffer[from..]).map(|at| from + at + 4);
        self.scanned = buffer.len();
        match end {
            Some(end) if end > limits.head => Err(InvalidHead::HeadTooLarge(limits.head)),
            Some(end) => {
                *self = Self::default();
                Ok(Some(end))
            }
            None if buffer.len() > limits.head => Err(InvalidHead::HeadTooLarge(limits.head)),
            // A sender of bare line feeds would wait for a response while this end waits for the
            // head's end.
            None if memmem::find(&buffer[from..], b"\n\n").is_some() => Err(BARE_LINE_FEED),
            None => Ok(None),
        }
    }
}

static END_OF_HEAD: LazyLock<memmem::Finder<'static>> =
    LazyLock::new(|| memmem::Finder::new(b"\r\n\r\n"));

const BARE_LINE_FEED: InvalidHead = InvalidHead::Syntax("line feed without carriage return");
const CONNECT: InvalidHead = InvalidHead::Syntax("CONNECT: this server is not a forward proxy");
const USERINFO: InvalidHead = InvalidHead::Syntax("userinfo in Host");

fn expects_continue(headers: &Fields, framing: Framing) -> bool {
    let expects = |value: &HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"100-continue");
    framing.has_body() && headers.get(header::EXPECT).is_some_and(expects)
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) const LIMITS: HeadLimits = HeadLimits {
        head: 1024,
        fields: 10,
        target: 100,
    };

    #[test]
    fn the_end_of_a_head_is_found_in_bytes_split_anywhere() {
        let text = b"\r\n\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\nrest";
        for step in 1..text.len() {
            let mut scanner = HeadScanner::default();
            let mut buffer = BytesMut::new();
            let mut found = None;
            for piece in text.chunks(step) {
                buffer.extend_from_slice(piece);
                found = scanner.find_end(&mut buffer, LIMITS).unwrap();
                if found.is_some() {
                    break;
                }
            }
            let head = buffer.split_to(found.unwrap());
            let expected = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n";
            assert_eq!(&head[..], expected, "step {step}");
        }
        let mut long = BytesMut::from(&vec![b'a'; 1025][..]);
        let found = HeadScanner::default().find_end(&mut long, LIMITS);
        assert_eq!(found, Err(InvalidHead::HeadTooLarge(1024)));
    }
}
