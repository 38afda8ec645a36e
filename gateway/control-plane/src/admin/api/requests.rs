//! `/requests`

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use gw_shared::id::{InvalidId, RequestId};
use gw_telemetry::request_log::{BodyView, RequestPage, RequestView, SearchQuery, Side};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::admin::nodes::Located;
use crate::admin::problem::{
    JsonBody, NodeProblems, Path, Problem, Query, ReadProblems, WriteProblems,
};
use crate::admin::{Admin, not_logged};
use crate::control::{ControlError, ReplayEdits};

/// Whether the captured body is incomplete.
const X_GW_TRUNCATED: HeaderName = HeaderName::from_static("x-gw-truncated");
/// The reason for truncation.
const X_GW_TRUNCATED_BY: HeaderName = HeaderName::from_static("x-gw-truncated-by");

pub(crate) fn routes() -> OpenApiRouter<Admin> {
    OpenApiRouter::new()
        .routes(routes!(search_requests))
        .routes(routes!(show_request))
        .routes(routes!(show_request_body))
}

/// Separate routes, because they accept larger bodies.
pub(super) fn replay_routes() -> OpenApiRouter<Admin> {
    OpenApiRouter::new().routes(routes!(replay_request))
}

/// Search the request logs of all nodes, the newest first. A page may have fewer items than asked
/// for and a `next_cursor` all the same: a search that has looked at much goes on with the next
/// page.
#[utoipa::path(
    get, path = "/requests", tag = "requests", params(SearchQuery),
    responses(
        (status = 200, description = "A page", body = RequestPage),
        ReadProblems,
        NodeProblems,
    ),
)]
async fn search_requests(
    State(admin): State<Admin>,
    Query(query): Query<SearchQuery>,
) -> Result<Json<RequestPage>, Problem> {
    Ok(Json(admin.search(query).await?))
}

/// Show a request.
#[utoipa::path(
    get, path = "/requests/{request_id}", tag = "requests",
    params(("request_id" = String, Path, description = "As in X-Gw-Request-Id")),
    responses(
        (status = 200, description = "The request", body = RequestView),
        ReadProblems,
        NodeProblems,
    ),
)]
async fn show_request(
    State(admin): State<Admin>,
    Path(id): Path<String>,
) -> Result<Json<RequestView>, Problem> {
    Ok(Json(admin.request(&id).await?.view))
}

/// Show a body that was kept, as it went over the wire: its `Content-Encoding` is the response's.
/// `X-Gw-Truncated: true` says that there was more of it, and `X-Gw-Truncated-By` why: `size`,
/// `memory` or `interrupted`. The audit log has an entry of it.
#[utoipa::path(
    get, path = "/requests/{request_id}/body/{side}", tag = "requests",
    params(
        ("request_id" = String, Path, description = "As in X-Gw-Request-Id"),
        (
            "side" = String,
            Path,
            description = "`request` or `response`",
            pattern = "^(request|response)$",
        ),
    ),
    responses(
        (
            status = 200,
            description = "The body",
            body = Vec<u8>,
            content_type = "application/octet-stream",
        ),
        ReadProblems, NodeProblems,
    ),
)]
async fn show_request_body(
    State(admin): State<Admin>,
    Path((id, side)): Path<(String, String)>,
) -> Result<Response, Problem> {
    let side = match side.as_str() {
        "request" => Side::Request,
        "response" => Side::Response,
        _ => return Err(ControlError::invalid("side", "must be request or response").into()),
    };
    let body = admin.read_body(&admin.request(&id).await?, side).await?;
    body.map(attachment)
        .ok_or_else(|| Problem::new(StatusCode::NOT_FOUND, "this body was not captured"))
}

/// A captured body as a download. It is untrusted data, so browsers must not render it.
fn attachment(body: BodyView) -> Response {
    let mut response = body.bytes.into_response();
    let headers = response.headers_mut();
    let octets = HeaderValue::from_static("application/octet-stream");
    let text = |text: Option<String>| text.and_then(|text| HeaderValue::try_from(text).ok());
    headers.insert(
        header::CONTENT_TYPE,
        text(body.content_type).unwrap_or(octets),
    );
    if let Some(encoding) = text(body.content_encoding) {
        headers.insert(header::CONTENT_ENCODING, encoding);
    }
    headers.insert(
        header::CONTENT_DISPOSITION,
        HeaderValue::from_static("attachment"),
    );
    headers.insert(
        header::X_CONTENT_TYPE_OPTIONS,
        HeaderValue::from_static("nosniff"),
    );
    headers.insert(
        header::CONTENT_SECURITY_POLICY,
        HeaderValue::from_static("sandbox"),
    );
    headers.insert(
        X_GW_TRUNCATED,
        HeaderValue::from_static(if body.truncated { "true" } else { "false" }),
    );
    if let Some(reason) = body.truncated_by {
        headers.insert(X_GW_TRUNCATED_BY, HeaderValue::from_static(reason.as_str()));
    }
    response
}

/// Relay a captured request again, unchanged or edited, and show the new request, with
/// `replayed_from`. Returns once the response has ended; closing the connection before cancels the
/// replay.
#[utoipa::path(
    post, path = "/requests/{request_id}/replay", tag = "requests",
    params(("request_id" = String, Path, description = "As in X-Gw-Request-Id")),
    request_body = ReplayEdits,
    responses(
        (status = 201, description = "Relayed", body = RequestView, headers(("Location" = String))),
        ReadProblems, WriteProblems,
    ),
)]
async fn replay_request(
    State(admin): State<Admin>,
    Path(id): Path<String>,
    JsonBody(edits): JsonBody<ReplayEdits>,
) -> Result<Response, Problem> {
    let view = admin.replay(parse(&id)?, edits).await?;
    let location = format!("/api/v1/requests/{}", view.id);
    Ok((
        StatusCode::CREATED,
        [(header::LOCATION, location)],
        Json(view),
    )
        .into_response())
}

impl Admin {
    /// The request with this id, from any node.
    async fn request(&self, id: &str) -> Result<Located, Problem> {
        let id = parse(id)?;
        let found = self.locate(id).await?;
        found.ok_or_else(|| not_logged(id).into())
    }
}

/// A malformed id is treated as an unknown request.
fn parse(id: &str) -> Result<RequestId, Problem> {
    id.parse()
        .map_err(|error: InvalidId| Problem::new(StatusCode::NOT_FOUND, error.to_string()))
}
