//! Bodies on HTTP/2 streams, with flow control both ways.

use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http::HeaderMap;

/// The stream ended before its body did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamClosed {
    /// This stream alone: the connection goes on.
    pub is_reset: bool,
}

impl From<h2::Error> for StreamClosed {
    fn from(error: h2::Error) -> Self {
        Self { is_reset: error.is_reset() }
    }
}

/// Sends all of `data` as the peer's window and our send buffer allow; `last` ends the stream with it.
pub async fn send(stream: &mut h2::SendStream<Bytes>, mut data: Bytes, last: bool) -> Result<(), StreamClosed> {
    std::future::poll_fn(|cx| poll_send(stream, cx, &mut data, last)).await
}

/// Sends what it can of `data`, taking it away; ready when nothing is left.
pub fn poll_send(
    stream: &mut h2::SendStream<Bytes>,
    cx: &mut Context<'_>,
    data: &mut Bytes,
    last: bool,
) -> Poll<Result<(), StreamClosed>> {
    while !data.is_empty() {
        stream.reserve_capacity(data.len());
        let mut capacity = stream.capacity();
        while capacity == 0 {
            capacity = match ready!(stream.poll_capacity(cx)) {
                Some(Ok(capacity)) => capacity,
                Some(Err(error)) => return Poll::Ready(Err(error.into())),
                None => return Poll::Ready(Err(StreamClosed { is_reset: false })),
            };
        }
        let piece = data.split_to(capacity.min(data.len()));
        let end = last && data.is_empty();
        stream.send_data(piece, end)?;
    }
    Poll::Ready(Ok(()))
}

/// Ends the stream, with trailers if there are any.
pub fn finish(stream: &mut h2::SendStream<Bytes>, trailers: Option<HeaderMap>) -> Result<(), StreamClosed> {
    match trailers {
        Some(trailers) => stream.send_trailers(trailers),
        None => stream.send_data(Bytes::new(), true),
    }
    .map_err(StreamClosed::from)
}

/// A piece of a received body.
#[derive(Debug)]
pub enum Received {
    /// Give its length to [`release`] once it has been passed on.
    Data(Bytes),
    Trailers(HeaderMap),
    End,
}

/// Pieces below this, in bytes, are put together with those that have arrived behind them, up to so many bytes: each
/// costs every hop as much as a large one.
const GATHERED_BELOW: usize = 1024;
const GATHERED_MAX: usize = 16 * 1024;

/// Receives the next piece; an error means that the body was cut short.
pub fn poll_receive(stream: &mut h2::RecvStream, cx: &mut Context<'_>) -> Poll<Result<Received, StreamClosed>> {
    while let Some(data) = ready!(stream.poll_data(cx)) {
        match data {
            Ok(data) if data.is_empty() => {}
            Ok(data) if data.len() < GATHERED_BELOW && !stream.is_end_stream() => {
                return Poll::Ready(Ok(Received::Data(gather(stream, cx, data))));
            }
            Ok(data) => return Poll::Ready(Ok(Received::Data(data))),
            Err(error) => return Poll::Ready(Err(error.into())),
        }
    }
    Poll::Ready(match ready!(stream.poll_trailers(cx)) {
        Ok(Some(trailers)) => Ok(Received::Trailers(trailers)),
        Ok(None) => Ok(Received::End),
        Err(error) => Err(error.into()),
    })
}

/// `first` and what has arrived behind it. The end, trailers and errors are for the next time: h2 says them again.
fn gather(stream: &mut h2::RecvStream, cx: &mut Context<'_>, first: Bytes) -> Bytes {
    let mut gathered = BytesMut::new();
    while gathered.len() < GATHERED_MAX
        && let Poll::Ready(Some(Ok(more))) = stream.poll_data(cx)
    {
        if gathered.is_empty() {
            gathered.reserve(first.len() + more.len());
            gathered.extend_from_slice(&first);
        }
        gathered.extend_from_slice(&more);
    }
    if gathered.is_empty() { first } else { gathered.freeze() }
}

/// Gives `bytes` that were passed on back to the sender's window.
pub fn release(stream: &mut h2::RecvStream, bytes: usize) {
    // Fails only for more than was received.
    let released = stream.flow_control().release_capacity(bytes);
    debug_assert!(released.is_ok());
}
