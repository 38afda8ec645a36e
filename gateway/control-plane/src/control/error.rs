//! Why the control plane refuses a request or cannot do it.

use std::fmt;
use std::io;
use std::path::PathBuf;

use gw_base::page::InvalidLimit;
use gw_base::tls::TlsError;
use gw_base::tls::pki::PkiError;
use gw_shared::config::suggestion;
use gw_shared::id::InvalidId;
use gw_store::StoreError;
use gw_telemetry::request_log::LogError;

use crate::cluster::UnavailableNode;

/// An error of the control plane.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// A record that does not exist.
    #[error("no {kind} {id}{remedy}")]
    NotFound {
        /// Kind of the record, for example `service`.
        kind: &'static str,
        /// Requested id.
        id: String,
        /// A similar id, or how to list them; empty, or begins with a semicolon.
        remedy: String,
    },
    /// An invalid value, with the name of its field.
    #[error("{field}: {message}")]
    Invalid {
        /// Name of the field in the request.
        field: &'static str,
        /// Why the value is invalid.
        message: String,
    },
    /// The request contradicts the present state, as the text explains.
    #[error("{0}")]
    Conflict(String),
    /// Another process is taking over, so the store is closed here.
    #[error("another process is taking over from this one; try again")]
    HandedOver,
    /// The process is stopping, so the request has no result.
    #[error("the gateway stopped before the replay ended")]
    Stopping,
    /// Nodes of the region that are needed for an answer.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    NodesUnavailable(Vec<UnavailableNode>),
    /// The archive of the request log cannot be read.
    #[error("the requests of lost nodes are missing: the archive cannot be read ({0})")]
    ArchiveUnavailable(String),
    /// The request of an agent was refused.
    #[error("{0}")]
    Refused(gw_base::error::Error),
    /// Error of the store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Error of a key or certificate.
    #[error(transparent)]
    Pki(#[from] PkiError),
    /// Error of a TLS configuration.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Error of a file.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// Error of the request log.
    #[error(transparent)]
    RequestLog(LogError),
    /// The data folder cannot be used.
    #[error("data_dir {}: {reason}", path.display())]
    DataFolder {
        /// The data folder.
        path: PathBuf,
        /// Cause and remedy.
        reason: String,
    },
    /// Another process uses the data folder.
    #[error("data_dir {}: {reason}", path.display())]
    DataFolderInUse {
        /// The data folder.
        path: PathBuf,
        /// The other process, and what to do.
        reason: String,
    },
    /// A cryptographic operation failed. The library gives no cause.
    #[error("cryptography: {0}")]
    Crypto(#[from] aws_lc_rs::error::Unspecified),
}

impl ControlError {
    pub(super) fn not_found(kind: &'static str, id: impl fmt::Display) -> Self {
        Self::NotFound {
            kind,
            id: id.to_string(),
            remedy: String::new(),
        }
    }

    /// As [`Self::not_found`], with a similar id of those that exist, or with the command that
    /// lists them.
    pub(super) fn not_found_among<'a>(
        kind: &'static str,
        id: &str,
        known: impl Iterator<Item = &'a str>,
        list: &str,
    ) -> Self {
        Self::NotFound {
            kind,
            id: id.to_owned(),
            remedy: similar(id, known, list),
        }
    }

    pub(crate) fn invalid(field: &'static str, message: impl Into<String>) -> Self {
        Self::Invalid {
            field,
            message: message.into(),
        }
    }

    pub(crate) fn bad_id(field: &'static str) -> impl Fn(InvalidId) -> Self {
        move |error| Self::invalid(field, error.to_string())
    }
}

/// A similar id of those that exist, or the command that lists them, after a semicolon.
pub(super) fn similar<'a>(id: &str, known: impl Iterator<Item = &'a str>, list: &str) -> String {
    match suggestion(id, known) {
        Some(known) => format!("; did you mean {known}?"),
        None => format!("; `{list}` lists those that exist"),
    }
}

impl From<InvalidLimit> for ControlError {
    fn from(error: InvalidLimit) -> Self {
        Self::invalid("limit", error.to_string())
    }
}

impl From<LogError> for ControlError {
    fn from(error: LogError) -> Self {
        match error {
            LogError::Invalid { field, message } => Self::Invalid { field, message },
            error => Self::RequestLog(error),
        }
    }
}
