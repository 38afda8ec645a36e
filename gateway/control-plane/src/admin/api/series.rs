//! `/series`

use axum::Json;
use axum::extract::State;
use gw_base::clock::Timestamp;
use gw_telemetry::timeseries::{SeriesPlan, SeriesQuery, SeriesView};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::admin::Admin;
use crate::admin::problem::{NodeProblems, Problem, Query, ReadProblems};
use crate::control::ControlError;

pub(crate) fn routes() -> OpenApiRouter<Admin> {
    OpenApiRouter::new().routes(routes!(show_series))
}

/// Show requests, errors, bytes and durations over time, up to seven days back, of all nodes
/// together. The point that is under way is complete within ten seconds of its end.
#[utoipa::path(
    get, path = "/series", tag = "series", params(SeriesQuery),
    responses(
        (status = 200, description = "Points without gaps", body = SeriesView),
        ReadProblems,
        NodeProblems,
    ),
)]
async fn show_series(
    State(admin): State<Admin>,
    Query(query): Query<SeriesQuery>,
) -> Result<Json<SeriesView>, Problem> {
    let plan = SeriesPlan::check(&query, Timestamp::now()).map_err(ControlError::from)?;
    let (counts, missing_nodes) = admin.counts(&plan, query.partial == Some(true)).await?;
    Ok(Json(SeriesView {
        missing_nodes,
        ..plan.view(counts)
    }))
}
