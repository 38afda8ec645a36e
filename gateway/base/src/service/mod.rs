//! A service as all crates know it: its hostname and its settings.

pub mod affinity;
pub mod hostname;
pub mod rate;
pub mod service_settings;
