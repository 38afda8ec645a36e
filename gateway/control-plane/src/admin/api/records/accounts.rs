//! `/accounts`

#![expect(
    unused_qualifications,
    reason = "of the code that utoipa::path writes for a type of its own file"
)]

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use gw_base::page::{Page, PageQuery};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::admin::Admin;
use crate::admin::api::applied::{AppliedDocumentFields, By};
use crate::admin::api::created;
use crate::admin::problem::{JsonBody, Path, Problem, Query, ReadProblems, WriteProblems};
use crate::control::records::account;
use crate::control::{AccountChanges, AccountContents, AccountView, NewAccount};

pub(crate) fn routes() -> OpenApiRouter<Admin> {
    OpenApiRouter::new()
        .routes(routes!(create_account, list_accounts))
        .routes(routes!(show_account, change_account, delete_account))
        .routes(routes!(show_account_contents))
}

/// Create an account. Creating it again changes nothing.
#[utoipa::path(
    post, path = "/accounts", tag = "accounts",
    params(AppliedDocumentFields),
    request_body = NewAccount,
    responses(
        (status = 201, description = "Created", body = AccountView, headers(("Location" = String))),
        (status = 200, description = "It was there already", body = AccountView),
        ReadProblems, WriteProblems,
    ),
)]
async fn create_account(
    State(admin): State<Admin>,
    By(actor): By,
    JsonBody(new): JsonBody<NewAccount>,
) -> Result<Response, Problem> {
    let made = admin
        .ask(move |control| account::create(control, &actor, &new))
        .await?;
    let location = format!("/accounts/{}", made.0.id);
    Ok(created(made, &location))
}

/// List the accounts.
#[utoipa::path(
    get, path = "/accounts", tag = "accounts", params(PageQuery),
    responses((status = 200, description = "A page", body = Page<AccountView>), ReadProblems),
)]
async fn list_accounts(
    State(admin): State<Admin>,
    Query(page): Query<PageQuery>,
) -> Result<Json<Page<AccountView>>, Problem> {
    admin
        .ask(move |control| account::list(control, &page))
        .await
        .map(Json)
}

/// Show an account.
#[utoipa::path(
    get, path = "/accounts/{account}", tag = "accounts",
    params(("account" = String, Path, description = "Account id")),
    responses((status = 200, description = "The account", body = AccountView), ReadProblems),
)]
async fn show_account(
    State(admin): State<Admin>,
    Path(account): Path<String>,
) -> Result<Json<AccountView>, Problem> {
    admin
        .ask(move |control| account::show(control, &account))
        .await
        .map(Json)
}

/// Change the settings of an account. Omitted members keep their values.
#[utoipa::path(
    patch, path = "/accounts/{account}", tag = "accounts",
    params(("account" = String, Path, description = "Account id"), AppliedDocumentFields),
    request_body = AccountChanges,
    responses(
        (status = 200, description = "As it is now", body = AccountView),
        ReadProblems,
        WriteProblems,
    ),
)]
async fn change_account(
    State(admin): State<Admin>,
    By(actor): By,
    Path(account): Path<String>,
    JsonBody(changes): JsonBody<AccountChanges>,
) -> Result<Json<AccountView>, Problem> {
    admin
        .ask(move |control| account::change(control, &actor, &account, &changes))
        .await
        .map(Json)
}

/// Show what an account has: what its deletion with `cascade` deletes.
#[utoipa::path(
    get, path = "/accounts/{account}/contents", tag = "accounts",
    params(("account" = String, Path, description = "Account id")),
    responses((status = 200, description = "Its records", body = AccountContents), ReadProblems),
)]
async fn show_account_contents(
    State(admin): State<Admin>,
    Path(account): Path<String>,
) -> Result<Json<AccountContents>, Problem> {
    admin
        .ask(move |control| account::contents(control, &account))
        .await
        .map(Json)
}

/// How an account is deleted.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct AccountDeletion {
    /// Also delete its services, credentials, service keys, agents and enrollment tokens, in the
    /// same change.
    #[serde(default)]
    cascade: bool,
}

/// Delete an account: one that has nothing left in it, or, with `cascade`, with all that it has.
#[utoipa::path(
    delete, path = "/accounts/{account}", tag = "accounts",
    params(
        ("account" = String, Path, description = "Account id"),
        AccountDeletion,
        AppliedDocumentFields,
    ),
    responses((status = 204, description = "Deleted"), ReadProblems, WriteProblems),
)]
async fn delete_account(
    State(admin): State<Admin>,
    By(actor): By,
    Path(account): Path<String>,
    Query(AccountDeletion { cascade }): Query<AccountDeletion>,
) -> Result<StatusCode, Problem> {
    admin
        .ask(move |control| account::delete(control, &actor, &account, cascade))
        .await?;
    Ok(StatusCode::NO_CONTENT)
}
