//! What all crates of the gateway use: errors, limits, clock, host names, TLS, tasks beside the
//! workers, mailboxes.

#![warn(missing_docs)]

pub mod agent_releases;
pub mod client_address;
pub mod clock;
pub mod error;
pub mod limits;
pub mod mailbox;
pub mod page;
pub mod principal;
pub mod process;
pub mod service;
pub mod sqlite_file;
pub mod strict_json;
pub mod tls;
