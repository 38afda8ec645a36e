//! The agent's identity: enrollment, key and certificate, state folder, renewal.

pub mod enroll;
pub(crate) mod issuance;
pub(crate) mod key_pair;
pub(crate) mod recovery;
pub(crate) mod renewal;
pub mod state;
