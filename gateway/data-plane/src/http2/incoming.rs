//! Bodies received on HTTP/2 streams, buffered while the next hop is slow.
//!
//! h2 needs about 250 bytes for a frame of one byte, and ends connections on which too many such
//! frames wait. Frames that wait for the next hop are therefore taken out of h2 and merged. The
//! stream's window still bounds their bytes.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use futures_util::future::{Either, select};
use gw_shared::http::Part;
use gw_shared::http2::stream::{self, StreamError};
use h2::RecvStream;

/// A received body, with the data that waits for the next hop.
pub(crate) struct Incoming {
    stream: RecvStream,
    /// `None` until the next hop was waited for.
    waiting: Option<Box<PendingPieces>>,
}

impl Incoming {
    pub(crate) fn new(stream: RecvStream) -> Self {
        Self {
            stream,
            waiting: None,
        }
    }

    /// Receives the next piece, waiting data first. An error means that the body was cut off.
    pub(crate) fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<Result<Part, StreamError>> {
        match self.waiting.as_mut().and_then(|waiting| waiting.next()) {
            Some(data) => Poll::Ready(Ok(Part::Data(data))),
            None => stream::poll_receive(&mut self.stream, cx),
        }
    }

    pub(crate) async fn receive(&mut self) -> Result<Part, StreamError> {
        std::future::poll_fn(|cx| self.poll_receive(cx)).await
    }

    /// Waits for `next_hop`; takes data that arrives meanwhile out of h2 without releasing its
    /// window.
    pub(crate) async fn gather_while<T>(&mut self, next_hop: impl Future<Output = T>) -> T {
        if self.stream.is_end_stream() {
            return next_hop.await;
        }
        let gather = std::pin::pin!(std::future::poll_fn(|cx| self.poll_gather(cx)));
        // Polled second, so that a next hop that is ready costs nothing.
        match select(std::pin::pin!(next_hop), gather).await {
            Either::Left((done, _)) => done,
            Either::Right((never, _)) => match never {},
        }
    }

    /// Takes arrived data out of h2. End, trailers and errors stay: h2 reports them again.
    fn poll_gather(&mut self, cx: &mut Context<'_>) -> Poll<Infallible> {
        while let Poll::Ready(Some(Ok(data))) = self.stream.poll_data(cx) {
            if !data.is_empty() {
                self.waiting.get_or_insert_default().push(data);
            }
        }
        Poll::Pending
    }

    /// Whether the body is known to have ended and no data waits.
    pub(crate) fn is_done(&self) -> bool {
        self.waiting
            .as_ref()
            .is_none_or(|waiting| waiting.is_empty())
            && self.stream.is_end_stream()
    }

    /// Returns `bytes` to the sender's window after they were relayed.
    pub(crate) fn release(&mut self, bytes: usize) {
        stream::release(&mut self.stream, bytes);
    }
}

/// Pieces in order. Small ones are merged, since each needs as much memory as a larger one.
#[derive(Default)]
struct PendingPieces {
    pieces: VecDeque<Bytes>,
    /// Merged small pieces after `pieces`.
    last: BytesMut,
}

impl PendingPieces {
    /// Pieces below this size, in bytes, are merged.
    const SMALL: usize = 1024;
    /// Most bytes of merged pieces.
    const MERGED_MAX: usize = 16 * 1024;

    fn push(&mut self, data: Bytes) {
        let is_small = data.len() < Self::SMALL;
        if !self.last.is_empty() && (!is_small || self.last.len() + data.len() > Self::MERGED_MAX) {
            self.pieces
                .push_back(std::mem::take(&mut self.last).freeze());
        }
        if is_small {
            self.last.extend_from_slice(&data);
        } else {
            self.pieces.push_back(data);
        }
    }

    fn next(&mut self) -> Option<Bytes> {
        match self.pieces.pop_front() {
            Some(piece) => Some(piece),
            None if self.last.is_empty() => None,
            None => Some(std::mem::take(&mut self.last).freeze()),
        }
    }

    fn is_empty(&self) -> bool {
        self.pieces.is_empty() && self.last.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_keep_their_order_and_small_ones_are_merged() {
        let mut waiting = PendingPieces::default();
        let sizes = (0..40_000).map(|number| {
            if number % 10_000 == 5000 {
                2000
            } else {
                1 + number % 3
            }
        });
        let mut sent = Vec::new();
        for (number, size) in sizes.enumerate() {
            let piece = vec![(number % 251) as u8; size];
            waiting.push(Bytes::copy_from_slice(&piece));
            sent.extend(piece);
        }
        let mut received = Vec::new();
        let mut pieces = 0;
        while let Some(piece) = waiting.next() {
            assert!(!piece.is_empty() && piece.len() <= PendingPieces::MERGED_MAX);
            received.extend_from_slice(&piece);
            pieces += 1;
        }
        assert!(received == sent && waiting.is_empty());
        // Each large piece, and the merged pieces between them.
        assert!(
            pieces <= 4 + 5 + sent.len() / (PendingPieces::MERGED_MAX - PendingPieces::SMALL),
            "{pieces}"
        );
    }
}
