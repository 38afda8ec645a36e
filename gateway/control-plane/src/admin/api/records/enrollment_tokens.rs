//! `/accounts/{account}/enrollment-tokens`

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use gw_base::page::{Page, PageQuery};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::admin::Admin;
use crate::admin::api::{created, secret};
use crate::admin::problem::{JsonBody, Path, Problem, Query, ReadProblems, WriteProblems};
use crate::control::records::enrollment_token;
use crate::control::{Actor, EnrollmentTokenView, NewEnrollmentToken, NewEnrollmentTokenView};

pub(crate) fn routes() -> OpenApiRouter<Admin> {
    OpenApiRouter::new()
        .routes(routes!(create_enrollment_token, list_enrollment_tokens))
        .routes(routes!(show_enrollment_token, delete_enrollment_token))
}

/// Create an enrollment token. It is shown this once.
#[utoipa::path(
    post, path = "/accounts/{account}/enrollment-tokens", tag = "enrollment-tokens",
    params(("account" = String, Path, description = "Account id")),
    request_body = NewEnrollmentToken,
    responses(
        (
            status = 201,
            description = "Created",
            body = NewEnrollmentTokenView,
            headers(("Location" = String)),
        ),
        ReadProblems, WriteProblems,
    ),
)]
async fn create_enrollment_token(
    State(admin): State<Admin>,
    Path(account): Path<String>,
    JsonBody(new): JsonBody<NewEnrollmentToken>,
) -> Result<Response, Problem> {
    let port = admin.console.port();
    let made = admin
        .ask(move |control| enrollment_token::create(control, &Actor::Admin, &account, &new))
        .await?;
    let made = made.on_port(port);
    let view = &made.enrollment_token;
    let location = format!("/accounts/{}/enrollment-tokens/{}", view.account, view.id);
    Ok(secret(created((made, true), &location)))
}

/// List the enrollment tokens of an account, until a day after they expire, with the agents that
/// used them.
#[utoipa::path(
    get, path = "/accounts/{account}/enrollment-tokens", tag = "enrollment-tokens",
    params(("account" = String, Path, description = "Account id"), PageQuery),
    responses(
        (status = 200, description = "A page", body = Page<EnrollmentTokenView>),
        ReadProblems,
    ),
)]
async fn list_enrollment_tokens(
    State(admin): State<Admin>,
    Path(account): Path<String>,
    Query(page): Query<PageQuery>,
) -> Result<Json<Page<EnrollmentTokenView>>, Problem> {
    admin
        .ask(move |control| enrollment_token::list(control, &account, &page))
        .await
        .map(Json)
}

/// Show an enrollment token, without its secret.
#[utoipa::path(
    get, path = "/accounts/{account}/enrollment-tokens/{id}", tag = "enrollment-tokens",
    params(("account" = String, Path, description = "Account id"), ("id" = String, Path)),
    responses((status = 200, description = "As it is", body = EnrollmentTokenView), ReadProblems),
)]
async fn show_enrollment_token(
    State(admin): State<Admin>,
    Path((account, id)): Path<(String, String)>,
) -> Result<Json<EnrollmentTokenView>, Problem> {
    admin
        .ask(move |control| enrollment_token::show(control, &account, &id))
        .await
        .map(Json)
}

/// Withdraw an enrollment token. Agents that have used it stay enrolled.
#[utoipa::path(
    delete, path = "/accounts/{account}/enrollment-tokens/{id}", tag = "enrollment-tokens",
    params(("account" = String, Path, description = "Account id"), ("id" = String, Path)),
    responses((status = 204, description = "Withdrawn"), ReadProblems, WriteProblems),
)]
async fn delete_enrollment_token(
    State(admin): State<Admin>,
    Path((account, id)): Path<(String, String)>,
) -> Result<StatusCode, Problem> {
    admin
        .ask(move |control| enrollment_token::delete(control, &Actor::Admin, &account, &id))
        .await?;
    Ok(StatusCode::NO_CONTENT)
}
