//! The nodes of the region.

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use gw_region::{NodeState, NodeStatus, RegionStatus, Standing, StopReason};

use crate::admin::Admin;
use crate::admin::console::web::failure::ErrorPage;
use crate::admin::console::web::format;
use crate::admin::console::web::page::{Chrome, Section, Visit, render};
use crate::admin::nodes::{Live, LiveQuery, NodeLive};

#[derive(Template)]
#[template(path = "region.html")]
struct RegionPage {
    chrome: Chrome,
    /// `None` if the membership does not answer.
    region: Option<RegionSummary>,
}

struct RegionSummary {
    epoch: u64,
    /// Slot of the node that shows the page.
    here: String,
    engine: String,
    /// Conditions that an operator must know of.
    warnings: Vec<&'static str>,
    nodes: Vec<NodeTableRow>,
}

/// A node as a table row.
struct NodeTableRow {
    slot: u16,
    is_here: bool,
    state: NodeState,
    version: String,
    services: String,
    /// Text and style.
    health: (String, &'static str),
    /// `None` if the node does not answer.
    live: Option<NodeCounts>,
    behind: String,
    last_sign: String,
}

struct NodeCounts {
    tunnels: usize,
    in_flight: usize,
    connections: String,
}

pub(crate) async fn show(State(admin): State<Admin>, visit: Visit) -> Result<Response, ErrorPage> {
    let Some(inputs) = admin.region.clone() else {
        return Err(ErrorPage::nothing_here());
    };
    let live = admin
        .live(LiveQuery {
            summary: true,
            ..LiveQuery::default()
        })
        .await?;
    let status = admin
        .look(move |control| Ok(inputs.status_with_services(control)))
        .await?;
    let region = status.map(|status| RegionSummary::new(&status, &live));
    render(&RegionPage {
        chrome: visit.chrome(Section::Region, "Region"),
        region,
    })
}

impl RegionSummary {
    fn new(status: &RegionStatus, live: &Live) -> Self {
        let here = status.here.map(|slot| slot.get());
        let of_node = |slot: u16| {
            let other = live
                .others
                .iter()
                .find(|(node, _)| *node == slot)
                .map(|(_, node)| node);
            if Some(slot) == here {
                Some(&live.here)
            } else {
                other
            }
        };
        let row = |node: &NodeStatus| {
            let slot = node.slot.get();
            NodeTableRow::new(
                node,
                Some(slot) == here,
                of_node(slot),
                live.missing.contains(&slot),
            )
        };
        Self {
            epoch: status.epoch,
            here: here.map_or_else(|| "–".to_owned(), |slot| slot.to_string()),
            engine: match status.engine_silence {
                None => "never".to_owned(),
                Some(silence) if silence.as_secs() < 2 => "now".to_owned(),
                Some(silence) => format!("{} ago", format::seconds(silence.as_secs())),
            },
            warnings: warnings(status),
            nodes: status.nodes.iter().map(row).collect(),
        }
    }
}

fn warnings(status: &RegionStatus) -> Vec<&'static str> {
    let standing = match status.standing {
        Standing::Member => None,
        Standing::Outside => {
            Some("This node is not a member of the region at the moment. It relays nothing.")
        }
        Standing::Isolated => {
            Some("This node does not reach PostgreSQL. It relays with the records that it has.")
        }
        Standing::Suspended => {
            Some("This node does not reach PostgreSQL for too long, and relays nothing.")
        }
        Standing::Stopped(StopReason::Left) => Some("This node has left the region and stops."),
        Standing::Stopped(StopReason::TakenOver) => {
            Some("Another process has taken this node’s place. This one stops.")
        }
    };
    let went_back = "PostgreSQL answers with an older state than this node knows: it was restored, \
                     or is not the primary any more. After a restore, stop all nodes, then start \
                     them.";
    let moving = "Services move between nodes. Their requests wait for up to 5 seconds.";
    standing
        .into_iter()
        .chain(status.engine_went_back.then_some(went_back))
        .chain(status.is_moving.then_some(moving))
        .collect()
}

impl NodeTableRow {
    fn new(node: &NodeStatus, is_here: bool, live: Option<&NodeLive>, is_missing: bool) -> Self {
        let health = match live {
            _ if node.refusal.is_some() => ("refuses the messages of this node".to_owned(), "bad"),
            None if is_missing => ("does not answer".to_owned(), "bad"),
            // It is no member, and was not asked.
            None => ("–".to_owned(), "neutral"),
            Some(live) if live.workers_answering < live.workers => (
                format!(
                    "{} of {} workers answer",
                    live.workers_answering, live.workers
                ),
                "bad",
            ),
            Some(_) => ("ready".to_owned(), "good"),
        };
        let behind = match (node.epoch_lag, node.revision_lag) {
            (0, 0) => "0".to_owned(),
            (0, changes) => format!("{changes} changes"),
            (epochs, changes) => format!("{epochs} epochs, {changes} changes"),
        };
        Self {
            slot: node.slot.get(),
            is_here,
            state: node.state,
            version: node.version.to_string(),
            services: node
                .services
                .map_or_else(|| "–".to_owned(), |services| services.to_string()),
            health,
            live: live.map(NodeCounts::from),
            behind,
            last_sign: match node.silence {
                None => "–".to_owned(),
                Some(silence) if silence.as_secs() < 2 => "now".to_owned(),
                Some(silence) => format!("{} ago", format::seconds(silence.as_secs())),
            },
        }
    }

    /// Text and style of the state.
    fn state(&self) -> (&'static str, &'static str) {
        let style = match self.state {
            NodeState::Live => "good",
            NodeState::Joining | NodeState::Draining | NodeState::Leaving => "warn",
            NodeState::Left => "neutral",
            NodeState::Dead => "bad",
        };
        (self.state.as_str(), style)
    }
}

impl From<&NodeLive> for NodeCounts {
    fn from(live: &NodeLive) -> Self {
        Self {
            tunnels: live.tunnels,
            in_flight: live.in_flight,
            connections: format::count(live.connections as u64),
        }
    }
}
