//! What happened, in order: a fingerprint always, and text if it is wanted.

use std::cell::{Cell, RefCell};
use std::fmt::Write;

use crate::clock;
use crate::scheduler::Host;

thread_local! {
    static FINGERPRINT: Cell<u64> = const { Cell::new(0) };
    static LINES: RefCell<Option<String>> = const { RefCell::new(None) };
}

pub(crate) fn start(with_text: bool) {
    FINGERPRINT.set(0);
    LINES.set(with_text.then(String::new));
}

/// Changes the fingerprint by `value`. The same seed always gives the same values.
pub fn mix(value: u64) {
    let mixed = (FINGERPRINT.get() ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    FINGERPRINT.set(mixed ^ (mixed >> 29));
}

/// Fingerprint of all that has happened so far on this thread.
pub fn fingerprint() -> u64 {
    FINGERPRINT.get()
}

/// Adds a line at the current time, if text is wanted. `write` is not called otherwise.
pub fn line(write: impl FnOnce(&mut String)) {
    LINES.with_borrow_mut(|lines| {
        if let Some(lines) = lines {
            let now = clock::elapsed();
            // Writing to a string does not fail.
            let _ = write!(
                lines,
                "{:>5}.{:06} {:<10} ",
                now / 1_000_000_000,
                now / 1000 % 1_000_000,
                Host::current().name()
            );
            write(lines);
            lines.push('\n');
        }
    });
}

/// Whether text is wanted.
pub fn has_text() -> bool {
    LINES.with_borrow(Option::is_some)
}

/// Takes the text.
pub fn take_text() -> Option<String> {
    LINES.take()
}
