//! In place of the crate `atomic-waker`.

use std::task::Waker;

use loom::sync::Mutex;

/// A waker that one thread registers and others use. As with the original, each operation sees what
/// was done before those that came earlier.
#[derive(Default)]
pub(crate) struct AtomicWaker(Mutex<Option<Waker>>);

impl AtomicWaker {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn register(&self, waker: &Waker) {
        *self.0.lock().unwrap() = Some(waker.clone());
    }

    pub(crate) fn wake(&self) {
        let waker = self.0.lock().unwrap().take();
        waker.into_iter().for_each(Waker::wake);
    }
}
