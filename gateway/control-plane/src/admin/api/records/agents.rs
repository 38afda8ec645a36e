//! `/accounts/{account}/agents`

#![expect(
    unused_qualifications,
    reason = "of the code that utoipa::path writes for a type of its own file"
)]

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use gw_base::page::{Page, PageQuery};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::admin::Admin;
use crate::admin::api::applied::{AppliedDocumentFields, By};
use crate::admin::problem::{JsonBody, Path, Problem, Query, ReadProblems, WriteProblems};
use crate::control::records::agent;
use crate::control::{AgentChanges, AgentView, Control, ControlError};

pub(crate) fn routes() -> OpenApiRouter<Admin> {
    OpenApiRouter::new()
        .routes(routes!(list_agents))
        .routes(routes!(show_agent, change_agent, delete_agent))
        .routes(routes!(approve_agent))
        .routes(routes!(revoke_agent))
}

/// Which agents.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct AgentFilter {
    /// Only agents that enrolled with the token of this id, which may no longer exist.
    enrollment_token: Option<String>,
    /// Most items on the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<usize>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
}

/// List the agents of an account, with their live tunnels.
#[utoipa::path(
    get, path = "/accounts/{account}/agents", tag = "agents",
    params(("account" = String, Path, description = "Account id"), AgentFilter),
    responses((status = 200, description = "A page", body = Page<AgentView>), ReadProblems),
)]
async fn list_agents(
    State(admin): State<Admin>,
    Path(account): Path<String>,
    Query(AgentFilter {
        enrollment_token,
        limit,
        cursor,
    }): Query<AgentFilter>,
) -> Result<Json<Page<AgentView>>, Problem> {
    let query = PageQuery { limit, cursor };
    let look = move |control: &Control| {
        agent::list(control, &account, enrollment_token.as_deref(), &query)
    };
    let mut page = admin.clone().ask(look).await?;
    admin.add_tunnels_elsewhere(&mut page.items).await;
    Ok(Json(page))
}

/// Show an agent, with its live tunnels.
#[utoipa::path(
    get, path = "/accounts/{account}/agents/{agent}", tag = "agents",
    params(
        ("account" = String, Path, description = "Account id"),
        ("agent" = String, Path, description = "Agent id"),
    ),
    responses((status = 200, description = "The agent", body = AgentView), ReadProblems),
)]
async fn show_agent(
    State(admin): State<Admin>,
    Path((account, agent)): Path<(String, String)>,
) -> Result<Json<AgentView>, Problem> {
    one(admin, move |control| agent::show(control, &account, &agent)).await
}

/// Change an agent's name, services or standby. A live agent hears of its services and opens or
/// ends tunnels.
#[utoipa::path(
    patch, path = "/accounts/{account}/agents/{agent}", tag = "agents",
    params(
        ("account" = String, Path, description = "Account id"),
        ("agent" = String, Path, description = "Agent id"),
        AppliedDocumentFields,
    ),
    request_body = AgentChanges,
    responses(
        (status = 200, description = "As it is now", body = AgentView),
        ReadProblems,
        WriteProblems,
    ),
)]
async fn change_agent(
    State(admin): State<Admin>,
    By(actor): By,
    Path((account, agent)): Path<(String, String)>,
    JsonBody(changes): JsonBody<AgentChanges>,
) -> Result<Json<AgentView>, Problem> {
    one(admin, move |control| {
        agent::change(control, &actor, &account, &agent, &changes)
    })
    .await
}

/// Delete an agent. Its tunnels end within a second, and its certificate is worth nothing.
#[utoipa::path(
    delete, path = "/accounts/{account}/agents/{agent}", tag = "agents",
    params(
        ("account" = String, Path, description = "Account id"),
        ("agent" = String, Path, description = "Agent id"),
        AppliedDocumentFields,
    ),
    responses((status = 204, description = "Deleted"), ReadProblems, WriteProblems),
)]
async fn delete_agent(
    State(admin): State<Admin>,
    By(actor): By,
    Path((account, agent)): Path<(String, String)>,
) -> Result<StatusCode, Problem> {
    admin
        .ask(move |control| agent::delete(control, &actor, &account, &agent))
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Let an agent have its certificate that waits for that.
#[utoipa::path(
    post, path = "/accounts/{account}/agents/{agent}/approve", tag = "agents",
    params(
        ("account" = String, Path, description = "Account id"),
        ("agent" = String, Path, description = "Agent id"),
        AppliedDocumentFields,
    ),
    responses(
        (status = 200, description = "As it is now", body = AgentView),
        ReadProblems,
        WriteProblems,
    ),
)]
async fn approve_agent(
    State(admin): State<Admin>,
    By(actor): By,
    Path((account, agent)): Path<(String, String)>,
) -> Result<Json<AgentView>, Problem> {
    one(admin, move |control| {
        agent::approve(control, &actor, &account, &agent)
    })
    .await
}

/// Cut an agent off for good. Its tunnels end within a second.
#[utoipa::path(
    post, path = "/accounts/{account}/agents/{agent}/revoke", tag = "agents",
    params(
        ("account" = String, Path, description = "Account id"),
        ("agent" = String, Path, description = "Agent id"),
        AppliedDocumentFields,
    ),
    responses(
        (status = 200, description = "As it is now", body = AgentView),
        ReadProblems,
        WriteProblems,
    ),
)]
async fn revoke_agent(
    State(admin): State<Admin>,
    By(actor): By,
    Path((account, agent)): Path<(String, String)>,
) -> Result<Json<AgentView>, Problem> {
    one(admin, move |control| {
        agent::revoke(control, &actor, &account, &agent)
    })
    .await
}

/// Runs work on one agent, and adds the agent's tunnels to other nodes to the result.
async fn one(
    admin: Admin,
    work: impl FnOnce(&Control) -> Result<AgentView, ControlError> + Send + 'static,
) -> Result<Json<AgentView>, Problem> {
    let mut agent = admin.clone().ask(work).await?;
    admin
        .add_tunnels_elsewhere(std::slice::from_mut(&mut agent))
        .await;
    Ok(Json(agent))
}
