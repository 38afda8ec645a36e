//! `/signing-keys`

use axum::Json;
use axum::extract::State;
use axum::extract::rejection::JsonRejection;
use axum::http::StatusCode;
use gw_base::page::{Page, PageQuery};
use gw_base::strict_json::Object;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::admin::Admin;
use crate::admin::problem::{JsonBody, Path, Problem, Query, ReadProblems, WriteProblems};
use crate::control::records::signing_key;
use crate::control::{Actor, Rotation, SigningKeyView};

pub(crate) fn routes() -> OpenApiRouter<Admin> {
    OpenApiRouter::new()
        .routes(routes!(list_signing_keys))
        .routes(routes!(rotate_signing_key))
        .routes(routes!(delete_signing_key))
}

/// List the keys that are published.
#[utoipa::path(
    get, path = "/signing-keys", tag = "signing-keys", params(PageQuery),
    responses((status = 200, description = "A page", body = Page<SigningKeyView>), ReadProblems),
)]
async fn list_signing_keys(
    State(admin): State<Admin>,
    Query(page): Query<PageQuery>,
) -> Result<Json<Page<SigningKeyView>>, Problem> {
    admin
        .ask(move |control| signing_key::list(control, &page))
        .await
        .map(Json)
}

/// Make the next key, or return the one that waits. It is published now and signs in ten minutes.
/// With `immediately`, a key is always made, signs at once, and the one that waits is deleted.
#[utoipa::path(
    post, path = "/signing-keys/rotate", tag = "signing-keys",
    request_body(content = Option<Rotation>),
    responses(
        (status = 200, description = "The next key", body = SigningKeyView),
        ReadProblems,
        WriteProblems,
    ),
)]
async fn rotate_signing_key(
    State(admin): State<Admin>,
    object: Result<Option<Json<Option<Object>>>, JsonRejection>,
) -> Result<Json<SigningKeyView>, Problem> {
    let rotation = match object?.and_then(|Json(object)| object) {
        Some(object) => JsonBody::<Rotation>::of(object)?.0,
        None => Rotation::default(),
    };
    admin
        .ask(move |control| signing_key::rotate(control, &Actor::Admin, &rotation))
        .await
        .map(Json)
}

/// Withdraw a key that does not sign any more. The tokens it signed are refused from now on.
#[utoipa::path(
    delete, path = "/signing-keys/{kid}", tag = "signing-keys",
    params(("kid" = String, Path, description = "As in the JWKS")),
    responses((status = 204, description = "Withdrawn"), ReadProblems, WriteProblems),
)]
async fn delete_signing_key(
    State(admin): State<Admin>,
    Path(kid): Path<String>,
) -> Result<StatusCode, Problem> {
    admin
        .ask(move |control| signing_key::delete(control, &Actor::Admin, &kid))
        .await?;
    Ok(StatusCode::NO_CONTENT)
}
