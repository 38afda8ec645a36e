//! Requests that wait for a tunnel of their service, or for a free slot of one. They go in order,
//! one at a time, so that the first tunnel of a service is not flooded.

pub mod grace;
pub(super) mod lost;

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use crate::limits;
use gw_shared::runtime;

/// The lines of one worker, by the label of the service. A line is removed with its last request.
#[derive(Default)]
pub(crate) struct Waiting {
    lines: RefCell<HashMap<Arc<str>, VecDeque<Rc<PlaceInLine>>>>,
}

/// Place of a request in a line.
#[derive(Default)]
struct PlaceInLine(RefCell<Option<Waker>>);

/// Why a request gets no turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoTurn {
    /// Another node or another process serves the service now.
    Moved,
    /// The line is too long, or the wait was.
    Unavailable,
}

/// The turn of a request, which is at the front of its line. The next one has its turn once this is
/// dropped.
pub(crate) struct Turn<'a> {
    waiting: &'a Waiting,
    label: Arc<str>,
    place: Rc<PlaceInLine>,
}

impl Waiting {
    /// Whether requests of the service wait. A further one takes its place behind them.
    pub(crate) fn is_waited_for(&self, label: &str) -> bool {
        let lines = self.lines.borrow();
        !lines.is_empty() && lines.contains_key(label)
    }

    /// Waits in the line of the service until `can_open` is true for the first in the line. Looks
    /// again after each [`Self::look_again`]. Fails once `has_moved` is true, after `within`, and
    /// at once if [`limits::WAITING_REQUESTS`] wait.
    pub(crate) async fn turn(
        &self,
        label: &Arc<str>,
        within: Duration,
        can_open: impl Fn() -> bool,
        has_moved: impl Fn() -> bool,
    ) -> Result<Turn<'_>, NoTurn> {
        let place = Rc::new(PlaceInLine::default());
        {
            let mut lines = self.lines.borrow_mut();
            let line = lines.entry(Arc::clone(label)).or_default();
            if line.len() >= limits::WAITING_REQUESTS {
                return Err(NoTurn::Unavailable);
            }
            line.push_back(Rc::clone(&place));
        }
        let turn = Turn {
            waiting: self,
            label: Arc::clone(label),
            place,
        };
        let at_front = std::future::poll_fn(|cx| {
            if has_moved() {
                return Poll::Ready(Err(NoTurn::Moved));
            }
            if turn.is_first() && can_open() {
                return Poll::Ready(Ok(()));
            }
            turn.place.0.replace(Some(cx.waker().clone()));
            Poll::Pending
        });
        runtime::timeout(within, at_front)
            .await
            .unwrap_or(Err(NoTurn::Unavailable))?;
        Ok(turn)
    }

    /// Number of requests in the line of each service that has one.
    #[cfg(feature = "support")]
    pub(crate) fn in_line(&self) -> std::collections::BTreeMap<String, usize> {
        let lines = self.lines.borrow();
        lines
            .iter()
            .map(|(label, line)| (label.to_string(), line.len()))
            .collect()
    }

    /// Lets all requests look whether their services have moved.
    pub(crate) fn look_for_moves(&self) {
        for place in self.lines.borrow().values().flatten() {
            // Takes effect once the tasks of the requests run.
            place.0.take().into_iter().for_each(Waker::wake);
        }
    }

    /// Lets the first request in the line of the service look whether it can go. Called when a
    /// tunnel has registered, and when streams may have closed.
    pub(crate) fn look_again(&self, label: &str) {
        let lines = self.lines.borrow();
        if lines.is_empty() {
            return;
        }
        let first = lines.get(label).and_then(VecDeque::front);
        if let Some(waker) = first.and_then(|place| place.0.take()) {
            waker.wake();
        }
    }
}

