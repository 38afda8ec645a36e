//! `/certificates`

use axum::Json;
use axum::extract::State;
use gw_base::page::{Page, PageQuery};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::admin::Admin;
use crate::admin::problem::{Problem, Query, ReadProblems, WriteProblems};
use crate::control::Actor;
use crate::control::records::certificate::{self, CertificateView};

pub(crate) fn routes() -> OpenApiRouter<Admin> {
    OpenApiRouter::new()
        .routes(routes!(list_certificates))
        .routes(routes!(renew_certificates))
}

/// List the certificates that an ACME authority issues. Empty if the certificate comes from files.
#[utoipa::path(
    get, path = "/certificates", tag = "certificates", params(PageQuery),
    responses((status = 200, description = "A page", body = Page<CertificateView>), ReadProblems),
)]
async fn list_certificates(
    State(admin): State<Admin>,
    Query(page): Query<PageQuery>,
) -> Result<Json<Page<CertificateView>>, Problem> {
    admin
        .ask(move |control| certificate::list(control, &page))
        .await
        .map(Json)
}

/// Order a new certificate of the region now. The one before stays in use until it is there.
#[utoipa::path(
    post, path = "/certificates/renew", tag = "certificates",
    responses(
        (status = 200, description = "The certificate in use", body = CertificateView),
        ReadProblems,
        WriteProblems,
    ),
)]
async fn renew_certificates(State(admin): State<Admin>) -> Result<Json<CertificateView>, Problem> {
    admin
        .ask(move |control| certificate::renew(control, &Actor::Admin))
        .await
        .map(Json)
}
