//! The way into a worker from other threads: one bounded lock-free queue, and a bell that rings once per sleep.

use std::panic::AssertUnwindSafe;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use atomic_waker::AtomicWaker;
use crossbeam_channel::{Receiver, Sender, TrySendError};
use gw_shared::runtime;

use crate::apex::Charge;
use crate::ingress::accept::Arrival;
use crate::limit::Level;
use crate::limits;
use crate::pipe;
use crate::process::takeover::{Charges, Take};
use crate::relay::Replay;
use crate::store::Directory;
use crate::telemetry::counters::Scrape;
use crate::tls::ServerConfigs;
use crate::upstream::Crossing;
use crate::worker::Core;

/// What one thread can ask of a worker.
pub(crate) enum Message {
    /// Take over a connection whose service you own.
    Connection(Box<Arrival>),
    /// Relay a request of a service you own, for a caller of ours.
    Relay(Box<Crossing>),
    /// Relay a request that was kept once more.
    Replay(Box<Replay>),
    /// One end of a pipe has something to do.
    Wake(pipe::Wake),
    /// Take one request out of the bucket of an address that you own.
    Charge(Box<Charge>),
    /// Admit by this from now on.
    Directory(Arc<Directory>),
    /// Shake hands with these certificates from now on.
    Certificates(Arc<ServerConfigs>),
    /// Take over the levels of the buckets of your services, and admit by them.
    Levels(Arc<Vec<Level>>),
    /// Take a request of the predecessor out of a bucket of yours.
    Take(Box<Take>),
    /// Another process takes over: leave it your buckets.
    Succeeded(Box<Succeeded>),
    /// Report the levels of your buckets.
    ReportLevels(Sender<Vec<Level>>),
    /// Report counters and state.
    Scrape(Scrape),
    /// Accept nothing more, finish what runs; with a successor, leave it the connections that nobody has accepted.
    Drain { successor: bool },
    /// In a drain: report whether no request runs or may be on its way.
    ReportQuiet(Sender<bool>),
    /// Nothing runs anywhere: end connections without a request.
    EndQuiet,
    /// The drain is over: take no more requests, let the agents end their tunnels.
    End,
    /// Stop now.
    Stop,
}

/// What a worker needs to know of the process that takes over.
pub(crate) struct Succeeded {
    pub(crate) charges: Charges,
    /// Told the levels of the buckets that are not full.
    pub(crate) levels: Sender<Vec<Level>>,
}

/// The sending end. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Mailbox {
    queue: Sender<Message>,
    bell: Arc<Bell>,
}

/// Wakes the worker when the first message arrives after it went through its mail; the messages after it cost a swap.
#[derive(Default)]
struct Bell {
    rung: AtomicBool,
    waker: AtomicWaker,
}

/// The receiving end; stays on its worker.
pub(crate) struct Inbox {
    queue: Receiver<Message>,
    bell: Arc<Bell>,
}

pub(crate) fn mailbox(capacity: usize) -> (Mailbox, Inbox) {
    let (sender, receiver) = crossbeam_channel::bounded(capacity);
    let bell = Arc::new(Bell::default());
    (Mailbox { queue: sender, bell: Arc::clone(&bell) }, Inbox { queue: receiver, bell })
}

impl Mailbox {
    /// Leaves a message; gives it back if there is no room.
    pub(crate) fn post(&self, message: Message) -> Result<(), Message> {
        self.queue.try_send(message).map_err(|error| match error {
            TrySendError::Full(message) | TrySendError::Disconnected(message) => message,
        })?;
        self.bell.ring();
        Ok(())
    }

    /// Leaves a message, waiting for room. Only for threads that may block; `Err` if the worker is gone.
    pub(crate) fn post_blocking(&self, message: Message) -> Result<(), ()> {
        self.queue.send(message).map_err(drop)?;
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
            // Answered before the mail is read: whatever arrives from here on rings again.
            if self.rung.swap(false, Ordering::AcqRel) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

impl Inbox {
    /// Handles messages until one ends the worker. A bounded batch at a time: other tasks get their turn in between.
    pub(crate) async fn serve(self, core: Rc<Core>) {
        loop {
            self.bell.heard().await;
            'mail: loop {
                for _ in 0..limits::MAILBOX_BATCH {
                    let Ok(message) = self.queue.try_recv() else { break 'mail };
                    // A panic must not leave the worker deaf.
                    if std::panic::catch_unwind(AssertUnwindSafe(|| core.handle(message))).is_err() {
                        tracing::error!("a message to worker {} panicked", core.id.0);
                    }
                }
                runtime::yield_now().await;
            }
        }
    }

    /// For tests of what only needs its wakes delivered.
    #[cfg(test)]
    pub(crate) async fn deliver_wakes(self) {
        loop {
            self.bell.heard().await;
            while let Ok(message) = self.queue.try_recv() {
                if let Message::Wake(wake) = message {
                    wake.deliver();
                }
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
        assert!(mailbox.post(Message::End).is_ok());
        assert!(matches!(mailbox.post(Message::End), Err(Message::End)));
    }

    #[test]
    fn a_worker_that_is_gone_gives_the_message_back() {
        let (mailbox, inbox) = mailbox(1);
        drop(inbox);
        assert!(mailbox.post(Message::End).is_err());
        assert!(mailbox.post_blocking(Message::End).is_err());
    }
}
