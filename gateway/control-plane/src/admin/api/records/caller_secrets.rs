//! `/accounts/{account}/credentials` and `/accounts/{account}/service-keys`: the same routes for
//! both kinds of caller secret.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use gw_base::page::{Page, PageQuery};
use gw_shared::id::{ClientId, KeyId};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::admin::Admin;
use crate::admin::api::applied::{AppliedDocumentFields, By};
use crate::admin::api::{created, secret};
use crate::admin::problem::{JsonBody, Path, Problem, Query, ReadProblems, WriteProblems};
use crate::control::records::caller_secret;
use crate::control::{
    CallerSecretChanges, CredentialView, NewCallerSecret, NewCredentialView, NewServiceKeyView,
    ServiceKeyView,
};

pub(crate) fn routes() -> OpenApiRouter<Admin> {
    credentials::routes().merge(service_keys::routes())
}

/// Defines the routes of one kind. `$kind` is the type of its ids, `$view` and `$new_view` are its
/// views without and with the secret. The names of the functions are the operation ids.
macro_rules! caller_secret_routes {
    (
        $module:ident,
        $tag:tt,
        $collection:tt,
        $item:tt,
        $rotate_path:tt,
        $id:tt,
        $kind:ty,
        $view:ty,
        $new_view:ty,
        $new_id:ident,
        $new_field:ident,
        [$create:ident, $list:ident, $show:ident, $change:ident, $rotate:ident, $delete:ident]
    ) => {
        mod $module {
            use super::*;

            pub(crate) fn routes() -> OpenApiRouter<Admin> {
                OpenApiRouter::new()
                    .routes(routes!($create, $list))
                    .routes(routes!($show, $change, $delete))
                    .routes(routes!($rotate))
            }

            /// Create one. Its secret is shown this once. With a name, creating it again changes
            /// nothing.
            #[utoipa::path(
                post, path = $collection, tag = $tag,
                params(
                    ("account" = String, Path, description = "Account id"),
                    AppliedDocumentFields,
                ),
                request_body = NewCallerSecret,
                responses(
                    (
                        status = 201,
                        description = "Created",
                        body = $new_view,
                        headers(("Location" = String)),
                    ),
                    (status = 200, description = "It was there already; without its \
                        secret", body = $new_view),
                    ReadProblems, WriteProblems,
                ),
            )]
            async fn $create(
                State(admin): State<Admin>,
                By(actor): By,
                Path(account): Path<String>,
                JsonBody(new): JsonBody<NewCallerSecret>,
            ) -> Result<Response, Problem> {
                let made = admin
                    .ask(move |control| {
                        caller_secret::create::<$kind>(control, &actor, &account, &new)
                    })
                    .await?;
                let view = &made.0.$new_field;
                let location = format!("/accounts/{}/{}/{}", view.account, $tag, view.$new_id);
                Ok(secret(created(made, &location)))
            }

            /// List those of an account, without their secrets.
            #[utoipa::path(
                get, path = $collection, tag = $tag,
                params(("account" = String, Path, description = "Account id"), PageQuery),
                responses((status = 200, description = "A page", body = Page<$view>), ReadProblems),
            )]
            async fn $list(
                State(admin): State<Admin>,
                Path(account): Path<String>,
                Query(page): Query<PageQuery>,
            ) -> Result<Json<Page<$view>>, Problem> {
                admin
                    .ask(move |control| caller_secret::list::<$kind>(control, &account, &page))
                    .await
                    .map(Json)
            }

            /// Show one, without its secret.
            #[utoipa::path(
                get, path = $item, tag = $tag,
                params(
                    ("account" = String, Path, description = "Account id"),
                    ($id = String, Path),
                ),
                responses((status = 200, description = "As it is", body = $view), ReadProblems),
            )]
            async fn $show(
                State(admin): State<Admin>,
                Path((account, id)): Path<(String, String)>,
            ) -> Result<Json<$view>, Problem> {
                admin
                    .ask(move |control| caller_secret::show::<$kind>(control, &account, &id))
                    .await
                    .map(Json)
            }

            /// Change one. Omitted members keep their values. In force on every core at once.
            #[utoipa::path(
                patch, path = $item, tag = $tag,
                params(
                    ("account" = String, Path, description = "Account id"),
                    ($id = String, Path),
                    AppliedDocumentFields,
                ),
                request_body = CallerSecretChanges,
                responses(
                    (status = 200, description = "As it is now", body = $view),
                    ReadProblems,
                    WriteProblems,
                ),
            )]
            async fn $change(
                State(admin): State<Admin>,
                By(actor): By,
                Path((account, id)): Path<(String, String)>,
                JsonBody(changes): JsonBody<CallerSecretChanges>,
            ) -> Result<Json<$view>, Problem> {
                let change = move |control: &crate::control::Control| {
                    caller_secret::change::<$kind>(control, &actor, &account, &id, &changes)
                };
                admin.ask(change).await.map(Json)
            }

            /// Give it a new secret, which is shown this once. The old one is refused from now on.
            #[utoipa::path(
                post, path = $rotate_path, tag = $tag,
                params(
                    ("account" = String, Path, description = "Account id"),
                    ($id = String, Path),
                    AppliedDocumentFields,
                ),
                responses(
                    (status = 200, description = "With its new secret", body = $new_view),
                    ReadProblems,
                    WriteProblems,
                ),
            )]
            async fn $rotate(
                State(admin): State<Admin>,
                By(actor): By,
                Path((account, id)): Path<(String, String)>,
            ) -> Result<Response, Problem> {
                let rotate = move |control: &crate::control::Control| {
                    caller_secret::rotate::<$kind>(control, &actor, &account, &id)
                };
                Ok(secret(Json(admin.ask(rotate).await?).into_response()))
            }

            /// Delete one. Its secret is refused from now on.
            #[utoipa::path(
                delete, path = $item, tag = $tag,
                params(
                    ("account" = String, Path, description = "Account id"),
                    ($id = String, Path),
                    AppliedDocumentFields,
                ),
                responses((status = 204, description = "Deleted"), ReadProblems, WriteProblems),
            )]
            async fn $delete(
                State(admin): State<Admin>,
                By(actor): By,
                Path((account, id)): Path<(String, String)>,
            ) -> Result<StatusCode, Problem> {
                admin
                    .ask(move |control| {
                        caller_secret::delete::<$kind>(control, &actor, &account, &id)
                    })
                    .await?;
                Ok(StatusCode::NO_CONTENT)
            }
        }
    };
}

caller_secret_routes!(
    credentials,
    "credentials",
    "/accounts/{account}/credentials",
    "/accounts/{account}/credentials/{client_id}",
    "/accounts/{account}/credentials/{client_id}/rotate-secret",
    "client_id",
    ClientId,
    CredentialView,
    NewCredentialView,
    client_id,
    credential,
    [
        create_credential,
        list_credentials,
        show_credential,
        change_credential,
        rotate_credential_secret,
        delete_credential
    ]
);

caller_secret_routes!(
    service_keys,
    "service-keys",
    "/accounts/{account}/service-keys",
    "/accounts/{account}/service-keys/{key_id}",
    "/accounts/{account}/service-keys/{key_id}/rotate-secret",
    "key_id",
    KeyId,
    ServiceKeyView,
    NewServiceKeyView,
    key_id,
    key,
    [
        create_service_key,
        list_service_keys,
        show_service_key,
        change_service_key,
        rotate_service_key_secret,
        delete_service_key
    ]
);
