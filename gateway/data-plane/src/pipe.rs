//! A bounded pipe of body frames between two workers: lock-free queue, credit in bytes, wakes
//! through the mailboxes.
//!
//! Each end is used by futures of its own worker. An end that waits raises a flag; the other end
//! posts one wake per raised flag after a change. Dropping the sender ends the pipe: frames say
//! whether the body was complete. Dropping the receiver makes the sender fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};

use crate::limits;
use atomic_waker::AtomicWaker;
use crossbeam_channel::{TryRecvError, TrySendError};
use gw_base::mailbox::Post;
use gw_region::owners::ownership::WorkerId;

/// An item of a pipe.
pub trait PipeFrame {
    /// Bytes that count against the credit of the pipe.
    fn bytes(&self) -> usize;
}

/// The other end is gone.
#[derive(Debug, PartialEq, Eq)]
pub struct OtherEndGone;

/// Sending end of a pipe. Dropping it ends the pipe.
pub struct Sender<F: PipeFrame> {
    /// `None` only while being dropped.
    queue: Option<crossbeam_channel::Sender<F>>,
    shared: Arc<PipeState>,
}

/// Receiving end of a pipe. Dropping it makes the sender fail.
pub struct Receiver<F: PipeFrame> {
    queue: Option<crossbeam_channel::Receiver<F>>,
    /// Frames received since this task last yielded.
    in_a_row: usize,
    shared: Arc<PipeState>,
}

struct PipeState {
    /// Bytes sent and not yet received.
    in_flight: AtomicUsize,
    receiver_gone: AtomicBool,
    sender: PipeEnd,
    receiver: PipeEnd,
    wakes: Arc<dyn Post<Wake>>,
}

/// How one end is woken.
struct PipeEnd {
    /// Only read and written in one step: of an end that waits and one that wakes, the later one
    /// sees what the other did before.
    waiting: AtomicBool,
    waker: AtomicWaker,
    worker: WorkerId,
}

/// A wake on its way to the worker of one end.
pub struct Wake {
    shared: Arc<PipeState>,
    receiver: bool,
}

/// A pipe from a task of one worker to a task of another, whose wakes go through their mailboxes.
pub(crate) fn pipe<F: PipeFrame>(
    sender: WorkerId,
    receiver: WorkerId,
    wakes: Arc<dyn Post<Wake>>,
) -> (Sender<F>, Receiver<F>) {
    let (queue_in, queue_out) = crossbeam_channel::bounded(limits::PIPE_FRAMES);
    let end = |worker| PipeEnd {
        waiting: AtomicBool::new(false),
        waker: AtomicWaker::new(),
        worker,
    };
    let shared = Arc::new(PipeState {
        in_flight: AtomicUsize::new(0),
        receiver_gone: AtomicBool::new(false),
        sender: end(sender),
        receiver: end(receiver),
        wakes,
    });
    (
        Sender {
            queue: Some(queue_in),
            shared: Arc::clone(&shared),
        },
        Receiver {
            queue: Some(queue_out),
            in_a_row: 0,
            shared,
        },
    )
}

impl PipeEnd {
    /// Registers before the caller checks again: a change after that check raises a wake.
    fn wait(&self, cx: &Context<'_>) {
        self.waker.register(cx.waker());
        self.waiting.swap(true, Ordering::AcqRel);
    }

    /// The second check found a change: no wake is needed for the next one.
    fn stop_waiting(&self) {
        self.waiting.swap(false, Ordering::AcqRel);
    }
}

impl PipeState {
    fn wake(self: &Arc<Self>, receiver: bool) {
        let end = if receiver {
            &self.receiver
        } else {
            &self.sender
        };
        if end.waiting.swap(false, Ordering::AcqRel) {
            let wake = Wake {
                shared: Arc::clone(self),
                receiver,
            };
            // A full mailbox leaves it to the reactor's own cross-thread wake, which is slower.
            if self.wakes.post(end.worker, wake).is_err() {
                end.waker.wake();
            }
        }
    }
}

impl Wake {
    /// Wakes the task; called on its own worker.
    pub fn deliver(self) {
        if self.receiver {
            self.shared.receiver.waker.wake();
        } else {
            self.shared.sender.waker.wake();
        }
    }
}

