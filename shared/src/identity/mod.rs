//! Secrets, and messages of an enrollment.

pub mod enrollment;
pub mod secret;
