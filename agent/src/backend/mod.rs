//! The backends that requests are forwarded to.

mod buffers;
mod choice;
mod connect;
mod exchange;
mod h1;
mod h2;
mod options;
mod pool;
mod stream;

use std::io;

use gw_shared::error_code::AgentErrorCode;
use gw_shared::http::{InvalidBody, InvalidHead};
use gw_shared::tunnel::response::InvalidResponse;

pub(crate) use connect::{ConnectError, Wanted};
pub(crate) use exchange::{Head, RequestHalf, ResponseHalf};
pub(crate) use options::Backends;
pub(crate) use pool::{BackendState, Lease, Pool};
#[cfg(test)]
pub(crate) use stream::Stream;

/// Why there is no (whole) response.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ResponseError {
    #[error("the backend closed the connection: {0}")]
    Reset(io::Error),
    #[error("the backend's response is not valid HTTP: {0}")]
    Head(#[from] InvalidHead),
    #[error("the backend's response is not valid HTTP: {0}")]
    Body(#[from] InvalidBody),
    #[error("the backend's response is not valid HTTP: {0}")]
    Http2(::h2::Error),
    /// It has certainly not begun with the request.
    #[error("the backend refused the request: {0}")]
    Unprocessed(String),
    #[error("the backend's response is not valid HTTP: it switches protocols unasked")]
    Unasked,
    #[error("the backend did not switch to the protocol as asked: {0}")]
    Switch(String),
    #[error("the backend's response is not valid HTTP: {0}")]
    Response(#[from] InvalidResponse),
}

impl ResponseError {
    pub(crate) fn code(&self) -> AgentErrorCode {
        match self {
            // With TLS 1.3 a refused client certificate shows on the first read.
            Self::Reset(error) if connect::tls_error(error).is_some() => AgentErrorCode::BackendTls,
            Self::Reset(_) | Self::Unprocessed(_) | Self::Body(InvalidBody::CutShort) => AgentErrorCode::BackendReset,
            Self::Head(_) | Self::Body(_) | Self::Http2(_) | Self::Unasked | Self::Switch(_) | Self::Response(_) => {
                AgentErrorCode::BackendInvalidResponse
            }
        }
    }

    pub(crate) fn message(&self) -> String {
        match self {
            Self::Reset(error) if connect::tls_error(error).is_some() => {
                format!("the backend ended TLS: {}", connect::explain_tls(error))
            }
            error => error.to_string(),
        }
    }
}
