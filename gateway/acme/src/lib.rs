//! Certificates by ACME (RFC 8555): an order as steps that survive a kill, proofs of control over
//! names, and the time of the next attempt.

#![warn(missing_docs)]

mod admit;
mod dns;
mod error;
mod hook;
mod http;
pub mod limits;
mod order;
mod proof;
pub mod schedule;
mod settings;
mod state;
pub mod tls_alpn;

pub use admit::Admission;
pub use dns::ownership;
pub use dns::update::Rfc2136;
pub use error::{AcmeError, FailureKind};
pub use hook::Hook;
pub use order::{Orders, Progress, RenewalInfo};
pub use proof::{ChallengeKind, Proof, Publisher};
pub use settings::{ExternalAccount, HookSettings, LETS_ENCRYPT, Rfc2136Settings, Settings};
pub use state::{AccountState, Certificate, GivenUp, OrderState, State};
