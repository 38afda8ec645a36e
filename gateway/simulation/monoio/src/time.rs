//! Timers with a precision of a millisecond.

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use gw_simulated_kernel::scheduler;

/// Stands for the timers of a driver.
pub struct TimeDriver<D>(PhantomData<D>);

/// Future of [`sleep`].
pub struct Sleep(scheduler::Sleep);

/// Waits for `duration`, rounded up to milliseconds.
pub fn sleep(duration: Duration) -> Sleep {
    let millis = duration.as_nanos().div_ceil(1_000_000);
    let millis = u64::try_from(millis).unwrap_or(u64::MAX);
    Sleep(scheduler::sleep(Duration::from_millis(millis)))
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        Pin::new(&mut self.0).poll(cx)
    }
}

/// Runs `future` for at most `duration`.
pub fn timeout<F: Future>(duration: Duration, future: F) -> Timeout<F> {
    Timeout {
        sleep: sleep(duration),
        future: Box::pin(future),
    }
}

/// Future of [`timeout`].
pub struct Timeout<F> {
    sleep: Sleep,
    future: Pin<Box<F>>,
}

/// The time was up.
#[derive(Debug, PartialEq, Eq)]
pub struct Elapsed(());

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("deadline has elapsed")
    }
}

impl std::error::Error for Elapsed {}

impl<F: Future> Future for Timeout<F> {
    type Output = Result<F::Output, Elapsed>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Poll::Ready(value) = self.future.as_mut().poll(cx) {
            return Poll::Ready(Ok(value));
        }
        Pin::new(&mut self.sleep)
            .poll(cx)
            .map(|()| Err(Elapsed(())))
    }
}
