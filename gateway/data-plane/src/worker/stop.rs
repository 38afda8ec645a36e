//! The request to stop a worker.

use std::cell::{Cell, RefCell};
use std::task::{Poll, Waker};

/// A request to stop; the main task of the worker waits for it.
#[derive(Default)]
pub(super) struct Stop {
    requested: Cell<bool>,
    waiting: RefCell<Option<Waker>>,
}

impl Stop {
    pub(super) fn request(&self) {
        self.requested.set(true);
        if let Some(waker) = self.waiting.take() {
            waker.wake();
        }
    }

    pub(super) async fn requested(&self) {
        std::future::poll_fn(|cx| {
            if self.requested.get() {
                return Poll::Ready(());
            }
            self.waiting.replace(Some(cx.waker().clone()));
            Poll::Pending
        })
        .await;
    }
}
