//! The regional gateway: starts the data plane and the control plane in one process.

#[cfg(any(test, feature = "demo"))]
pub mod demo;
#[cfg(test)]
#[path = "../../shared/tests/later_member/mod.rs"]
mod later_member;
pub mod limits;
pub mod process;

pub use process::gateway::{Gateway, StartError};
pub use process::signals::{RunError, Signals};
pub use process::takeover::{Predecessor, Program};
