//! Error pages.

use askama::Template;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use gw_store::StoreError;

use super::assets;
use super::page::render;
use crate::admin::{NoResult, Panicked};
use crate::control::ControlError;

/// The error that is shown instead of a page.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ErrorPage {
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

impl ErrorPage {
    fn new(status: StatusCode, title: &'static str, detail: impl Into<String>) -> Self {
        Self {
            status,
            title,
            detail: detail.into(),
        }
    }

    pub(crate) fn nothing_here() -> Self {
        Self::not_found("There is no page at this address.")
    }

    pub(crate) fn not_found(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "Not found", detail)
    }

    pub(crate) fn method_not_allowed() -> Self {
        Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "Method not allowed",
            "This address accepts only a submitted form. Open the page of the form first.",
        )
    }

    pub(crate) fn forged() -> Self {
        let detail = "The form does not belong to this session, or the session has ended. Nothing \
                      was changed. Go back, reload the page and try again.";
        Self::new(StatusCode::FORBIDDEN, "Not accepted", detail)
    }

    pub(crate) fn too_large() -> Self {
        let detail = "The form is larger than this page accepts, or did not arrive in time. \
                      Nothing was changed.";
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "Too large", detail)
    }

    pub(crate) fn broken() -> Self {
        let detail = "The gateway failed to render this page. See its log.";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "Internal error", detail)
    }
}

impl From<NoResult> for ErrorPage {
    fn from(failed: NoResult) -> Self {
        match failed {
            NoResult::Refused(error) => error.into(),
            NoResult::Panicked(panicked) => panicked.into(),
        }
    }
}

impl From<Panicked> for ErrorPage {
    fn from(_: Panicked) -> Self {
        Self::broken()
    }
}

impl From<ControlError> for ErrorPage {
    fn from(error: ControlError) -> Self {
        let detail = error.to_string();
        match error {
            ControlError::NotFound { .. } => Self::not_found(detail),
            ControlError::Conflict(_) => Self::new(StatusCode::CONFLICT, "Conflict", detail),
            ControlError::Invalid { .. } => {
                Self::new(StatusCode::UNPROCESSABLE_ENTITY, "Invalid value", detail)
            }
            ControlError::HandedOver
            | ControlError::Stopping
            | ControlError::ArchiveUnavailable(_)
            | ControlError::NodesUnavailable(_)
            | ControlError::Store(StoreError::SeveralPrimaries(_)) => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "Temporarily unavailable",
                detail,
            ),
            ControlError::Store(StoreError::Full | StoreError::NoRoom(_)) => {
                Self::new(StatusCode::INSUFFICIENT_STORAGE, "The disk is full", detail)
            }
            _ => {
                tracing::error!(error = detail, "a request of the admin listener failed");
                Self::broken()
            }
        }
    }
}

impl IntoResponse for ErrorPage {
    fn into_response(self) -> Response {
        let Self {
            status,
            title,
            detail,
        } = self;
        let page = FailurePage {
            assets: assets::version(),
            status: status.as_u16(),
            title,
            detail: &detail,
        };
        match render(&page) {
            Ok(page) => (status, page).into_response(),
            // The error page itself could not be rendered.
            Err(_) => (status, title).into_response(),
        }
    }
}
