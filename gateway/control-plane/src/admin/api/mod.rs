//! The administration API, `/api/v1`. Each route is declared with its description, from which
//! `openapi.json` is generated.

mod agent_ca;
mod applied;
mod audit_log;
mod backup;
mod gateway;
mod records;
mod region;
mod requests;
mod series;
mod usage;

use crate::limits;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state, map_request};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use bytes::Bytes;
use gw_interface::auth::bearer;
use gw_shared::identity::secret::SecretHash;
use serde::Serialize;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::{Modify, OpenApi};
use utoipa_axum::router::OpenApiRouter;

use super::Admin;
use super::nodes::await_api_change;
use super::problem::Problem;
use super::serve::keep_place;
use crate::http_server::limit_body;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Gw gateway administration",
        description = "Accounts, services, credentials, service keys, agents and signing keys of \
                       one gateway."
    ),
    servers((url = "/api/v1")),
    security(("admin_token" = [])),
    modifiers(&AdminToken),
)]
struct Document;

struct AdminToken;

impl Modify for AdminToken {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let scheme = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("admin_token", scheme);
    }
}

/// The routes, which require the admin token, and the OpenAPI document, which does not.
pub(super) fn router(admin: &Admin) -> Router<Admin> {
    let (routes, document) = OpenApiRouter::with_openapi(Document::openapi())
        .merge(records::accounts::routes())
        .merge(records::services::routes())
        .merge(records::caller_secrets::routes())
        .merge(records::enrollment_tokens::routes())
        .merge(records::agents::routes())
        .merge(agent_ca::routes())
        .merge(gateway::routes())
        .merge(records::certificates::routes())
        .merge(records::domains::routes())
        .merge(records::signing_keys::routes())
        .merge(audit_log::routes())
        .merge(backup::routes())
        .merge(requests::routes())
        .merge(series::routes())
        .merge(usage::routes())
        .merge(region::routes())
        .layer(from_fn_with_state(admin.clone(), await_api_change))
        // A replay is a request, not a change: other nodes need not know of it.
        .merge(requests::replay_routes().layer(map_request(limit_body::<{ limits::ADMIN_REPLAY }>)))
        .split_for_parts();
    // One copy for all responses, whether their clients read them or not. A document always
    // serializes.
    let document = Bytes::from(serde_json::to_vec(&document).unwrap_or_default());
    routes
        .fallback(async || {
            Problem::new(
                StatusCode::NOT_FOUND,
                "no resource at this path; see /api/v1/openapi.json",
            )
        })
        .method_not_allowed_fallback(async || {
            Problem::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "see the Allow field for the methods of this path",
            )
        })
        .layer(from_fn_with_state(admin.clone(), authorize))
        .route(
            "/openapi.json",
            get(async move || {
                (
                    [(header::CONTENT_TYPE, "application/json")],
                    document.clone(),
                )
            }),
        )
}

/// Requires the admin token (RFC 6750 §2.1).
async fn authorize(State(admin): State<Admin>, request: Request, next: Next) -> Response {
    let token = request
        .headers()
        .get(header::AUTHORIZATION)
        .and_then(bearer);
    // Both sides are hashed, so that the time of the comparison reveals nothing about the token,
    // including its length.
    let is_admin = token
        .is_some_and(|token| SecretHash::of(admin.control.admin_token().reveal()).matches(token));
    if !is_admin {
        let detail = "send Authorization: Bearer and the contents of data_dir/admin.token";
        return Problem::new(StatusCode::UNAUTHORIZED, detail).into_response();
    }
    keep_place(request.extensions());
    next.run(request).await
}

/// 201 with a Location for a created record; 200 for an existing one.
fn created<T: Serialize>((view, created): (T, bool), location: &str) -> Response {
    if created {
        (
            StatusCode::CREATED,
            [(header::LOCATION, format!("/api/v1{location}"))],
            Json(view),
        )
            .into_response()
    } else {
        Json(view).into_response()
    }
}

/// Marks a response with a secret as not cacheable.
fn secret(mut response: Response) -> Response {
    response
        .headers_mut()
        .insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}
