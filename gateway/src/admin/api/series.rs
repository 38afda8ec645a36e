//! `/series`

use axum::Json;
use axum::extract::State;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::admin::Admin;
use crate::admin::problem::{Problem, Query, ReadProblems};
use crate::clock::Timestamp;
use crate::telemetry::timeseries::{SeriesQuery, SeriesView};

pub(super) fn routes() -> OpenApiRouter<Admin> {
    OpenApiRouter::new().routes(routes!(show_series))
}

/// Show requests, errors, bytes and durations over time, up to seven days back. The point that is under way is complete
/// within ten seconds of its end.
#[utoipa::path(
    get, path = "/series", tag = "series", params(SeriesQuery),
    responses((status = 200, description = "Points without gaps", body = SeriesView), ReadProblems),
)]
async fn show_series(
    State(admin): State<Admin>,
    Query(query): Query<SeriesQuery>,
) -> Result<Json<SeriesView>, Problem> {
    let series = std::sync::Arc::clone(&admin.series);
    admin.ask(move |_| Ok(series.show(&query, Timestamp::now())?)).await.map(Json)
}
