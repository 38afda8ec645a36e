//! What the copies use in place of the product's queues, wakers and reactor.

pub(crate) mod queue;
pub(crate) mod waker;
pub(crate) mod worker;

/// In place of the reactor.
pub(crate) mod runtime {
    use std::future::poll_fn;
    use std::task::Poll;

    /// Lets the other tasks of the worker run.
    pub(crate) async fn yield_now() {
        let mut has_yielded = false;
        poll_fn(|cx| {
            if has_yielded {
                return Poll::Ready(());
            }
            has_yielded = true;
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }
}
