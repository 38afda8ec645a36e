//! The agent's identity: enrollment, private key and certificate, state folder, renewal.

pub(crate) mod certificate;
mod certificate_requests;
pub mod enroll;
pub(crate) mod recovery;
pub(crate) mod renewal;
mod request_interval;
pub mod state;

pub use certificate::{Identity, UnfitIdentity};
