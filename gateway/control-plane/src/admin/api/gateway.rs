//! `/gateway` and `/warnings`

use axum::Json;
use axum::extract::State;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::admin::Admin;
use crate::admin::problem::{Problem, ReadProblems};
use crate::control::{GatewayAddress, WarningsView};

pub(crate) fn routes() -> OpenApiRouter<Admin> {
    OpenApiRouter::new()
        .routes(routes!(show_gateway))
        .routes(routes!(show_warnings))
}

/// Show how agents and callers reach the gateway.
#[utoipa::path(
    get, path = "/gateway", tag = "gateway",
    responses((status = 200, description = "Its address", body = GatewayAddress), ReadProblems),
)]
async fn show_gateway(State(admin): State<Admin>) -> Result<Json<GatewayAddress>, Problem> {
    Ok(Json(admin.gateway_address().await?))
}

/// Show which services need attention although they answer requests: they depend on one of several
/// agents, or had a full tunnel.
#[utoipa::path(
    get, path = "/warnings", tag = "gateway",
    responses((status = 200, description = "The warnings", body = WarningsView), ReadProblems),
)]
async fn show_warnings(State(admin): State<Admin>) -> Result<Json<WarningsView>, Problem> {
    Ok(Json(admin.warnings().await?))
}
