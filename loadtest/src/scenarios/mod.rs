//! Scenarios, each a command of the program.

pub(super) mod abuse;
pub(super) mod bulk;
pub(super) mod compare;
pub(super) mod domains;
pub(super) mod expiry;
pub(super) mod logging;
mod many;
pub(super) mod memory;
pub(super) mod region;
pub(super) mod request_log;
pub(super) mod services;
pub(super) mod slow_agent;
pub(super) mod soak;
