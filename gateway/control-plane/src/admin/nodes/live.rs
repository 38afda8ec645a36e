//! The live tunnels and connections of all nodes. Each node reports those of its own workers.

use std::time::Duration;

use axum::Json;
use axum::extract::{Query, State};
use futures_util::future::join_all;
use gw_shared::id::AuthorityId;
use gw_telemetry::counters::{EndedTunnel, TunnelReport};
use serde::{Deserialize, Serialize};

use super::ask::target;
use crate::admin::problem::Problem;
use crate::admin::{Admin, Panicked};
use crate::control::{AgentView, Control, LiveAgents, WarningsView, warnings};

/// Time limit of an answer. A node waits up to two seconds for its own workers.
const WITHIN: Duration = Duration::from_secs(3);

/// Which tunnels are listed: all if no member is set.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(in crate::admin) struct LiveQuery {
    pub(in crate::admin) account: Option<String>,
    pub(in crate::admin) agent: Option<String>,
    /// Only numbers, without the list of tunnels.
    #[serde(default)]
    pub(in crate::admin) summary: bool,
}

/// What the workers of one node report.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(in crate::admin) struct NodeLive {
    pub(in crate::admin) connections: usize,
    pub(in crate::admin) tunnels: usize,
    pub(in crate::admin) in_flight: usize,
    pub(in crate::admin) workers: usize,
    /// Workers that answered in time.
    pub(in crate::admin) workers_answering: usize,
    /// Tunnels whose certificate is of another authority than the one that issues now.
    #[serde(default)]
    pub(in crate::admin) tunnels_of_another_authority: usize,
    /// The authority that issues certificates at the node, and has issued its own.
    #[serde(default)]
    pub(in crate::admin) authority: Option<AuthorityId>,
    #[serde(flatten)]
    pub(in crate::admin) agents: LiveAgents,
}

/// What the workers of all nodes report.
pub(in crate::admin) struct Live {
    pub(in crate::admin) here: NodeLive,
    /// The other nodes that answered, by their slots.
    pub(in crate::admin) others: Vec<(u16, NodeLive)>,
    /// Slots of nodes that did not answer.
    pub(in crate::admin) missing: Vec<u16>,
}

impl NodeLive {
    fn new(control: &Control, query: &LiveQuery) -> Self {
        let reports = control.reports();
        let workers_answering = reports.len();
        let connections = reports.iter().map(|report| report.connections).sum();
        let of_another_authority = reports
            .iter()
            .map(|report| report.tunnels_of_another_authority)
            .sum();
        let mut agents = LiveAgents::default();
        reports.into_iter().for_each(|report| agents.add(report));
        let tunnels = agents.tunnels.len();
        let in_flight = agents.tunnels.iter().map(|tunnel| tunnel.in_flight).sum();
        agents
            .tunnels
            .retain(|tunnel| query.lists(&tunnel.service, &tunnel.agent_id));
        agents
            .refused_versions
            .retain(|refused| query.lists(&refused.service, &refused.agent_id));
        agents
            .ended_tunnels
            .retain(|ended| query.lists(&ended.service, &ended.agent_id));
        Self {
            connections,
            tunnels,
            in_flight,
            workers: control.workers(),
            workers_answering,
            tunnels_of_another_authority: of_another_authority,
            authority: control.issuing_authority(),
            agents,
        }
    }
}

impl LiveQuery {
    fn lists(&self, service: &str, agent_id: &str) -> bool {
        let of_account = |account: &str| {
            service
                .strip_prefix(account)
                .is_some_and(|rest| rest.starts_with("--"))
        };
        !self.summary
            && self.account.as_deref().is_none_or(of_account)
            && self.agent.as_deref().is_none_or(|agent| agent_id == agent)
    }
}

impl Live {
    /// The listed tunnels of all nodes.
    pub(in crate::admin) fn tunnels(&self) -> impl Iterator<Item = &TunnelReport> {
        self.nodes().flat_map(|node| &node.agents.tunnels)
    }

