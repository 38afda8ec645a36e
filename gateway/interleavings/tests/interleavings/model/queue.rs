//! In place of the crate `crossbeam-channel`: the same queue with fewer promises.
//!
//! It orders memory only from the end that writes a slot to the end that reads it. A message that
//! is being written, or a slot that is being freed, is not waited for. What holds with this queue
//! does not depend on more.

use std::sync::atomic::AtomicUsize as Count;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use loom::sync::atomic::{AtomicUsize, Ordering};

/// Lowest bit of `Ring::tail`: all senders or all receivers are gone.
const CLOSED: usize = 1;

struct Ring<T> {
    /// Position of the next message to receive.
    head: AtomicUsize,
    /// Twice the position of the next message to send, plus [`CLOSED`].
    tail: AtomicUsize,
    slots: Box<[Slot<T>]>,
    senders: Count,
    receivers: Count,
}

struct Slot<T> {
    /// Twice the position whose message it has room for, or twice the position of its message plus
    /// 1.
    turn: AtomicUsize,
    message: Mutex<Option<T>>,
}

pub(crate) struct Sender<T>(Arc<Ring<T>>);

pub(crate) struct Receiver<T>(Arc<Ring<T>>);

pub(crate) enum TrySendError<T> {
    Full(T),
    Disconnected(T),
}

/// All receivers are gone. Has the message.
pub(crate) struct SendError<T>(pub(crate) T);

pub(crate) enum TryRecvError {
    Empty,
    Disconnected,
}

/// A queue with room for this number of messages.
pub(crate) fn bounded<T>(capacity: usize) -> (Sender<T>, Receiver<T>) {
    let slots = (0..capacity).map(|position| Slot {
        turn: AtomicUsize::new(2 * position),
        message: Mutex::new(None),
    });
    let ring = Arc::new(Ring {
        head: AtomicUsize::new(0),
        tail: AtomicUsize::new(0),
        slots: slots.collect(),
        senders: Count::new(1),
        receivers: Count::new(1),
    });
    (Sender(Arc::clone(&ring)), Receiver(ring))
}

impl<T> Sender<T> {
    pub(crate) fn try_send(&self, message: T) -> Result<(), TrySendError<T>> {
        loop {
            let tail = self.0.tail.load(Ordering::Relaxed);
            if tail & CLOSED != 0 {
                return Err(TrySendError::Disconnected(message));
            }
            let slot = self.0.slot(tail / 2);
            let turn = slot.turn.load(Ordering::Acquire);
            if turn < tail {
                return Err(TrySendError::Full(message));
            }
            // Another sender may have taken the position.
            if turn == tail && moved(&self.0.tail, tail, tail + 2) {
                *slot.message.lock().unwrap() = Some(message);
                slot.turn.store(tail + 1, Ordering::Release);
                return Ok(());
            }
        }
    }

    /// Sends a message once there is room for it.
    pub(crate) fn send(&self, mut message: T) -> Result<(), SendError<T>> {
        loop {
            message = match self.try_send(message) {
                Ok(()) => return Ok(()),
                Err(TrySendError::Disconnected(message)) => return Err(SendError(message)),
                Err(TrySendError::Full(message)) => message,
            };
            loom::thread::yield_now();
        }
    }
}

impl<T> Receiver<T> {
    pub(crate) fn try_recv(&self) -> Result<T, TryRecvError> {
        loop {
            let head = self.0.head.load(Ordering::Relaxed);
            let slot = self.0.slot(head);
            let turn = slot.turn.load(Ordering::Acquire);
            if turn < 2 * head + 1 {
                let tail = self.0.tail.load(Ordering::Acquire);
                return Err(if tail == 2 * head + CLOSED {
                    TryRecvError::Disconnected
                } else {
                    TryRecvError::Empty
                });
            }
            // Another receiver may have taken the message.
            if turn == 2 * head + 1 && moved(&self.0.head, head, head + 1) {
                let message = slot.message.lock().unwrap().take();
                slot.turn
                    .store(2 * (head + self.0.slots.len()), Ordering::Release);
                return message.ok_or(TryRecvError::Empty);
            }
        }
    }

    /// Does not wait: no scenario uses it.
    pub(crate) fn recv_timeout(&self, _: Duration) -> Result<T, TryRecvError> {
        self.try_recv()
    }
}

fn moved(position: &AtomicUsize, from: usize, to: usize) -> bool {
    position
        .compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed)
        .is_ok()
}

impl<T> Ring<T> {
    fn slot(&self, position: usize) -> &Slot<T> {
        &self.slots[position % self.slots.len()]
    }

    /// Closes the queue if this was the last of its kind. After a panic the checker takes no more
    /// steps.
    fn leave(&self, ends: &Count) {
        let is_last = ends.fetch_sub(1, Ordering::Relaxed) == 1;
        if is_last && !std::thread::panicking() {
            self.tail.fetch_or(CLOSED, Ordering::AcqRel);
        }
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        self.0.senders.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(&self.0))
    }
}

impl<T> Clone for Receiver<T> {
    fn clone(&self) -> Self {
        self.0.receivers.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(&self.0))
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.leave(&self.0.senders);
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        self.0.leave(&self.0.receivers);
    }
}
