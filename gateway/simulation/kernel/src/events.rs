//! What happens at a later time: timers, deliveries of the network, checks of connections.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::clock::{self, Nanos};
use crate::random;

type Action = Box<dyn FnOnce()>;

/// Orders events by time. The seed decides the order of events of the same time.
struct Event {
    key: Reverse<(Nanos, u64, u64)>,
    action: Action,
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Event {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key.cmp(&other.key)
    }
}

#[derive(Default)]
struct Events {
    heap: BinaryHeap<Event>,
    number: u64,
}

thread_local! {
    static EVENTS: RefCell<Events> = RefCell::default();
}

/// Runs `action` at `time`, or at once in the next turn of the scheduler if `time` is past.
pub(crate) fn at(time: Nanos, action: impl FnOnce() + 'static) {
    let tie = random::between(0..=u64::MAX);
    EVENTS.with_borrow_mut(|events| {
        events.number += 1;
        events.heap.push(Event {
            key: Reverse((time, tie, events.number)),
            action: Box::new(action),
        });
    });
}

/// Runs `action` after `delay`.
pub(crate) fn after(delay: Nanos, action: impl FnOnce() + 'static) {
    at(clock::elapsed() + delay, action);
}

/// Time of the next event.
pub(crate) fn next() -> Option<Nanos> {
    EVENTS.with_borrow(|events| events.heap.peek().map(|event| event.key.0.0))
}

/// Runs all events that are due.
pub(crate) fn run_due() {
    let now = clock::elapsed();
    while let Some(action) = EVENTS.with_borrow_mut(|events| {
        let is_due = events.heap.peek().is_some_and(|event| event.key.0.0 <= now);
        is_due.then(|| events.heap.pop().map(|event| event.action))?
    }) {
        action();
    }
}

/// Drops all events.
pub(crate) fn clear() {
    drop(EVENTS.take());
}
