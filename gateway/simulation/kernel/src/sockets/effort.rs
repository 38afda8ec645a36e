//! What one poll of a task does: a task that does much at once lets all others of its thread wait.

use std::cell::RefCell;
use std::collections::BTreeMap;

use crate::scheduler::{self, Host};

/// Bytes and system calls of one poll.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Effort {
    /// Bytes that were sent or received.
    pub bytes: usize,
    /// System calls that moved bytes.
    pub calls: usize,
}

#[derive(Default)]
struct Efforts {
    poll: u64,
    current: Effort,
    most: BTreeMap<Host, Effort>,
}

thread_local! {
    static EFFORTS: RefCell<Efforts> = RefCell::default();
}

/// Counts a call that moved bytes.
pub(super) fn moved(bytes: usize) {
    let (poll, host) = (scheduler::polls(), Host::current());
    EFFORTS.with_borrow_mut(|efforts| {
        if efforts.poll != poll {
            efforts.poll = poll;
            efforts.current = Effort::default();
        }
        let current = &mut efforts.current;
        current.bytes += bytes;
        current.calls += 1;
        let most = efforts.most.entry(host).or_default();
        most.bytes = most.bytes.max(current.bytes);
        most.calls = most.calls.max(current.calls);
    });
}

/// The most that one poll of a task of `host` did. Bytes and calls may be those of two polls.
pub fn most_at_once(host: Host) -> Effort {
    EFFORTS.with_borrow(|efforts| efforts.most.get(&host).copied().unwrap_or_default())
}

pub(super) fn clear() {
    drop(EFFORTS.take());
}
