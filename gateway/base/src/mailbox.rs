//! The way into a worker from other threads: one bounded lock-free queue, and one wake per sleep of
//! the worker.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use atomic_waker::AtomicWaker;
use crossbeam_channel::{Receiver, Sender, TrySendError};
use gw_region::owners::ownership::WorkerId;
use gw_shared::runtime;

use crate::limits;

/// Posts messages of one type to workers.
///
/// A trait, although `worker::WorkerHandles` alone implements it outside of tests: the message of a
/// worker is declared above the modules that post its contents. Closures in its place would be one
/// allocation for each content and no fewer lines.
pub trait Post<T>: Send + Sync {
    /// Leaves a message for `worker`; gives it back if its mailbox is full or the worker has ended.
    fn post(&self, worker: WorkerId, message: T) -> Result<(), T>;
}

/// The sending end. Cheap to clone.
pub struct Mailbox<M> {
    queue: Sender<M>,
    bell: Arc<Bell>,
}

impl<M> Clone for Mailbox<M> {
    fn clone(&self) -> Self {
        Self {
            queue: self.queue.clone(),
            bell: Arc::clone(&self.bell),
        }
    }
}

/// Wakes the worker for the first message after it emptied its mailbox. Later messages cost one
/// atomic swap.
#[derive(Default)]
struct Bell {
    rung: AtomicBool,
    waker: AtomicWaker,
}

/// The receiving end. A worker that starts again gets a clone, and so the messages that were left
/// meanwhile. The mailbox is closed once all clones are dropped.
pub struct Inbox<M> {
    queue: Receiver<M>,
    bell: Arc<Bell>,
}

impl<M> Clone for Inbox<M> {
    fn clone(&self) -> Self {
        Self {
            queue: self.queue.clone(),
            bell: Arc::clone(&self.bell),
        }
    }
}

/// A mailbox for at most `capacity` messages.
pub fn mailbox<M>(capacity: usize) -> (Mailbox<M>, Inbox<M>) {
    let (sender, receiver) = crossbeam_channel::bounded(capacity);
    let bell = Arc::new(Bell::default());
    (
        Mailbox {
            queue: sender,
            bell: Arc::clone(&bell),
        },
        Inbox {
            queue: receiver,
            bell,
        },
    )
}

impl<M> Mailbox<M> {
    /// Leaves a message; gives it back if there is no room or the worker has ended.
    pub fn post(&self, message: M) -> Result<(), M> {
        self.queue.try_send(message).map_err(|error| match error {
            TrySendError::Full(message) | TrySendError::Disconnected(message) => message,
        })?;
        self.bell.ring();
        Ok(())
    }

    /// Leaves a message, waiting for room. Only for threads that may block. Gives the message back
    /// if the worker has ended.
    pub fn post_blocking(&self, message: M) -> Result<(), M> {
        self.queue.send(message).map_err(|error| error.0)?;
        self.bell.ring();
        Ok(())
    }
}

impl Bell {
    fn ring(&self) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            self.waker.wake();
        }
    }

    async fn heard(&self) {
        std::future::poll_fn(|cx| {
            self.waker.register(cx.waker());
            // Reset before the queue is read: a message that arrives later rings again.
            if self.rung.swap(false, Ordering::AcqRel) {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
    }
}

impl<M> Inbox<M> {
    /// The next message, if one waits.
    pub fn try_next(&self) -> Option<M> {
        self.queue.try_recv().ok()
    }

    /// The next message, if one comes within this time. Blocks the thread: not for workers.
    pub fn next_within(&self, within: Duration) -> Option<M> {
        self.queue.recv_timeout(within).ok()
    }

    /// Handles messages for as long as the worker runs, in bounded batches: other tasks run in
    /// between.
    pub async fn serve(self, worker: WorkerId, mut handle: impl FnMut(M)) {
        // Messages may have been left before. A plain store would hide them: it does not see what
        // the thread that rang did before.
        self.bell.rung.swap(true, Ordering::AcqRel);
        loop {
            self.bell.heard().await;
            'mail: loop {
                for _ in 0..limits::MAILBOX_BATCH {
                    let Ok(message) = self.queue.try_recv() else {
                        break 'mail;
                    };
                    // The worker keeps reading its mailbox after a panic.
                    if std::panic::catch_unwind(AssertUnwindSafe(|| handle(message))).is_err() {
                        tracing::error!(worker = worker.0, "a message to a worker panicked");
                    }
                }
                runtime::yield_now().await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_mailbox_gives_the_message_back() {
        let (mailbox, _inbox) = mailbox(1);
        assert!(mailbox.post(1).is_ok());
        assert_eq!(mailbox.post(2), Err(2));
    }

    #[test]
    fn a_worker_that_starts_again_gets_the_messages_left_meanwhile() {
        use gw_shared::runtime::Driver;
        let (mailbox, inbox) = mailbox(8);
        let received = |inbox: Inbox<u32>| {
            let (sender, received) = tokio::sync::mpsc::unbounded_channel();
            let received = Driver::choose().unwrap().run(async move {
                let mut received = received;
                runtime::spawn(
                    inbox.serve(WorkerId(0), move |message| sender.send(message).unwrap()),
                );
                received.recv().await
            });
            received.unwrap().unwrap()
        };
        mailbox.post(1).unwrap();
        assert_eq!(received(inbox.clone()), Some(1));
        mailbox.post(2).unwrap();
        mailbox.post(3).unwrap();
        // As after a worker that heard the bell and ended before it read them.
        inbox.bell.rung.store(false, Ordering::Release);
        assert_eq!(received(inbox.clone()), Some(2));
    }

    #[test]
    fn a_mailbox_whose_worker_has_ended_gives_the_message_back() {
        let (mailbox, inbox) = mailbox(1);
        drop(inbox);
        assert_eq!(mailbox.post(1), Err(1));
        assert!(mailbox.post_blocking(1).is_err());
    }
}