impl Turn<'_> {
    fn is_first(&self) -> bool {
        let lines = self.waiting.lines.borrow();
        lines
            .get(&self.label)
            .and_then(VecDeque::front)
            .is_some_and(|first| Rc::ptr_eq(first, &self.place))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut lines = self.waiting.lines.borrow_mut();
        if let Some(line) = lines.get_mut(&self.label) {
            if line
                .front()
                .is_some_and(|first| Rc::ptr_eq(first, &self.place))
            {
                line.pop_front();
            } else {
                // The caller of a request that waits has left.
                line.retain(|place| !Rc::ptr_eq(place, &self.place));
            }
            if line.is_empty() {
                lines.remove(&self.label);
            }
        }
        drop(lines);
        self.waiting.look_again(&self.label);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use futures_util::poll;
    use gw_shared::runtime::Driver;

    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    #[test]
    fn requests_go_in_order_one_at_a_time_as_slots_are_free() {
        let waiting: Waiting = Waiting::default();
        let label: Arc<str> = "acme--api".into();
        let slots = Cell::new(0);
        let turn = || Box::pin(waiting.turn(&label, LONG, || slots.get() > 0, || false));
        Driver::choose()
            .unwrap()
            .block_on(async {
                let mut first = turn();
                let mut left = turn();
                let mut second = turn();
                let mut third = turn();
                for request in [&mut first, &mut left, &mut second, &mut third] {
                    assert!(poll!(request).is_pending());
                }
                assert!(waiting.is_waited_for(&label) && !waiting.is_waited_for("acme--other"));
                drop(left);
                slots.set(2);
                assert!(poll!(&mut second).is_pending(), "it is not the first");
                let Poll::Ready(Ok(going)) = poll!(&mut first) else {
                    panic!("no turn")
                };
                assert!(
                    poll!(&mut second).is_pending(),
                    "the first has not opened its stream yet"
                );
                slots.set(1);
                drop(going);
                assert!(poll!(&mut third).is_pending());
                let Poll::Ready(Ok(going)) = poll!(&mut second) else {
                    panic!("no turn")
                };
                slots.set(0);
                drop(going);
                assert!(poll!(&mut third).is_pending(), "no slot is free");
                slots.set(1);
                assert!(poll!(&mut third).is_ready());
                drop(third);
                assert!(waiting.lines.borrow().is_empty());
            })
            .unwrap();
    }

    #[test]
    fn only_the_first_in_line_is_woken_and_a_line_is_bounded() {
        use std::sync::atomic::{AtomicUsize, Ordering};
        use std::task::{Context, Wake};

        struct Wakes(AtomicUsize);
        impl Wake for Wakes {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let waiting: Waiting = Waiting::default();
        let label: Arc<str> = "acme--api".into();
        Driver::choose()
            .unwrap()
            .block_on(async {
                let wakes = Arc::new(Wakes(AtomicUsize::new(0)));
                let waker = Waker::from(Arc::clone(&wakes));
                let mut cx = Context::from_waker(&waker);
                let mut requests: Vec<_> = (0..limits::WAITING_REQUESTS)
                    .map(|_| Box::pin(waiting.turn(&label, LONG, || false, || false)))
                    .collect();
                for request in &mut requests {
                    assert!(request.as_mut().poll(&mut cx).is_pending());
                }
                let beyond = waiting.turn(&label, LONG, || false, || false).await;
                assert_eq!(beyond.err(), Some(NoTurn::Unavailable));
                waiting.look_again(&label);
                waiting.look_again("acme--other");
                assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
            })
            .unwrap();
    }

    #[test]
    fn a_request_that_is_left_fails() {
        let waiting: Waiting = Waiting::default();
        let label: Arc<str> = "acme--api".into();
        Driver::choose()
            .unwrap()
            .block_on(async {
                let left = waiting
                    .turn(&label, Duration::from_millis(1), || false, || false)
                    .await;
                assert_eq!(left.err(), Some(NoTurn::Unavailable));
                assert!(!waiting.is_waited_for(&label));
            })
            .unwrap();
    }
}
