//! A bounded pipe of body frames between two workers: lock-free queue, credit in bytes, wakes through the mailboxes.
//!
//! Both ends are futures of their own worker. An end that waits says so in its flag; the other end, when it has
//! changed something, posts one wake per flag raised. Dropping the sender without [`Frame::End`] tells the receiver
//! that the body was cut short; dropping the receiver tells the sender that nobody wants the rest.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};

use atomic_waker::AtomicWaker;
use bytes::Bytes;
use crossbeam_channel::{TryRecvError, TrySendError};
use http::HeaderMap;

use crate::error::Error;
use crate::limits;
use crate::mailbox::{Mailbox, Message};
use crate::upstream::Answer;

/// What goes through a pipe, in order.
#[derive(Debug)]
pub(crate) enum Frame {
    /// First frame of a response.
    Head(Box<Answer>),
    Data(Bytes),
    Trailers(HeaderMap),
    /// The body is complete.
    End,
    /// The response broke off; nothing follows.
    Broken(Box<Error>),
}

impl Frame {
    fn bytes(&self) -> usize {
        match self {
            Self::Data(data) => data.len(),
            Self::Head(_) | Self::Trailers(_) | Self::End | Self::Broken(_) => 0,
        }
    }
}

/// The other end is gone.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Closed;

pub(crate) struct Sender {
    /// `None` only while being dropped.
    queue: Option<crossbeam_channel::Sender<Frame>>,
    shared: Arc<Shared>,
}

pub(crate) struct Receiver {
    queue: Option<crossbeam_channel::Receiver<Frame>>,
    /// Frames received without a turn for anybody else.
    in_a_row: usize,
    shared: Arc<Shared>,
}

struct Shared {
    /// Bytes sent and not yet received.
    in_flight: AtomicUsize,
    receiver_gone: AtomicBool,
    sender: End,
    receiver: End,
}

/// One end's way of being woken.
struct End {
    waiting: AtomicBool,
    waker: AtomicWaker,
    mailbox: Mailbox,
}

/// A wake on its way to the worker of one end.
pub(crate) struct Wake {
    shared: Arc<Shared>,
    receiver: bool,
}

/// A pipe from a task of the worker behind `sender` to one of the worker behind `receiver`.
pub(crate) fn pipe(sender: &Mailbox, receiver: &Mailbox) -> (Sender, Receiver) {
    let (queue_in, queue_out) = crossbeam_channel::bounded(limits::PIPE_FRAMES);
    let end = |mailbox: &Mailbox| End {
        waiting: AtomicBool::new(false),
        waker: AtomicWaker::new(),
        mailbox: mailbox.clone(),
    };
    let shared = Arc::new(Shared {
        in_flight: AtomicUsize::new(0),
        receiver_gone: AtomicBool::new(false),
        sender: end(sender),
        receiver: end(receiver),
    });
    (
        Sender { queue: Some(queue_in), shared: Arc::clone(&shared) },
        Receiver { queue: Some(queue_out), in_a_row: 0, shared },
    )
}

impl End {
    /// Registers before the caller looks once more: what changes after that look raises a wake.
    fn wait(&self, cx: &Context<'_>) {
        self.waker.register(cx.waker());
        self.waiting.store(true, Ordering::SeqCst);
    }

    /// The second look found something: no wake is needed for what comes next.
    fn stop_waiting(&self) {
        self.waiting.store(false, Ordering::SeqCst);
    }
}

impl Shared {
    fn wake(self: &Arc<Self>, receiver: bool) {
        let end = if receiver { &self.receiver } else { &self.sender };
        if end.waiting.swap(false, Ordering::SeqCst) {
            let wake = Wake { shared: Arc::clone(self), receiver };
            // With no room in the mailbox the reactor's own cross-thread wake does it: slower, but never lost.
            if end.mailbox.post(Message::Wake(wake)).is_err() {
                end.waker.wake();
            }
        }
    }
}

impl Wake {
    /// Wakes the task; called on its own worker.
    pub(crate) fn deliver(self) {
        if self.receiver { self.shared.receiver.waker.wake() } else { self.shared.sender.waker.wake() }
    }
}

impl Sender {
    /// Sends a frame once there is credit for it.
    pub(crate) async fn send(&mut self, frame: Frame) -> Result<(), Closed> {
        let mut frame = Some(frame);
        std::future::poll_fn(|cx| {
            if let Poll::Ready(result) = self.try_send(&mut frame) {
                return Poll::Ready(result);
            }
            self.shared.sender.wait(cx);
            let sent = self.try_send(&mut frame);
            if sent.is_ready() {
                self.shared.sender.stop_waiting();
            }
            sent
        })
        .await
    }

