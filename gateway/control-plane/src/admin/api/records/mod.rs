//! Requests about each kind of record.

pub(crate) mod accounts;
pub(crate) mod agents;
pub(crate) mod caller_secrets;
pub(crate) mod certificates;
pub(crate) mod domains;
pub(crate) mod enrollment_tokens;
pub(crate) mod services;
pub(crate) mod signing_keys;
