//! The reason why a scenario failed.

use std::fmt;
use std::io;

/// A violated guarantee, or an error that prevented the check.
#[derive(Debug)]
pub(crate) struct Failure(String);

impl Failure {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }

    /// An error with the operation that failed.
    pub(crate) fn during(what: impl fmt::Display, error: impl fmt::Display) -> Self {
        Self(format!("{what}: {error}"))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self(error.to_string())
    }
}

impl From<rustls::Error> for Failure {
    fn from(error: rustls::Error) -> Self {
        Self(format!("TLS: {error}"))
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Self {
        Self(format!("JSON: {error}"))
    }
}

/// `Ok` if `kept`, otherwise a failure with the message of `otherwise`.
pub(crate) fn ensure(kept: bool, otherwise: impl FnOnce() -> String) -> Result<(), Failure> {
    if kept { Ok(()) } else { Err(Failure(otherwise())) }
}
