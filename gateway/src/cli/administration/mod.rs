//! Commands that use the administration API of a running gateway.

pub(super) mod account;
pub(super) mod agent;
pub(crate) mod agent_ca;
pub(super) mod agent_progress;
pub(super) mod audit;
pub(super) mod caller_secret;
pub(super) mod enrollment_token;
pub(super) mod request;
pub(super) mod service;
pub(super) mod service_access;
pub(super) mod signing_key;
pub(super) mod tunnel;
pub(crate) mod warnings;
