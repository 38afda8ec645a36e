//! Data that h2 was given and has not sent yet. h2 does not report it, but it drops a piece of data
//! when it has sent it, or when the stream is reset.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::oneshot;

/// Watches the data of one response.
pub(crate) struct Unsent {
    held: Arc<oneshot::Sender<()>>,
    dropped: oneshot::Receiver<()>,
}

/// A piece of data, which h2 owns.
struct Piece {
    data: Bytes,
    _held: Arc<oneshot::Sender<()>>,
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

impl Unsent {
    pub(crate) fn new() -> Self {
        let (held, dropped) = oneshot::channel();
        Self {
            held: Arc::new(held),
            dropped,
        }
    }

    /// Returns the same data, watched; it may be empty.
    pub(crate) fn watch(&self, data: Bytes) -> Bytes {
        Bytes::from_owner(Piece {
            data,
            _held: Arc::clone(&self.held),
        })
    }

    /// Waits until all watched data has been dropped.
    pub(crate) async fn sent(self) {
        drop(self.held);
        // The sender is dropped and sends nothing.
        let _ = self.dropped.await;
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn data_counts_as_sent_when_its_last_part_is_dropped() {
        let unsent = Unsent::new();
        let mut data = unsent.watch(Bytes::from_static(b"data"));
        let empty = unsent.watch(Bytes::new());
        assert_eq!((&data[..], &empty[..]), (&b"data"[..], &b""[..]));
        let mut sent = std::pin::pin!(unsent.sent());
        let first = data.split_to(1);
        for held in [first, data, empty] {
            assert!(sent.as_mut().now_or_never().is_none());
            drop(held);
        }
        assert!(sent.now_or_never().is_some());
    }
}
