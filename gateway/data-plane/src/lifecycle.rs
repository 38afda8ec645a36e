//! Whether a worker serves, drains or ends.

use std::cell::Cell;

#[derive(Default)]
pub(crate) struct Lifecycle {
    draining: Cell<bool>,
    ending: Cell<bool>,
    succeeded: Cell<bool>,
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

    /// New requests of other nodes belong to the process that takes over, or are refused.
    pub(crate) fn sends_nodes_away(&self) -> bool {
        self.succeeded.get() || self.ending.get()
    }

    /// Another process has taken over.
    pub(crate) fn is_succeeded(&self) -> bool {
        self.succeeded.get()
    }

    /// Another process takes over.
    pub(crate) fn succeed(&self) {
        self.succeeded.set(true);
    }

    pub(crate) fn drain(&self) {
        self.draining.set(true);
    }

    /// Ends a drain. Does not imply [`Self::drain`].
    pub(crate) fn end(&self) {
        self.ending.set(true);
    }
}
