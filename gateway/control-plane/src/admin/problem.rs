//! Errors of the administration API: problem details (RFC 9457).

use std::borrow::Cow;
use std::io;

use axum::Json;
use axum::extract::rejection::{JsonRejection, PathRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use gw_base::strict_json::Object;
use gw_store::StoreError;
use gw_telemetry::timeseries::SeriesError;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoResponses, ToSchema};

use super::{NoResult, Panicked};
use crate::control::ControlError;

const MEDIA_TYPE: HeaderValue = HeaderValue::from_static("application/problem+json");

/// Why a request failed, and what would be right.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub(crate) struct Problem {
    /// `urn:gw:problem:` and a word for programs.
    #[serde(rename = "type")]
    kind: Cow<'static, str>,
    /// Short text for readers, the same for every problem of this type.
    title: Cow<'static, str>,
    /// The response's status code.
    status: u16,
    /// The mistake in this request.
    detail: String,
    /// The field or parameter that was wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    field: Option<Cow<'static, str>>,
    /// Slots of nodes of the region that are needed and do not answer.
    #[serde(default, skip_serializing_if = "<[u16]>::is_empty")]
    #[schema(value_type = Vec<u16>)]
    missing_nodes: Box<[u16]>,
}

/// Problems of every request.
#[derive(IntoResponses)]
#[expect(dead_code, reason = "describes responses, makes none")]
pub(crate) enum ReadProblems {
    /// The path or the query is malformed.
    #[response(status = 400, content_type = "application/problem+json")]
    BadRequest(#[to_schema] Problem),
    /// The bearer token is missing or wrong.
    #[response(
        status = 401,
        content_type = "application/problem+json",
        headers(("WWW-Authenticate" = String)),
    )]
    Unauthorized(#[to_schema] Problem),
    /// The object does not exist.
    #[response(status = 404, content_type = "application/problem+json")]
    NotFound(#[to_schema] Problem),
    /// The Host field is not a name of the admin listener.
    #[response(status = 421, content_type = "application/problem+json")]
    OtherHost(#[to_schema] Problem),
    /// A value is invalid.
    #[response(status = 422, content_type = "application/problem+json")]
    Invalid(#[to_schema] Problem),
    /// The gateway's fault.
    #[response(status = 500, content_type = "application/problem+json")]
    Internal(#[to_schema] Problem),
}

/// A further problem of requests for what the nodes of the region keep each for itself.
#[derive(IntoResponses)]
#[expect(dead_code, reason = "describes responses, makes none")]
pub(crate) enum NodeProblems {
    /// A node of the region that has the answer, or a part of it, does not answer. `missing_nodes`
    /// has its slot.
    #[response(status = 503, content_type = "application/problem+json")]
    MissingNode(#[to_schema] Problem),
}

/// Further problems of requests that change something.
#[derive(IntoResponses)]
#[expect(dead_code, reason = "describes responses, makes none")]
pub(crate) enum WriteProblems {
    /// The request conflicts with the current state.
    #[response(status = 409, content_type = "application/problem+json")]
    Conflict(#[to_schema] Problem),
    /// The body is larger than 64 KiB.
    #[response(status = 413, content_type = "application/problem+json")]
    TooLarge(#[to_schema] Problem),
    /// The body is not JSON by its Content-Type.
    #[response(status = 415, content_type = "application/problem+json")]
    UnsupportedMediaType(#[to_schema] Problem),
    /// Another process is taking over from this one and nothing was changed, or PostgreSQL does not
    /// answer and the change may or may not be made. Repeating a request that creates or changes an
    /// object is safe.
    #[response(status = 503, content_type = "application/problem+json")]
    Unavailable(#[to_schema] Problem),
    /// The disk is full; nothing was changed.
    #[response(status = 507, content_type = "application/problem+json")]
    InsufficientStorage(#[to_schema] Problem),
}

impl Problem {
    pub(crate) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        let (kind, title) = match status {
            StatusCode::BAD_REQUEST => ("bad-request", "Malformed request"),
            StatusCode::UNAUTHORIZED => ("unauthorized", "The admin token is missing or wrong"),
            StatusCode::NOT_FOUND => ("not-found", "Not found"),
            StatusCode::METHOD_NOT_ALLOWED => ("method-not-allowed", "Method not allowed"),
            StatusCode::CONFLICT => ("conflict", "Conflict with the current state"),
            StatusCode::PAYLOAD_TOO_LARGE => ("too-large", "The body is too large"),
            StatusCode::MISDIRECTED_REQUEST => (
                "other-host",
                "The Host field is not a name of the admin listener",
            ),
            StatusCode::UNSUPPORTED_MEDIA_TYPE => {
                ("unsupported-media-type", "The body must be JSON")
            }
            StatusCode::UNPROCESSABLE_ENTITY => ("invalid", "Invalid value"),
            StatusCode::SERVICE_UNAVAILABLE => ("unavailable", "Temporarily unavailable"),
            StatusCode::INSUFFICIENT_STORAGE => ("full", "The disk is full; nothing was changed"),
            _ => ("internal", "Internal error"),
        };
        Self {
            kind: format!("urn:gw:problem:{kind}").into(),
            title: title.into(),
            status: status.as_u16(),
            detail: detail.into(),
            field: None,
            missing_nodes: Box::default(),
        }
    }
}

impl From<SeriesError> for ControlError {
    fn from(error: SeriesError) -> Self {
        match error {
            SeriesError::Invalid { field, message } => Self::Invalid { field, message },
            SeriesError::File(error) => Self::Io(io::Error::other(error)),
        }
    }
}

impl From<ControlError> for Problem {
    fn from(error: ControlError) -> Self {
        let detail = error.to_string();
        match error {
            ControlError::NotFound { .. } => Self::new(StatusCode::NOT_FOUND, detail),
            ControlError::Conflict(_) => Self::new(StatusCode::CONFLICT, detail),
            ControlError::Invalid { field, .. } => Self {
                field: Some(field.into()),
                ..Self::new(StatusCode::UNPROCESSABLE_ENTITY, detail)
            },
            ControlError::NodesUnavailable(nodes) => Self {
                missing_nodes: nodes.iter().map(|node| node.slot).collect(),
                ..Self::new(StatusCode::SERVICE_UNAVAILABLE, detail)
            },
            ControlError::HandedOver
            | ControlError::Stopping
            | ControlError::ArchiveUnavailable(_)
            | ControlError::Store(
                StoreError::Unavailable(_)
                | StoreError::SeveralPrimaries(_)
                | StoreError::Stale
                | StoreError::Pooled
                | StoreError::NewerSchema { .. },
            ) => Self::new(StatusCode::SERVICE_UNAVAILABLE, detail),
            ControlError::Store(StoreError::Full | StoreError::NoRoom(_)) => {
                Self::new(StatusCode::INSUFFICIENT_STORAGE, detail)
            }
            _ => {
                tracing::error!(error = detail, "a request of the admin listener failed");
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, detail)
            }
        }
    }
}

impl From<NoResult> for Problem {
    fn from(failed: NoResult) -> Self {
        match failed {
            NoResult::Refused(error) => error.into(),
            NoResult::Panicked(panicked) => panicked.into(),
        }
    }
}

impl From<Panicked> for Problem {
    fn from(_: Panicked) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "see the gateway's log")
    }
}

impl From<JsonRejection> for Problem {
    fn from(rejection: JsonRejection) -> Self {
        Self::new(rejection.status(), rejection.body_text())
    }
}

impl From<QueryRejection> for Problem {
    fn from(rejection: QueryRejection) -> Self {
        Self::new(rejection.status(), rejection.body_text())
    }
}

impl From<PathRejection> for Problem {
    fn from(rejection: PathRejection) -> Self {
        Self::new(rejection.status(), rejection.body_text())
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, [(header::CONTENT_TYPE, MEDIA_TYPE)]).into_response();
        if status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(
                header::WWW_AUTHENTICATE,
                HeaderValue::from_static("Bearer realm=\"gw admin\""),
            );
        }
        if status == StatusCode::SERVICE_UNAVAILABLE {
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        // A struct of strings always serializes.
        *response.body_mut() = serde_json::to_vec(&self).unwrap_or_default().into();
        response
    }
}

/// A JSON object in the request body, or the problem with it.
pub(crate) struct JsonBody<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let Json(object) = Json::<Object>::from_request(request, state).await?;
        Self::of(object)
    }
}

impl<T: DeserializeOwned> JsonBody<T> {
    /// Deserializes the object as a `T`.
    pub(crate) fn of(Object(mut members): Object) -> Result<Self, Problem> {
        members.values_mut().for_each(make_whole);
        serde_json::from_value(Value::Object(members))
            .map(Self)
            .map_err(|error| Problem::new(StatusCode::UNPROCESSABLE_ENTITY, error.to_string()))
    }
}

/// Converts whole numbers such as 5.0 to integers, which serde requires (RFC 8259 §6 has one kind
/// of number).
fn make_whole(value: &mut Value) {
    // Whole numbers up to 2^53 are exact in an f64.
    if let Some(number) = value.as_f64()
        && !value.is_u64()
        && !value.is_i64()
        && number.fract() == 0.0
        && number.abs() <= 9_007_199_254_740_992.0
    {
        *value = Value::from(number as i64);
    }
}

/// Path parameters, or the problem with them.
#[derive(FromRequestParts)]
#[from_request(via(axum::extract::Path), rejection(Problem))]
pub(crate) struct Path<T>(pub(crate) T);

/// Query parameters, or the problem with them.
#[derive(FromRequestParts)]
#[from_request(via(axum::extract::Query), rejection(Problem))]
pub(crate) struct Query<T>(pub(crate) T);