impl<F: PipeFrame> Sender<F> {
    /// Sends a frame once there is credit for it.
    pub async fn send(&self, frame: F) -> Result<(), OtherEndGone> {
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

    /// Bytes sent and not yet received.
    pub(crate) fn in_flight(&self) -> usize {
        self.shared.in_flight.load(Ordering::SeqCst)
    }

    /// Resolves when the receiver is gone.
    pub async fn closed(&self) {
        std::future::poll_fn(|cx| {
            self.shared.sender.wait(cx);
            if self.shared.receiver_gone.load(Ordering::SeqCst) {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
    }

    /// Sends the frame if there is credit for it; takes it out of `frame` then.
    pub(crate) fn try_send(&self, frame: &mut Option<F>) -> Poll<Result<(), OtherEndGone>> {
        let (Some(queue), Some(next)) = (&self.queue, frame.take()) else {
            return Poll::Ready(Err(OtherEndGone));
        };
        let bytes = next.bytes();
        let in_flight = if bytes > 0 {
            self.shared.in_flight.load(Ordering::SeqCst)
        } else {
            0
        };
        if in_flight > 0 && in_flight + bytes > limits::PIPE_BYTES {
            if self.shared.receiver_gone.load(Ordering::SeqCst) {
                return Poll::Ready(Err(OtherEndGone));
            }
            *frame = Some(next);
            return Poll::Pending;
        }
        // Counted before it can be received: the count never drops below zero.
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
            Err(TrySendError::Disconnected(_)) => Poll::Ready(Err(OtherEndGone)),
        }
    }
}

impl<F: PipeFrame> Drop for Sender<F> {
    fn drop(&mut self) {
        self.queue = None;
        self.shared.wake(true);
    }
}

impl<F: PipeFrame> Receiver<F> {
    /// The next frame; `Err` once the sender is gone and every frame was received.
    pub fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<Result<F, OtherEndGone>> {
        if self.in_a_row >= limits::PIPE_FRAMES_PER_TURN {
            // A sender on another core can keep this end busy without an end. The wake goes through
            // this worker's mailbox, behind the other messages.
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
        self.in_a_row = if received.is_ready() {
            self.in_a_row + 1
        } else {
            0
        };
        received
    }

    /// Waits for the next frame. Fails once the sender is gone and every frame was received.
    pub async fn receive(&mut self) -> Result<F, OtherEndGone> {
        std::future::poll_fn(|cx| self.poll_receive(cx)).await
    }

    fn try_receive(&self) -> Poll<Result<F, OtherEndGone>> {
        let Some(queue) = &self.queue else {
            return Poll::Ready(Err(OtherEndGone));
        };
        match queue.try_recv() {
            Ok(frame) => {
                self.shared
                    .in_flight
                    .fetch_sub(frame.bytes(), Ordering::SeqCst);
                self.shared.wake(false);
                Poll::Ready(Ok(frame))
            }
            Err(TryRecvError::Empty) => Poll::Pending,
            Err(TryRecvError::Disconnected) => Poll::Ready(Err(OtherEndGone)),
        }
    }
}

impl<F: PipeFrame> Drop for Receiver<F> {
    fn drop(&mut self) {
        self.queue = None;
        self.shared.receiver_gone.store(true, Ordering::SeqCst);
        self.shared.wake(false);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use gw_base::mailbox::{Inbox, Mailbox, mailbox};
    use gw_shared::runtime::{self, Driver};

    use super::*;

    #[derive(Debug, PartialEq)]
    enum Body {
        Data(Vec<u8>),
        End,
    }

    impl PipeFrame for Body {
        fn bytes(&self) -> usize {
            match self {
                Self::Data(data) => data.len(),
                Self::End => 0,
            }
        }
    }

    /// Mailboxes of workers that only deliver wakes.
    struct Mailboxes(Vec<Mailbox<Wake>>);

    impl Post<Wake> for Mailboxes {
        fn post(&self, worker: WorkerId, wake: Wake) -> Result<(), Wake> {
            self.0[worker.0].post(wake)
        }
    }

    /// Runs `task` on a reactor of its own thread, which delivers the wakes in its mailbox.
    fn on_a_worker<F>(
        inbox: Inbox<Wake>,
        task: impl FnOnce() -> F + Send + 'static,
    ) -> thread::JoinHandle<()>
    where
        F: Future<Output = ()> + 'static,
    {
        thread::spawn(move || {
            Driver::choose()
                .unwrap()
                .block_on(async move {
                    runtime::spawn(inbox.serve(WorkerId(0), Wake::deliver));
                    task().await;
                })
                .unwrap();
        })
    }

    /// Sends `frames` frames of `size` bytes. With a `capacity` of 1 most wakes find the mailbox
    /// full.
    fn transfer(capacity: usize, frames: usize, size: usize) {
        let (sender_mail, sender_inbox) = mailbox(capacity);
        let (receiver_mail, receiver_inbox) = mailbox(capacity);
        let wakes = Arc::new(Mailboxes(vec![sender_mail, receiver_mail]));
        let (sender, mut receiver) = pipe(WorkerId(0), WorkerId(1), wakes);
        let sending = on_a_worker(sender_inbox, move || async move {
            for number in 0..frames {
                sender
                    .send(Body::Data(vec![(number % 251) as u8; size]))
                    .await
                    .unwrap();
                if number % 7 == 0 {
                    runtime::yield_now().await;
                }
            }
            sender.send(Body::End).await.unwrap();
            sender.closed().await;
        });
        let receiving = on_a_worker(receiver_inbox, move || async move {
            let mut received = 0;
            while let Body::Data(data) = receiver.receive().await.unwrap() {
                assert!(
                    data.len() == size && data.iter().all(|byte| *byte == (received % 251) as u8)
                );
                received += 1;
                let in_flight = receiver.shared.in_flight.load(Ordering::SeqCst);
                assert!(in_flight <= limits::PIPE_BYTES.max(size), "{in_flight}");
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
    fn a_dropped_end_is_noticed() {
        let (mail, inbox) = mailbox(16);
        let wakes: Arc<dyn Post<Wake>> = Arc::new(Mailboxes(vec![mail]));
        let pipe = move || pipe::<Body>(WorkerId(0), WorkerId(0), Arc::clone(&wakes));
        on_a_worker(inbox, move || async move {
            let (sender, mut receiver) = pipe();
            drop(sender);
            assert_eq!(receiver.receive().await.unwrap_err(), OtherEndGone);

            let (sender, receiver) = pipe();
            runtime::spawn(async move {
                runtime::yield_now().await;
                drop(receiver);
            });
            sender.closed().await;
            assert_eq!(sender.send(Body::End).await, Err(OtherEndGone));

            // Also a sender that waits for credit.
            let (sender, receiver) = pipe();
            sender
                .send(Body::Data(vec![0; limits::PIPE_BYTES]))
                .await
                .unwrap();
            runtime::spawn(async move {
                runtime::yield_now().await;
                drop(receiver);
            });
            assert_eq!(sender.send(Body::Data(vec![0])).await, Err(OtherEndGone));
        })
        .join()
        .unwrap();
    }
}
