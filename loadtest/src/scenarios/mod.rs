//! Scenarios, each a command of the program.

pub(super) mod abuse;
pub(super) mod agents;
pub(super) mod backends;
pub(super) mod bucket;
pub(super) mod bulk;
pub(super) mod cancel;
pub(super) mod compare;
pub(super) mod domains;
pub(super) mod expiry;
pub(super) mod logging;
pub(super) mod memory;
pub(super) mod region;
pub(super) mod request_log;
pub(super) mod restarts;
pub(super) mod services;
pub(super) mod stalled;
