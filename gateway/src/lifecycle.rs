//! Whether a worker serves, drains or ends.

use std::cell::Cell;

#[derive(Default)]
pub(crate) struct Lifecycle {
    draining: Cell<bool>,
    ending: Cell<bool>,
}

impl Lifecycle {
    /// Connections should end; requests on open connections are served.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.get()
    }

    /// The drain is over: requests are refused.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending.get()
    }

    pub(crate) fn drain(&self) {
        self.draining.set(true);
    }

    /// Ends a drain. Does not imply [`Self::drain`].
    pub(crate) fn end(&self) {
        self.ending.set(true);
    }
}
