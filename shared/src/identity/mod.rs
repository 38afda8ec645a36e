//! Secrets, and messages of an enrollment.

pub mod enrollment;
pub mod program;
pub mod program_marker;
pub mod secret;
