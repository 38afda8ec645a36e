//! The control plane: changes of the records, the administration API, the console, HTTP between
//! nodes, backups. Blocking and tokio code that runs outside the worker threads.

#![warn(missing_docs)]

pub mod admin;
pub mod admin_client;
pub mod backup;
pub mod certificates;
pub mod cluster;
pub mod control;
#[cfg(any(test, feature = "fuzz_support"))]
#[doc(hidden)]
pub mod fuzz_support;
mod http_server;
#[cfg(test)]
#[path = "../../../shared/tests/later_member/mod.rs"]
mod later_member;
pub mod limits;
pub mod members;
