//! Rules of each kind of record: the changes that are accepted, and the views of the record.

pub mod account;
pub mod agent;
pub mod caller_secret;
pub mod certificate;
pub mod domain;
pub mod enrollment_token;
pub mod ephemeral_agents;
pub(crate) mod inventory;
pub(crate) mod name;
pub mod service;
pub(crate) mod service_counts;
pub mod signing_key;
pub(crate) mod ticket_key;
