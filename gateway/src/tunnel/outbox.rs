//! Messages on their way to an agent. If the agent does not read its control stream, the HTTP/2 library queues data
//! without a bound, so messages wait here, up to a bound.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;

use crate::limits;

#[derive(Default)]
pub(super) struct Outbox(RefCell<Waiting>);

#[derive(Default)]
struct Waiting {
    lines: VecDeque<Bytes>,
    /// Bytes of `lines` and of lines that were taken out and are not sent yet.
    bytes: usize,
    writer: Option<Waker>,
}

/// The queue is full: the agent does not read its control stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Full;

impl Outbox {
    /// Queues a line.
    pub(super) fn push(&self, line: Bytes) -> Result<(), Full> {
        let mut waiting = self.0.borrow_mut();
        if waiting.bytes + line.len() > limits::CONTROL_QUEUE {
            return Err(Full);
        }
        waiting.bytes += line.len();
        waiting.lines.push_back(line);
        if let Some(writer) = waiting.writer.take() {
            writer.wake();
        }
        Ok(())
    }

    /// Takes the next line out. It counts until it was [`sent`](Self::sent).
    pub(super) async fn next(&self) -> Bytes {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }

    fn poll_next(&self, cx: &mut Context<'_>) -> Poll<Bytes> {
        let mut waiting = self.0.borrow_mut();
        match waiting.lines.pop_front() {
            Some(line) => Poll::Ready(line),
            None => {
                waiting.writer = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    /// A line of `bytes` is the agent's.
    pub(super) fn sent(&self, bytes: usize) {
        let mut waiting = self.0.borrow_mut();
        waiting.bytes = waiting.bytes.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_in_order_and_wait_up_to_a_bound() {
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
        // One that is being sent counts until it is the agent's.
        assert_eq!(outbox.poll_next(&mut cx), Poll::Ready(line.clone()));
        assert_eq!(outbox.push(Bytes::from_static(b"\n")), Err(Full));
        outbox.sent(line.len());
        outbox.push(line).unwrap();
    }
}
