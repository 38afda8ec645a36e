//! `/accounts/{account}/services`

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use gw_base::page::{Page, PageQuery};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::admin::Admin;
use crate::admin::api::applied::{AppliedDocumentFields, By};
use crate::admin::api::created;
use crate::admin::problem::{JsonBody, Path, Problem, Query, ReadProblems, WriteProblems};
use crate::control::records::service;
use crate::control::{NewService, ServiceChanges, ServiceView};

pub(crate) fn routes() -> OpenApiRouter<Admin> {
    OpenApiRouter::new()
        .routes(routes!(create_service, list_services))
        .routes(routes!(show_service, change_service, delete_service))
}

/// Create a service. Creating it again with the same settings changes nothing.
#[utoipa::path(
    post, path = "/accounts/{account}/services", tag = "services",
    params(("account" = String, Path, description = "Account id"), AppliedDocumentFields),
    request_body = NewService,
    responses(
        (status = 201, description = "Created", body = ServiceView, headers(("Location" = String))),
        (status = 200, description = "It was there already", body = ServiceView),
        ReadProblems, WriteProblems,
    ),
)]
async fn create_service(
    State(admin): State<Admin>,
    By(actor): By,
    Path(account): Path<String>,
    JsonBody(new): JsonBody<NewService>,
) -> Result<Response, Problem> {
    let made = admin
        .ask(move |control| service::create(control, &actor, &account, &new))
        .await?;
    let location = format!("/accounts/{}/services/{}", made.0.account, made.0.id);
    Ok(created(made, &location))
}

/// List the services of an account.
#[utoipa::path(
    get, path = "/accounts/{account}/services", tag = "services",
    params(("account" = String, Path, description = "Account id"), PageQuery),
    responses((status = 200, description = "A page", body = Page<ServiceView>), ReadProblems),
)]
async fn list_services(
    State(admin): State<Admin>,
    Path(account): Path<String>,
    Query(page): Query<PageQuery>,
) -> Result<Json<Page<ServiceView>>, Problem> {
    admin
        .ask(move |control| service::list(control, &account, &page))
        .await
        .map(Json)
}

/// Show a service.
#[utoipa::path(
    get, path = "/accounts/{account}/services/{service}", tag = "services",
    params(
        ("account" = String, Path, description = "Account id"),
        ("service" = String, Path, description = "Service id"),
    ),
    responses((status = 200, description = "The service", body = ServiceView), ReadProblems),
)]
async fn show_service(
    State(admin): State<Admin>,
    Path((account, service)): Path<(String, String)>,
) -> Result<Json<ServiceView>, Problem> {
    admin
        .ask(move |control| service::show(control, &account, &service))
        .await
        .map(Json)
}

/// Change the settings of a service. Omitted members keep their values.
#[utoipa::path(
    patch, path = "/accounts/{account}/services/{service}", tag = "services",
    params(
        ("account" = String, Path, description = "Account id"),
        ("service" = String, Path, description = "Service id"),
        AppliedDocumentFields,
    ),
    request_body = ServiceChanges,
    responses(
        (status = 200, description = "As it is now", body = ServiceView),
        ReadProblems,
        WriteProblems,
    ),
)]
async fn change_service(
    State(admin): State<Admin>,
    By(actor): By,
    Path((account, service)): Path<(String, String)>,
    JsonBody(changes): JsonBody<ServiceChanges>,
) -> Result<Json<ServiceView>, Problem> {
    admin
        .ask(move |control| service::change(control, &actor, &account, &service, &changes))
        .await
        .map(Json)
}

/// Delete a service. It is taken off the lists of credentials, keys and agents.
#[utoipa::path(
    delete, path = "/accounts/{account}/services/{service}", tag = "services",
    params(
        ("account" = String, Path, description = "Account id"),
        ("service" = String, Path, description = "Service id"),
        AppliedDocumentFields,
    ),
    responses((status = 204, description = "Deleted"), ReadProblems, WriteProblems),
)]
async fn delete_service(
    State(admin): State<Admin>,
    By(actor): By,
    Path((account, service)): Path<(String, String)>,
) -> Result<StatusCode, Problem> {
    admin
        .ask(move |control| service::delete(control, &actor, &account, &service))
        .await?;
    Ok(StatusCode::NO_CONTENT)
}
