//! The connection to PostgreSQL: its settings, time limits, the primary, and the clock of the
//! server.

pub(super) mod engine;
pub(super) mod primaries;
pub(super) mod server_clock;
pub(super) mod settings;
