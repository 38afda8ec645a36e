//! Sending and receiving of bodies on HTTP/2 streams, with flow control.

use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use h2::Reason;

use crate::http::body::{TRAILER_FIELDS_MAX, TRAILERS_MAX};
use crate::http::{Fields, Part};

/// Why a body did not arrive whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamError {
    /// The stream or its connection has ended.
    Closed,
    /// The trailers are over [`TRAILERS_MAX`] or [`TRAILER_FIELDS_MAX`]. The other direction of the
    /// stream is still open.
    TrailersTooLarge,
}

impl From<h2::Error> for StreamError {
    fn from(error: h2::Error) -> Self {
        let has_ended = error.is_reset() || error.is_go_away() || error.is_io();
        if !has_ended && error.reason() == Some(Reason::ENHANCE_YOUR_CALM) {
            Self::TrailersTooLarge
        } else {
            Self::Closed
        }
    }
}

// The h2 crate drops larger trailers than those of HTTP/1.1.
const _: () =
    assert!(h2::TRAILERS_MAX == TRAILERS_MAX && h2::TRAILER_FIELDS_MAX == TRAILER_FIELDS_MAX);

/// Sends all of `data` as the peer's window and the send buffer allow; `last` also ends the stream.
pub async fn send(
    stream: &mut h2::SendStream<Bytes>,
    mut data: Bytes,
    last: bool,
) -> Result<(), StreamError> {
    std::future::poll_fn(|cx| poll_send(stream, cx, &mut data, last)).await
}

/// Sends as much of `data` as possible and removes it from `data`; ready when `data` is empty.
pub fn poll_send(
    stream: &mut h2::SendStream<Bytes>,
    cx: &mut Context<'_>,
    data: &mut Bytes,
    last: bool,
) -> Poll<Result<(), StreamError>> {
    while !data.is_empty() {
        stream.reserve_capacity(data.len());
        let mut capacity = stream.capacity();
        while capacity == 0 {
            capacity = match ready!(stream.poll_capacity(cx)) {
                Some(Ok(capacity)) => capacity,
                Some(Err(error)) => return Poll::Ready(Err(error.into())),
                None => return Poll::Ready(Err(StreamError::Closed)),
            };
        }
        let piece = data.split_to(capacity.min(data.len()));
        let end = last && data.is_empty();
        stream.send_data(piece, end)?;
    }
    Poll::Ready(Ok(()))
}

/// Ends the stream, with trailers if given.
pub fn finish(
    stream: &mut h2::SendStream<Bytes>,
    trailers: Option<Fields>,
) -> Result<(), StreamError> {
    match trailers {
        Some(trailers) => stream.send_trailers(trailers.into()),
        None => stream.send_data(Bytes::new(), true),
    }
    .map_err(StreamError::from)
}

/// Pieces below the first size are merged with pieces that arrived after them, up to the second
/// size, in bytes: a small piece costs every hop as much as a large one.
const MERGED_BELOW: usize = 1024;
const MERGED_MAX: usize = 16 * 1024;

/// Receives the next part; an error means that the body was cut off. Call [`release`] with the
/// length of data after relaying it.
pub fn poll_receive(
    stream: &mut h2::RecvStream,
    cx: &mut Context<'_>,
) -> Poll<Result<Part, StreamError>> {
    while let Some(data) = ready!(stream.poll_data(cx)) {
        match data {
            Ok(data) if data.is_empty() => {}
            Ok(data) if data.len() < MERGED_BELOW && !stream.is_end_stream() => {
                return Poll::Ready(Ok(Part::Data(merge(stream, cx, data))));
            }
            Ok(data) => return Poll::Ready(Ok(Part::Data(data))),
            Err(error) => return Poll::Ready(Err(error.into())),
        }
    }
    Poll::Ready(match ready!(stream.poll_trailers(cx)) {
        Ok(Some(trailers)) => Ok(Part::Trailers(trailers.into())),
        Ok(None) => Ok(Part::End),
        Err(error) => Err(error.into()),
    })
}

/// Merges `first` with data that has arrived after it. End, trailers and errors stay: h2 reports
/// them again.
fn merge(stream: &mut h2::RecvStream, cx: &mut Context<'_>, first: Bytes) -> Bytes {
    let mut merged = BytesMut::new();
    while merged.len() < MERGED_MAX
        && let Poll::Ready(Some(Ok(more))) = stream.poll_data(cx)
    {
        if merged.is_empty() {
            merged.reserve(first.len() + more.len());
            merged.extend_from_slice(&first);
        }
        merged.extend_from_slice(&more);
    }
    if merged.is_empty() {
        first
    } else {
        merged.freeze()
    }
}

/// Returns `bytes` to the sender's window after they were relayed.
pub fn release(stream: &mut h2::RecvStream, bytes: usize) {
    // Fails only for more bytes than were received.
    let released = stream.flow_control().release_capacity(bytes);
    debug_assert!(released.is_ok());
}
