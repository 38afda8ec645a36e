//! Queue of messages to an agent. h2 queues without a bound if the agent does not read its control stream, so messages
//! wait here, up to a bound.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;

use crate::limits;

#[derive(Default)]
pub(super) struct Outbox(RefCell<Queue>);

#[derive(Default)]
struct Queue {
    lines: VecDeque<Bytes>,
    /// Bytes of `lines`, and of lines that were taken out and are not sent yet.
    bytes: usize,
    writer: Option<Waker>,
}

/// The queue is full: the agent does not read its control stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Full;

impl Outbox {
    pub(super) fn push(&self, line: Bytes) -> Result<(), Full> {
        let mut queue = self.0.borrow_mut();
        if queue.bytes + line.len() > limits::CONTROL_QUEUE {
            return Err(Full);
        }
        queue.bytes += line.len();
        queue.lines.push_back(line);
        if let Some(writer) = queue.writer.take() {
            writer.wake();
        }
        Ok(())
    }

    /// Takes the next line out. It counts until [`sent`](Self::sent).
    pub(super) async fn next(&self) -> Bytes {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }

    fn poll_next(&self, cx: &mut Context<'_>) -> Poll<Bytes> {
        let mut queue = self.0.borrow_mut();
        match queue.lines.pop_front() {
            Some(line) => Poll::Ready(line),
            None => {
                queue.writer = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    /// Records that a line of `bytes` was sent.
    pub(super) fn sent(&self, bytes: usize) {
        let mut queue = self.0.borrow_mut();
        queue.bytes = queue.bytes.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_in_order_and_bounded() {
        let outbox = Outbox::default();
        let line = Bytes::from(vec![b'x'; limits::CONTROL_QUEUE / 4]);
        let mut cx = Context::from_waker(Waker::noop());
        assert!(outbox.poll_next(&mut cx).is_pending());
        outbox.push(Bytes::from_static(b"first\n")).unwrap();
        assert_eq!(outbox.poll_next(&mut cx), Poll::Ready(Bytes::from_static(b"first\n")));
        outbox.sent("first\n".len());
        for _ in 0..4 {
            outbox.push(line.clone()).unwrap();
        }
        assert_eq!(outbox.push(Bytes::from_static(b"\n")), Err(Full));
        // A line that is being sent counts until it is sent.
        assert_eq!(outbox.poll_next(&mut cx), Poll::Ready(line.clone()));
        assert_eq!(outbox.push(Bytes::from_static(b"\n")), Err(Full));
        outbox.sent(line.len());
        outbox.push(line).unwrap();
    }
}
