//! `/agent-ca`

use axum::Json;
use axum::extract::State;
use axum::extract::rejection::JsonRejection;
use gw_base::strict_json::Object;
use gw_region::RegionStatus;
use gw_shared::version::Version;
use serde::de::DeserializeOwned;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::admin::Admin;
use crate::admin::nodes::LiveQuery;
use crate::admin::problem::{JsonBody, Problem, ReadProblems, WriteProblems};
use crate::control::identity::authority;
use crate::control::{Actor, AgentCaView, AuthorityEnd, AuthorityReplacement, ControlError};

pub(crate) fn routes() -> OpenApiRouter<Admin> {
    OpenApiRouter::new()
        .routes(routes!(show_agent_ca))
        .routes(routes!(replace_agent_ca))
        .routes(routes!(finish_agent_ca))
}

/// Show the authorities of agents and nodes, and what still uses the earlier one.
#[utoipa::path(
    get, path = "/agent-ca", tag = "agent-ca",
    responses((status = 200, description = "The authorities", body = AgentCaView), ReadProblems),
)]
async fn show_agent_ca(State(admin): State<Admin>) -> Result<Json<AgentCaView>, Problem> {
    view(&admin).await.map(Json)
}

/// Replace the authority: make the next one, which every node trusts, and have it issue once all
/// nodes say that they do. If some do not, the answer names them in `waits_for_nodes`; the same
/// request goes on. With `immediately`, a new one issues at once, and all others end.
#[utoipa::path(
    post, path = "/agent-ca/replace", tag = "agent-ca",
    request_body(content = Option<AuthorityReplacement>),
    responses(
        (status = 200, description = "The authorities", body = AgentCaView),
        ReadProblems,
        WriteProblems,
    ),
)]
async fn replace_agent_ca(
    State(admin): State<Admin>,
    object: Result<Option<Json<Option<Object>>>, JsonRejection>,
) -> Result<Json<AgentCaView>, Problem> {
    let AuthorityReplacement { immediately } = options(object)?;
    let region = admin.region.clone();
    admin
        .clone()
        .ask(move |control| {
            region
                .and_then(|region| region.status())
                .map_or(Ok(()), |status| check_versions(&status))?;
            if immediately {
                authority::replace_now(control, &Actor::Admin)
            } else {
                authority::add(control, &Actor::Admin)
            }
        })
        .await?;
    if immediately {
        return view(&admin).await.map(Json);
    }
    let (_, pending) = admin.nodes_behind(&admin.control.position()).await;
    if pending.is_empty() {
        admin
            .clone()
            .ask(|control| authority::switch(control, &Actor::Admin))
            .await?;
    }
    let waits_for_nodes = pending.into_iter().map(|slot| slot.get()).collect();
    Ok(Json(AgentCaView {
        waits_for_nodes,
        ..view(&admin).await?
    }))
}

/// End the earlier authority: its certificates are refused from now on, and tunnels with them end.
/// Refused while agents, tunnels or nodes use it, unless `force` is set.
#[utoipa::path(
    post, path = "/agent-ca/finish", tag = "agent-ca",
    request_body(content = Option<AuthorityEnd>),
    responses(
        (status = 200, description = "The authorities", body = AgentCaView),
        ReadProblems,
        WriteProblems,
    ),
)]
async fn finish_agent_ca(
    State(admin): State<Admin>,
    object: Result<Option<Json<Option<Object>>>, JsonRejection>,
) -> Result<Json<AgentCaView>, Problem> {
    let end: AuthorityEnd = options(object)?;
    let before = view(&admin).await?;
    admin
        .clone()
        .ask(move |control| {
            if let Some(reason) = in_use(&before).filter(|_| !end.force) {
                return Err(ControlError::Conflict(reason));
            }
            authority::end(control, &Actor::Admin, &end)
        })
        .await?;
    view(&admin).await.map(Json)
}

/// Reads the options in the body of a request. A missing body means the defaults.
fn options<T: DeserializeOwned + Default>(
    object: Result<Option<Json<Option<Object>>>, JsonRejection>,
) -> Result<T, Problem> {
    object?
        .and_then(|Json(object)| object)
        .map_or_else(|| Ok(T::default()), |object| Ok(JsonBody::of(object)?.0))
}

/// Refuses nodes of another release line, which know one authority only.
fn check_versions(status: &RegionStatus) -> Result<(), ControlError> {
    let is_other = |version: &str| {
        version
            .parse::<Version>()
            .is_ok_and(|version| version.line != Version::own().line)
    };
    let other = status
        .nodes
        .iter()
        .find(|node| !node.state.is_over() && is_other(&node.version));
    other.map_or(Ok(()), |node| {
        Err(ControlError::Conflict(format!(
            "node {} runs version {}, which knows one authority only: upgrade all nodes first",
            node.slot.get(),
            node.version
        )))
    })
}

/// Which tunnels and nodes use the earlier authority; `None` if none does.
fn in_use(view: &AgentCaView) -> Option<String> {
    let nodes = |slots: &[u16]| {
        slots
            .iter()
            .map(u16::to_string)
            .collect::<Vec<_>>()
            .join(", ")
    };
    if !view.missing_nodes.is_empty() {
        return Some(format!(
            "no answer from nodes {}: it is not known what they use",
            nodes(&view.missing_nodes)
        ));
    }
    if !view.nodes_left.is_empty() {
        return Some(format!(
            "nodes {} still use the earlier authority themselves",
            nodes(&view.nodes_left)
        ));
    }
    (view.tunnels_left > 0).then(|| {
        format!(
            "{} tunnels were opened with certificates of the earlier authority: agents open others \
             once they have renewed, and the earlier ones end with their last request",
            view.tunnels_left
        )
    })
}

async fn view(admin: &Admin) -> Result<AgentCaView, Problem> {
    let live = admin
        .live(LiveQuery {
            summary: true,
            ..LiveQuery::default()
        })
        .await?;
    let mut view = admin.clone().ask(authority::show).await?;
    view.tunnels_left = live
        .nodes()
        .map(|node| node.tunnels_of_another_authority)
        .sum();
    let others = live
        .others
        .iter()
        .filter(|(_, node)| node.authority != live.here.authority);
    view.nodes_left = others.map(|(slot, _)| *slot).collect();
    view.missing_nodes = live.missing;
    Ok(view)
}
