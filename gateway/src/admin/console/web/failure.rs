//! Error pages.

use askama::Template;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use super::assets;
use super::page::render;
use crate::admin::Panicked;
use crate::control::ControlError;
use crate::store::StoreError;

/// The error that is shown instead of a page.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    status: StatusCode,
    title: &'static str,
    detail: String,
}

#[derive(Template)]
#[template(path = "failure.html")]
struct FailurePage<'a> {
    assets: &'static str,
    status: u16,
    title: &'static str,
    detail: &'a str,
}

impl Failure {
    fn new(status: StatusCode, title: &'static str, detail: impl Into<String>) -> Self {
        Self { status, title, detail: detail.into() }
    }

    pub(crate) fn nothing_here() -> Self {
        Self::not_found("Nothing is at this address.")
    }

    pub(crate) fn not_found(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "Not found", detail)
    }

    pub(crate) fn method_not_allowed() -> Self {
        Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "Not this way",
            "This address is of a form: open its page and send it.",
        )
    }

    pub(crate) fn forged() -> Self {
        let detail = "This form is not of the page you have open, or its session has ended. Nothing was changed: go back, \
                      reload the page, and try again.";
        Self::new(StatusCode::FORBIDDEN, "Not accepted", detail)
    }

    pub(crate) fn other_host(host: &str) -> Self {
        let detail = format!(
            "The console is not known by the name \u{201c}{host}\u{201d}. If it is to be, add the name to admin_hosts in the \
             gateway's configuration."
        );
        Self::new(StatusCode::MISDIRECTED_REQUEST, "Not here", detail)
    }

    pub(crate) fn too_large() -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "Too large", "The form is larger than 4 MiB. Nothing was changed.")
    }

    pub(crate) fn broken() -> Self {
        let detail = "The gateway failed to make this page; its log says why.";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "Something broke", detail)
    }
}

impl From<Panicked> for Failure {
    fn from(_: Panicked) -> Self {
        Self::broken()
    }
}

impl From<ControlError> for Failure {
    fn from(error: ControlError) -> Self {
        let detail = error.to_string();
        match error {
            ControlError::NotFound { .. } => Self::not_found(detail),
            ControlError::Conflict(_) => Self::new(StatusCode::CONFLICT, "Not possible as it is", detail),
            ControlError::Invalid { .. } => Self::new(StatusCode::UNPROCESSABLE_ENTITY, "Not understood", detail),
            ControlError::HandedOver | ControlError::Stopping => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "Not now", detail)
            }
            ControlError::Store(StoreError::Full) => {
                Self::new(StatusCode::INSUFFICIENT_STORAGE, "The disk is full", detail)
            }
            _ => {
                tracing::error!(error = detail, "administration failed");
                Self::broken()
            }
        }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let Self { status, title, detail } = self;
        let page = FailurePage { assets: assets::version(), status: status.as_u16(), title, detail: &detail };
        match render(&page) {
            Ok(page) => (status, page).into_response(),
            // The error page itself could not be rendered.
            Err(_) => (status, title).into_response(),
        }
    }
}
