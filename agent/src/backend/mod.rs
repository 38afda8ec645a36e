//! Connections to backends over HTTP/1.1 and HTTP/2, plain or with TLS.

mod balance;
mod buffers;
mod config;
mod connect;
mod exchange;
mod h1;
mod h2;
mod health_check;
mod life;
mod pool;
mod private;
mod stream;

use std::io;

use gw_shared::error_code::AgentErrorCode;
use gw_shared::http::{InvalidBody, InvalidHead};
use gw_shared::tunnel::response::InvalidResponse;

use crate::tls::rustls_error;

pub(crate) use config::{Backends, HealthCheck};
pub(crate) use connect::{ConnectError, Offer};
pub(crate) use exchange::{BackendHead, RequestHalf, ResponseHalf};
pub(crate) use pool::{BackendState, Lease, Pool};
pub(crate) use private::CallerPool;
#[cfg(any(test, feature = "bench_support"))]
pub(crate) use stream::BackendStream;
#[cfg(feature = "bench_support")]
pub(crate) use stream::canned;

/// Why there is no complete response.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ResponseError {
    #[error("the backend closed the connection: {0}; its log may say why")]
    Reset(io::Error),
    #[error(
        "the machine of the backend does not answer: nothing that was sent to it is acknowledged; \
         check that it runs, and the network to it"
    )]
    Gone,
    /// The backend may be paused, and the request may move.
    #[error("the backend does not answer: a PING over HTTP/2 had no answer within 5s")]
    Unanswered,
    /// The text says how the answer begins.
    #[error("the backend does not answer in HTTP/1.1: {0}")]
    NotHttp(&'static str),
    #[error("the backend's response is not valid HTTP: {0}")]
    Head(InvalidHead),
    #[error("the backend's response is not valid HTTP: {0}")]
    Body(#[from] InvalidBody),
    #[error("the backend's response is not valid HTTP: {0}")]
    Http2(::h2::Error),
    /// RFC 9113 §7, HTTP_1_1_REQUIRED.
    #[error(
        "the backend requires HTTP/1.1 for this request, which cannot be sent again: set \
         `http_version = \"1.1\"`, or use http:// in place of h2c:// in its URL"
    )]
    Http11Required,
    /// The backend has not processed any part of the request.
    #[error("the backend refused the request: {reason}")]
    Unprocessed {
        reason: String,
        /// It takes no more requests on the connection, but on another one.
        ends_connection: bool,
    },
    #[error(
        "the backend's response is not valid HTTP: it switches protocols without a request to do so"
    )]
    UnrequestedUpgrade,
    #[error("the backend did not upgrade to the requested protocol: {0}")]
    Upgrade(String),
    #[error("the backend's response is refused: {0}")]
    Response(#[from] InvalidResponse),
}

impl From<InvalidHead> for ResponseError {
    fn from(invalid: InvalidHead) -> Self {
        match invalid {
            InvalidHead::TooManyFields(_) => InvalidResponse::TooManyFields.into(),
            InvalidHead::HeadTooLarge(_) => InvalidResponse::HeadTooLarge.into(),
            invalid => Self::Head(invalid),
        }
    }
}

impl ResponseError {
    /// The error of a connection that broke off.
    pub(crate) fn of_io(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::TimedOut {
            Self::Gone
        } else {
            Self::Reset(error)
        }
    }

    /// Times that a request with this error is sent again, at most. Of many requests that are sent
    /// at once, a backend that takes few on a connection refuses some several times.
    pub(crate) fn resent_most(&self) -> u32 {
        match self {
            Self::Unprocessed {
                ends_connection: true,
                ..
            } => 30,
            Self::Unprocessed { .. } => 5,
            _ => 0,
        }
    }

    pub(crate) fn code(&self) -> AgentErrorCode {
        match self {
            // With TLS 1.3 the alert for a refused client certificate arrives on the first read.
            Self::Reset(error) if rustls_error(error).is_some() => AgentErrorCode::BackendTls,
            Self::Reset(_)
            | Self::Gone
            | Self::Unanswered
            | Self::Unprocessed { .. }
            | Self::Body(InvalidBody::CutShort) => AgentErrorCode::BackendReset,
            Self::NotHttp(_)
            | Self::Head(_)
            | Self::Body(_)
            | Self::Http2(_)
            | Self::Http11Required
            | Self::UnrequestedUpgrade
            | Self::Upgrade(_)
            | Self::Response(_) => AgentErrorCode::BackendInvalidResponse,
        }
    }

    /// The text for the caller. `is_tls` tells whether the URL of the backend has https.
    pub(crate) fn message(&self, is_tls: bool) -> String {
        match self {
            Self::Reset(error) if rustls_error(error).is_some() => {
                format!(
                    "the backend closed the TLS connection: {}",
                    connect::explain_tls(error)
                )
            }
            error @ Self::Reset(_) if !is_tls => {
                format!("{error}, and one that speaks TLS needs https:// in its URL")
            }
            error => error.to_string(),
        }
    }
}
