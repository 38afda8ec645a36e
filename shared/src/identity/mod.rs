//! Secrets, and the messages of an enrollment.

pub mod enrollment;
pub mod secret;