    /// Resolves when the receiver is gone.
    pub(crate) async fn closed(&self) {
        std::future::poll_fn(|cx| {
            self.shared.sender.wait(cx);
            if self.shared.receiver_gone.load(Ordering::SeqCst) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    fn try_send(&self, frame: &mut Option<Frame>) -> Poll<Result<(), Closed>> {
        let (Some(queue), Some(next)) = (&self.queue, frame.take()) else { return Poll::Ready(Err(Closed)) };
        let bytes = next.bytes();
        if bytes > 0 && self.shared.in_flight.load(Ordering::SeqCst) >= limits::PIPE_BYTES {
            if self.shared.receiver_gone.load(Ordering::SeqCst) {
                return Poll::Ready(Err(Closed));
            }
            *frame = Some(next);
            return Poll::Pending;
        }
        // Counted before it can be received: the count never runs below zero.
        self.shared.in_flight.fetch_add(bytes, Ordering::SeqCst);
        match queue.try_send(next) {
            Ok(()) => {
                self.shared.wake(true);
                Poll::Ready(Ok(()))
            }
            Err(TrySendError::Full(next)) => {
                self.shared.in_flight.fetch_sub(bytes, Ordering::SeqCst);
                *frame = Some(next);
                Poll::Pending
            }
            Err(TrySendError::Disconnected(_)) => Poll::Ready(Err(Closed)),
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.queue = None;
        self.shared.wake(true);
    }
}

impl Receiver {
    /// The next frame; `Err` if the sender went away before [`Frame::End`].
    pub(crate) fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<Result<Frame, Closed>> {
        if self.in_a_row >= limits::PIPE_FRAMES_PER_TURN {
            // A sender on another core can keep this end busy for ever. The wake goes through our own mailbox, behind
            // everything else that is waiting for its turn.
            self.in_a_row = 0;
            self.shared.receiver.wait(cx);
            self.shared.wake(true);
            return Poll::Pending;
        }
        let mut received = self.try_receive();
        if received.is_pending() {
            self.shared.receiver.wait(cx);
            received = self.try_receive();
            if received.is_ready() {
                self.shared.receiver.stop_waiting();
            }
        }
        self.in_a_row = if received.is_ready() { self.in_a_row + 1 } else { 0 };
        received
    }

    pub(crate) async fn receive(&mut self) -> Result<Frame, Closed> {
        std::future::poll_fn(|cx| self.poll_receive(cx)).await
    }

    fn try_receive(&self) -> Poll<Result<Frame, Closed>> {
        let Some(queue) = &self.queue else { return Poll::Ready(Err(Closed)) };
        match queue.try_recv() {
            Ok(frame) => {
                self.shared.in_flight.fetch_sub(frame.bytes(), Ordering::SeqCst);
                self.shared.wake(false);
                Poll::Ready(Ok(frame))
            }
            Err(TryRecvError::Empty) => Poll::Pending,
            Err(TryRecvError::Disconnected) => Poll::Ready(Err(Closed)),
        }
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.queue = None;
        self.shared.receiver_gone.store(true, Ordering::SeqCst);
        self.shared.wake(false);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use gw_shared::runtime::{self, Driver};

    use super::*;
    use crate::mailbox::{Inbox, mailbox};

    /// Runs `task` on a reactor of its own thread, which delivers the wakes in its mailbox.
    fn on_a_worker<F>(inbox: Inbox, task: impl FnOnce() -> F + Send + 'static) -> thread::JoinHandle<()>
    where
        F: Future<Output = ()> + 'static,
    {
        thread::spawn(move || {
            Driver::choose()
                .unwrap()
                .block_on(async move {
                    runtime::spawn(inbox.deliver_wakes());
                    task().await;
                })
                .unwrap();
        })
    }

    /// `capacity` of the mailboxes: with 1, most wakes take the way around them.
    fn transfer(capacity: usize, frames: usize, size: usize) {
        let (sender_mail, sender_inbox) = mailbox(capacity);
        let (receiver_mail, receiver_inbox) = mailbox(capacity);
        let (mut sender, mut receiver) = pipe(&sender_mail, &receiver_mail);
        let sending = on_a_worker(sender_inbox, move || async move {
            for number in 0..frames {
                sender.send(Frame::Data(vec![(number % 251) as u8; size].into())).await.unwrap();
                if number % 7 == 0 {
                    runtime::yield_now().await;
                }
            }
            sender.send(Frame::End).await.unwrap();
            sender.closed().await;
        });
        let receiving = on_a_worker(receiver_inbox, move || async move {
            let mut received = 0;
            loop {
                match receiver.receive().await.unwrap() {
                    Frame::Data(data) => {
                        assert!(data.len() == size && data.iter().all(|byte| *byte == (received % 251) as u8));
                        received += 1;
                        let in_flight = receiver.shared.in_flight.load(Ordering::SeqCst);
                        assert!(in_flight <= limits::PIPE_BYTES + size, "{in_flight}");
                    }
                    Frame::End => break,
                    other => panic!("{other:?}"),
                }
            }
            assert_eq!(received, frames);
        });
        sending.join().unwrap();
        receiving.join().unwrap();
    }

    #[test]
    fn every_frame_arrives_once_and_in_order() {
        transfer(1024, 20_000, 1);
        transfer(1024, 500, 64 * 1024);
    }

    #[test]
    fn full_mailboxes_lose_no_wake() {
        transfer(1, 20_000, 100);
    }

    #[test]
    fn an_end_that_goes_away_is_noticed() {
        let (mail, inbox) = mailbox(16);
        on_a_worker(inbox, move || async move {
            let (sender, mut receiver) = pipe(&mail, &mail);
            drop(sender);
            assert_eq!(receiver.receive().await.unwrap_err(), Closed);

            let (mut sender, receiver) = pipe(&mail, &mail);
            runtime::spawn(async move {
                runtime::yield_now().await;
                drop(receiver);
            });
            sender.closed().await;
            assert_eq!(sender.send(Frame::End).await, Err(Closed));

            // One that waits for credit too.
            let (mut sender, receiver) = pipe(&mail, &mail);
            sender.send(Frame::Data(vec![0; limits::PIPE_BYTES].into())).await.unwrap();
            runtime::spawn(async move {
                runtime::yield_now().await;
                drop(receiver);
            });
            assert_eq!(sender.send(Frame::Data(vec![0].into())).await, Err(Closed));
        })
        .join()
        .unwrap();
    }
}
