//! The items of monoio that the product uses, on the [simulated kernel](gw_simulated_kernel).
//! `[patch.crates-io]` of the workspace puts this crate in place of monoio.

use std::cell::RefCell;
use std::future::Future;
use std::io;
use std::marker::PhantomData;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use gw_simulated_kernel::Host;

pub mod net;
pub mod time;
pub mod utils;

/// Starts a task of the host whose task runs.
pub fn spawn<T: 'static>(future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
    let result: Rc<RefCell<Outcome<T>>> = Rc::default();
    let kept = Rc::clone(&result);
    Host::current().spawn(async move {
        let value = future.await;
        let waker = {
            let mut outcome = kept.borrow_mut();
            outcome.value = Some(value);
            outcome.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    });
    JoinHandle(result)
}

struct Outcome<T> {
    value: Option<T>,
    waker: Option<Waker>,
}

impl<T> Default for Outcome<T> {
    fn default() -> Self {
        Self {
            value: None,
            waker: None,
        }
    }
}

/// Waits for the end of a task. Dropping it leaves the task running.
pub struct JoinHandle<T>(Rc<RefCell<Outcome<T>>>);

impl<T> Future for JoinHandle<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let mut outcome = self.0.borrow_mut();
        if let Some(value) = outcome.value.take() {
            return Poll::Ready(value);
        }
        outcome.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

/// A reactor of the real monoio. A simulation runs on [`gw_simulated_kernel::simulate`].
pub trait Driver {}

/// Stands for the driver of io_uring.
pub struct IoUringDriver;

/// Stands for the driver of epoll.
pub struct LegacyDriver;

impl<D> Driver for time::TimeDriver<D> {}

/// A reactor, which cannot be built here.
pub struct Runtime<D>(PhantomData<D>);

impl<D> Runtime<D> {
    pub fn block_on<F: Future>(&mut self, _: F) -> F::Output {
        unreachable!("the simulated monoio builds no runtime")
    }
}

/// Builds no reactor.
pub struct RuntimeBuilder<D>(PhantomData<D>);

impl<D> RuntimeBuilder<D> {
    #[expect(clippy::new_without_default, reason = "as in monoio")]
    pub fn new() -> Self {
        Self(PhantomData)
    }

    pub fn uring_builder(self, _: io_uring::Builder) -> Self {
        self
    }

    pub fn with_entries(self, _: u32) -> Self {
        self
    }

    /// Fails.
    pub fn build(self) -> io::Result<Runtime<D>> {
        Err(io::ErrorKind::Unsupported.into())
    }
}
