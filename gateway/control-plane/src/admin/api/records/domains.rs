//! `/accounts/{account}/domains`

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
use crate::control::records::domain::{
    self, DomainChanges, DomainView, NewDomain, NewDomainCertificate,
};

pub(crate) fn routes() -> OpenApiRouter<Admin> {
    OpenApiRouter::new()
        .routes(routes!(add_domain))
        .routes(routes!(list_domains))
        .routes(routes!(show_domain, change_domain, remove_domain))
        .routes(routes!(check_domain))
        .routes(routes!(upload_certificate))
        .routes(routes!(renew_certificate))
}

/// Add an own domain to a service. Adding it again changes nothing. Looks up in DNS whether the
/// account controls the name; without a proof, the domain is pending, and is looked up again. A
/// domain that another service has moves with a proof.
#[utoipa::path(
    post, path = "/accounts/{account}/services/{service}/domains", tag = "domains",
    params(
        ("account" = String, Path, description = "Account id"),
        ("service" = String, Path, description = "Service id"),
        AppliedDocumentFields,
    ),
    request_body = NewDomain,
    responses(
        (status = 201, description = "Added", body = DomainView, headers(("Location" = String))),
        (status = 200, description = "It was there already", body = DomainView),
        ReadProblems, WriteProblems,
    ),
)]
async fn add_domain(
    State(admin): State<Admin>,
    By(actor): By,
    Path((account, service)): Path<(String, String)>,
    JsonBody(new): JsonBody<NewDomain>,
) -> Result<Response, Problem> {
    let made = admin
        .ask(move |control| domain::add(control, &actor, &account, &service, &new))
        .await?;
    let location = format!("/accounts/{}/domains/{}", made.0.account, made.0.name);
    Ok(created(made, &location))
}

/// List the own domains of an account.
#[utoipa::path(
    get, path = "/accounts/{account}/domains", tag = "domains",
    params(("account" = String, Path, description = "Account id"), PageQuery),
    responses((status = 200, description = "A page", body = Page<DomainView>), ReadProblems),
)]
async fn list_domains(
    State(admin): State<Admin>,
    Path(account): Path<String>,
    Query(page): Query<PageQuery>,
) -> Result<Json<Page<DomainView>>, Problem> {
    admin
        .ask(move |control| domain::list(control, &account, &page))
        .await
        .map(Json)
}

/// Show an own domain, with the records to set in DNS.
#[utoipa::path(
    get, path = "/accounts/{account}/domains/{domain}", tag = "domains",
    params(
        ("account" = String, Path, description = "Account id"),
        ("domain" = String, Path, description = "Name of the domain"),
    ),
    responses((status = 200, description = "The domain", body = DomainView), ReadProblems),
)]
async fn show_domain(
    State(admin): State<Admin>,
    Path((account, name)): Path<(String, String)>,
) -> Result<Json<DomainView>, Problem> {
    admin
        .ask(move |control| domain::show(control, &account, &name))
        .await
        .map(Json)
}

/// Change what manages an own domain. It moves by adding it to another service.
#[utoipa::path(
    patch, path = "/accounts/{account}/domains/{domain}", tag = "domains",
    params(
        ("account" = String, Path, description = "Account id"),
        ("domain" = String, Path, description = "Name of the domain"),
        AppliedDocumentFields,
    ),
    request_body = DomainChanges,
    responses(
        (status = 200, description = "As it is now", body = DomainView),
        ReadProblems,
        WriteProblems,
    ),
)]
async fn change_domain(
    State(admin): State<Admin>,
    By(actor): By,
    Path((account, name)): Path<(String, String)>,
    JsonBody(changes): JsonBody<DomainChanges>,
) -> Result<Json<DomainView>, Problem> {
    admin
        .ask(move |control| domain::change(control, &actor, &account, &name, &changes))
        .await
        .map(Json)
}

/// Look up in DNS now whether the account controls the name.
#[utoipa::path(
    post, path = "/accounts/{account}/domains/{domain}/check", tag = "domains",
    params(
        ("account" = String, Path, description = "Account id"),
        ("domain" = String, Path, description = "Name of the domain"),
        AppliedDocumentFields,
    ),
    responses(
        (status = 200, description = "As it is now", body = DomainView),
        ReadProblems,
        WriteProblems,
    ),
)]
async fn check_domain(
    State(admin): State<Admin>,
    By(actor): By,
    Path((account, name)): Path<(String, String)>,
) -> Result<Json<DomainView>, Problem> {
    admin
        .ask(move |control| domain::check(control, &actor, &account, &name))
        .await
        .map(Json)
}

/// Remove an own domain from its service.
#[utoipa::path(
    delete, path = "/accounts/{account}/domains/{domain}", tag = "domains",
    params(
        ("account" = String, Path, description = "Account id"),
        ("domain" = String, Path, description = "Name of the domain"),
        AppliedDocumentFields,
    ),
    responses((status = 204, description = "Removed"), ReadProblems, WriteProblems),
)]
async fn remove_domain(
    State(admin): State<Admin>,
    By(actor): By,
    Path((account, name)): Path<(String, String)>,
) -> Result<StatusCode, Problem> {
    admin
        .ask(move |control| domain::remove(control, &actor, &account, &name))
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Serve this certificate for an own domain. The gateway orders none for it then.
#[utoipa::path(
    post, path = "/accounts/{account}/domains/{domain}/certificate", tag = "domains",
    params(
        ("account" = String, Path, description = "Account id"),
        ("domain" = String, Path, description = "Name of the domain"),
        AppliedDocumentFields,
    ),
    request_body = NewDomainCertificate,
    responses(
        (status = 200, description = "As it is now", body = DomainView),
        ReadProblems,
        WriteProblems,
    ),
)]
async fn upload_certificate(
    State(admin): State<Admin>,
    By(actor): By,
    Path((account, name)): Path<(String, String)>,
    JsonBody(new): JsonBody<NewDomainCertificate>,
) -> Result<Json<DomainView>, Problem> {
    admin
        .ask(move |control| domain::upload(control, &actor, &account, &name, &new))
        .await
        .map(Json)
}

/// Order a new certificate for an own domain now, also in place of an uploaded one. The one before
/// stays in use until it is there.
#[utoipa::path(
    post, path = "/accounts/{account}/domains/{domain}/certificate/renew", tag = "domains",
    params(
        ("account" = String, Path, description = "Account id"),
        ("domain" = String, Path, description = "Name of the domain"),
        AppliedDocumentFields,
    ),
    responses(
        (status = 200, description = "As it is now", body = DomainView),
        ReadProblems,
        WriteProblems,
    ),
)]
async fn renew_certificate(
    State(admin): State<Admin>,
    By(actor): By,
    Path((account, name)): Path<(String, String)>,
) -> Result<Json<DomainView>, Problem> {
    admin
        .ask(move |control| domain::renew(control, &actor, &account, &name))
        .await
        .map(Json)
}
