//! The reason why a scenario failed.

use std::fmt;
use std::io;
use std::time::{Duration, Instant};

const TICK: Duration = Duration::from_millis(20);

/// A violated guarantee, or an error that prevented the check.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    /// Kind of the error, if it is one of input or output.
    kind: Option<io::ErrorKind>,
}

impl Failure {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            kind: None,
        }
    }

    /// An error with the operation that failed.
    pub(crate) fn during(what: impl fmt::Display, error: impl fmt::Display) -> Self {
        Self::new(format!("{what}: {error}"))
    }

    pub(crate) fn kind(&self) -> Option<io::ErrorKind> {
        self.kind
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self {
            message: error.to_string(),
            kind: Some(error.kind()),
        }
    }
}

impl From<rustls::Error> for Failure {
    fn from(error: rustls::Error) -> Self {
        Self::new(format!("TLS: {error}"))
    }
}

impl From<gw_local_region::Error> for Failure {
    fn from(error: gw_local_region::Error) -> Self {
        Self::new(error.to_string())
    }
}

impl From<procfs::ProcError> for Failure {
    fn from(error: procfs::ProcError) -> Self {
        Self::during("/proc", error)
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Self {
        Self::new(format!("JSON: {error}"))
    }
}

/// `Ok` if `kept`, otherwise a failure with the message of `otherwise`.
pub(crate) fn ensure(kept: bool, otherwise: impl FnOnce() -> String) -> Result<(), Failure> {
    if kept {
        Ok(())
    } else {
        Err(Failure::new(otherwise()))
    }
}

/// Looks until `holds` is true. Fails with the message of `otherwise` after `within`.
pub(crate) fn wait_until(
    within: Duration,
    otherwise: impl FnOnce() -> String,
    mut holds: impl FnMut() -> Result<bool, Failure>,
) -> Result<(), Failure> {
    let deadline = Instant::now() + within;
    while !holds()? {
        if Instant::now() >= deadline {
            return Err(Failure::new(otherwise()));
        }
        std::thread::sleep(TICK);
    }
    Ok(())
}
