//! The agent's identity: enrollment, private key and certificate, state folder, renewal.

pub(crate) mod certificate;
pub mod enroll;
mod issuance;
pub(crate) mod manager;
pub(crate) mod recovery;
mod renewal;
pub mod state;

pub use certificate::{Identity, UnfitIdentity};
