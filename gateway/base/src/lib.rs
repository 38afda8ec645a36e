//! What all crates of the gateway use: errors, limits, clock, host names, TLS, tasks beside the workers, mailboxes.

#![warn(missing_docs)]

pub mod affinity;
pub mod agent_releases;
pub mod background;
pub mod client_address;
pub mod clock;
pub mod error;
pub mod file_owner;
pub mod freeze;
pub mod hostname;
pub mod limits;
pub mod mailbox;
pub mod memory_limit;
pub mod page;
pub mod principal;
pub mod rate;
pub mod service_settings;
pub mod sqlite_file;
pub mod strict_json;
pub mod tls;
