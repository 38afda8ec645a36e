//! Why the control plane refuses a request or cannot do it.

use std::fmt;
use std::io;
use std::path::PathBuf;

use gw_base::page::InvalidLimit;
use gw_base::tls::TlsError;
use gw_base::tls::pki::PkiError;
use gw_shared::id::InvalidId;
use gw_store::StoreError;
use gw_telemetry::request_log::LogError;

use crate::cluster::UnavailableNode;

#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    #[error("no {kind} {id}")]
    NotFound { kind: &'static str, id: String },
    /// An invalid value, with the name of its field.
    #[error("{field}: {message}")]
    Invalid {
        field: &'static str,
        message: String,
    },
    #[error("{0}")]
    Conflict(String),
    #[error("another process is taking over from this one; try again")]
    HandedOver,
    #[error("the gateway stopped before the replay ended")]
    Stopping,
    /// Nodes of the region that are needed for an answer.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    NodesUnavailable(Vec<UnavailableNode>),
    /// The request of an agent was refused.
    #[error("{0}")]
    Refused(gw_base::error::Error),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Pki(#[from] PkiError),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error(transparent)]
    RequestLog(LogError),
    /// The data folder cannot be used.
    #[error("data_dir {}: {reason}", path.display())]
    DataFolder { path: PathBuf, reason: String },
    /// Another process uses the data folder.
    #[error("data_dir {}: {reason}", path.display())]
    DataFolderInUse { path: PathBuf, reason: String },
    #[error("cryptography: {0}")]
    Crypto(#[from] aws_lc_rs::error::Unspecified),
}

impl ControlError {
    pub(super) fn not_found(kind: &'static str, id: impl fmt::Display) -> Self {
        Self::NotFound {
            kind,
            id: id.to_string(),
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
