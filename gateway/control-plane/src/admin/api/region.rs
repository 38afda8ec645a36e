//! `/region`

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use gw_region::{NodeStatus, RegionStatus, Standing, StopReason};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::admin::Admin;
use crate::admin::problem::{Problem, ReadProblems};

/// The members of the region, as one node sees them.
#[derive(Debug, Serialize, ToSchema)]
pub(in crate::admin) struct RegionView {
    /// Grows with every change of the members that own services.
    epoch: u64,
    /// Slot of the node that answers; absent until it has joined.
    node: Option<u16>,
    /// Whether this node may admit requests for its services: `outside`, `member`, `isolated`,
    /// `suspended`, `left` or `taken_over`.
    standing: &'static str,
    /// Seconds since the last contact with PostgreSQL; absent before the first.
    engine_silence_seconds: Option<f64>,
    /// PostgreSQL answered with an older epoch than this node knows: it was restored, or is not the
    /// primary any more.
    engine_went_back: bool,
    /// Services move between nodes.
    moving: bool,
    /// All other owners have refused this node's messages for 10 s, while it accepts those of one
    /// of them: it is not ready.
    shut_out: bool,
    /// In the order of their slots.
    nodes: Vec<NodeView>,
}

/// A node of the region.
#[derive(Debug, Serialize, ToSchema)]
pub(in crate::admin) struct NodeView {
    slot: u16,
    /// `joining`, `live`, `draining`, `leaving`, `left` or `dead`.
    state: &'static str,
    version: String,
    /// Services that the node owns; absent for a moment after the members have changed, while they
    /// are counted.
    services: Option<usize>,
    /// Epochs that its workers are behind.
    epoch_lag: u64,
    /// Changes of the records that it is behind.
    revision_lag: u64,
    /// Seconds since this node saw its last sign of life in PostgreSQL; absent before the first.
    silence_seconds: Option<f64>,
    /// Present while the node refuses the messages of the one that answers.
    refusal: Option<RefusalView>,
}

/// A node refuses the messages of another one.
#[derive(Debug, Serialize, ToSchema)]
pub(in crate::admin) struct RefusalView {
    /// Its last answer.
    reason: String,
    /// Seconds since the first refusal.
    seconds: f64,
}

pub(crate) fn routes() -> OpenApiRouter<Admin> {
    OpenApiRouter::new().routes(routes!(show_region))
}

/// Show the nodes of the region, the services of each and how far it is behind. 404 on a gateway
/// without other nodes.
#[utoipa::path(
    get, path = "/region", tag = "region",
    responses(
        (status = 200, description = "The region as this node sees it", body = RegionView),
        ReadProblems,
    ),
)]
async fn show_region(State(admin): State<Admin>) -> Result<Json<RegionView>, Problem> {
    let Some(region) = admin.region.clone() else {
        return Err(Problem::new(
            StatusCode::NOT_FOUND,
            "this gateway is the only node: `peer_listen` is not set",
        ));
    };
    let status = admin
        .ask(move |control| Ok(region.status_with_services(control)))
        .await?;
    let status = status.ok_or_else(|| {
        Problem::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "the membership does not answer",
        )
    });
    status.map(|status| Json(status.into()))
}

impl From<RegionStatus> for RegionView {
    fn from(status: RegionStatus) -> Self {
        let RegionStatus {
            epoch,
            here,
            standing,
            engine_silence,
            engine_went_back,
            is_moving,
            is_shut_out,
            nodes,
        } = status;
        Self {
            epoch,
            node: here.map(|slot| slot.get()),
            standing: match standing {
                Standing::Outside => "outside",
                Standing::Member => "member",
                Standing::Isolated => "isolated",
                Standing::Suspended => "suspended",
                Standing::Stopped(StopReason::Left) => "left",
                Standing::Stopped(StopReason::TakenOver) => "taken_over",
            },
            engine_silence_seconds: engine_silence.as_ref().map(Duration::as_secs_f64),
            engine_went_back,
            moving: is_moving,
            shut_out: is_shut_out,
            nodes: nodes.into_iter().map(NodeView::from).collect(),
        }
    }
}

impl From<NodeStatus> for NodeView {
    fn from(node: NodeStatus) -> Self {
        let NodeStatus {
            slot,
            state,
            version,
            services,
            epoch_lag,
            revision_lag,
            silence,
            refusal,
        } = node;
        Self {
            slot: slot.get(),
            state: state.as_str(),
            version: version.to_string(),
            services,
            epoch_lag,
            revision_lag,
            silence_seconds: silence.as_ref().map(Duration::as_secs_f64),
            refusal: refusal.map(|refusal| RefusalView {
                reason: refusal.reason.to_string(),
                seconds: refusal.lasts.as_secs_f64(),
            }),
        }
    }
}