    /// The last ends of tunnels to the service, of agents that have no tunnel to it now, sorted by
    /// agent.
    pub(in crate::admin) fn ended_tunnels(&self, service: &str) -> Vec<EndedTunnel> {
        let has_tunnel = |agent: &str| {
            self.tunnels()
                .any(|it| it.service == service && it.agent_id == agent)
        };
        let ended = self
            .nodes()
            .flat_map(|node| &node.agents.ended_tunnels)
            .filter(|ended| ended.service == service);
        let mut ended: Vec<_> = ended
            .filter(|ended| !has_tunnel(&ended.agent_id))
            .cloned()
            .collect();
        ended.sort_by(|one, other| {
            (&one.agent_id, one.seconds_ago).cmp(&(&other.agent_id, other.seconds_ago))
        });
        ended.dedup_by(|older, newer| older.agent_id == newer.agent_id);
        ended
    }

    /// The nodes that answered.
    pub(in crate::admin) fn nodes(&self) -> impl Iterator<Item = &NodeLive> {
        self.others.iter().map(|(_, node)| node).chain([&self.here])
    }
}

impl Admin {
    pub(in crate::admin) async fn live(&self, query: LiveQuery) -> Result<Live, Panicked> {
        let target = target("/v1/live", &query);
        let here = self
            .clone()
            .run(move |control| NodeLive::new(control, &query));
        let (here, (others, missing)) = tokio::join!(here, self.live_elsewhere(&target));
        Ok(Live {
            here: here?,
            others,
            missing,
        })
    }

    /// Services that need attention, by the tunnels of all nodes.
    pub(in crate::admin) async fn warnings(&self) -> Result<WarningsView, Panicked> {
        let live = self.live(LiveQuery::default()).await?;
        let missing_nodes = live.missing.clone();
        let items = self
            .clone()
            .run(move |control| warnings::list(control, live.tunnels()))
            .await?;
        Ok(WarningsView {
            items,
            missing_nodes,
            store: self.control.several_primaries(),
        })
    }

    /// Adds the tunnels that the agents have to other nodes.
    pub(in crate::admin) async fn add_tunnels_elsewhere(&self, agents: &mut [AgentView]) {
        let Some(first) = agents.first() else { return };
        // The agents of one account.
        let agent = (agents.len() == 1).then(|| first.agent_id.to_string());
        let query = LiveQuery {
            account: Some(first.account.to_string()),
            agent,
            summary: false,
        };
        let (others, missing) = self.live_elsewhere(&target("/v1/live", &query)).await;
        for agent in agents {
            others.iter().for_each(|(_, node)| agent.add(&node.agents));
            agent.missing_nodes.clone_from(&missing);
        }
    }

    /// The answers of the other nodes by their slots, and the slots of nodes that do not answer.
    async fn live_elsewhere(&self, target: &str) -> (Vec<(u16, NodeLive)>, Vec<u16>) {
        let nodes = self.other_nodes();
        let answers = join_all(nodes.iter().map(|node| self.ask_node(node, target, WITHIN))).await;
        let mut others = Vec::new();
        let mut missing = Vec::new();
        for (node, answer) in nodes.iter().zip(answers) {
            match answer {
                Ok(live) => others.push((node.slot.get(), live)),
                Err(unavailable) => {
                    tracing::debug!(node = unavailable.slot, reason = %unavailable.reason,
                        "no live data of a node");
                    missing.push(unavailable.slot);
                }
            }
        }
        (others, missing)
    }
}

/// Answers another node.
pub(crate) async fn serve(
    State(admin): State<Admin>,
    Query(query): Query<LiveQuery>,
) -> Result<Json<NodeLive>, Problem> {
    admin
        .ask(move |control| Ok(NodeLive::new(control, &query)))
        .await
        .map(Json)
}
