//! `/usage`

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use gw_base::page::Page;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::admin::Admin;
use crate::admin::problem::{Problem, Query, ReadProblems};
use crate::control::usage::{self, UsageFilter, UsageView};

pub(crate) fn routes() -> OpenApiRouter<Admin> {
    OpenApiRouter::new().routes(routes!(list_usage))
}

/// Show requests, refusals and bytes of each service by day, up to 400 days back, of all nodes
/// together, the newest day first. Those of this node are at most ten seconds old, those of other
/// nodes of a region a minute.
#[utoipa::path(
    get, path = "/usage", tag = "usage", params(UsageFilter),
    responses((status = 200, description = "A page", body = Page<UsageView>), ReadProblems),
)]
async fn list_usage(
    State(admin): State<Admin>,
    Query(filter): Query<UsageFilter>,
) -> Result<Json<Page<UsageView>>, Problem> {
    let series = Arc::clone(&admin.series);
    admin
        .ask(move |control| usage::list(control, series.usage(), &filter))
        .await
        .map(Json)
}
