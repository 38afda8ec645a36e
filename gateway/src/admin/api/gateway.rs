//! `/gateway`

use axum::Json;
use axum::extract::State;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::admin::Admin;
use crate::admin::problem::{Problem, ReadProblems};
use crate::control::GatewayAddress;

pub(super) fn routes() -> OpenApiRouter<Admin> {
    OpenApiRouter::new().routes(routes!(show_gateway))
}

/// Show how agents and callers reach the gateway.
#[utoipa::path(
    get, path = "/gateway", tag = "gateway",
    responses((status = 200, description = "Its address", body = GatewayAddress), ReadProblems),
)]
async fn show_gateway(State(admin): State<Admin>) -> Result<Json<GatewayAddress>, Problem> {
    Ok(Json(admin.gateway_address().await?))
}
