//! `gw-gateway agent`

use std::time::Duration;

use clap::Subcommand;
use gw_control_plane::control::{AgentChanges, AgentView};
use gw_shared::id::{AccountId, AgentId, EnrollmentTokenId, ServiceId};
use gw_telemetry::counters::{AgentUpdate, EndedTunnel, TunnelReport};
use humantime::format_duration;

use super::{agent_progress, tunnel};
use crate::cli::client::output::{
    CommandError, Listed, Output, Shown, joined, or_dash, word, yes_or_no,
};
use crate::cli::{new_list, texts};

#[derive(Subcommand)]
pub(crate) enum AgentCommand {
    /// List the agents of an account.
    List {
        account: AccountId,
        /// Only agents that enrolled with this token, which may be expired or deleted.
        #[arg(long, value_name = "ID")]
        enrollment_token: Option<EnrollmentTokenId>,
    },
    /// Count the agents of all accounts by the version that they run and by the release keys that
    /// they accept.
    Progress,
    /// Show an agent and its tunnels.
    Show { account: AccountId, agent: AgentId },
    /// Approve an agent that waits for approval.
    Approve { account: AccountId, agent: AgentId },
    /// Revoke an agent permanently. Its tunnels end, and its certificate is refused.
    Revoke { account: AccountId, agent: AgentId },
    /// Change an agent. Omitted settings stay unchanged.
    Change {
        account: AccountId,
        agent: AgentId,
        /// A service that the agent serves; repeat for each. Replaces the previous list.
        #[arg(long = "service", value_name = "SERVICE", value_delimiter = ',')]
        services: Vec<ServiceId>,
        /// Display name.
        #[arg(long)]
        name: Option<String>,
        /// Whether the agent gets requests only while no other agent of the service can take them.
        #[arg(long, value_name = "true|false")]
        standby: Option<bool>,
    },
    /// Delete an agent. Its tunnels end.
    Delete { account: AccountId, agent: AgentId },
}

impl AgentCommand {
    pub(crate) fn run(self, output: &mut Output) -> Result<(), CommandError> {
        let item =
            |account: &AccountId, agent: &AgentId| format!("/accounts/{account}/agents/{agent}");
        match self {
            Self::List {
                account,
                enrollment_token,
            } => {
                let token = enrollment_token
                    .as_ref()
                    .map(|token| ("enrollment_token", token.as_str()));
                output.list::<AgentView>(
                    &format!("/accounts/{account}/agents"),
                    token.as_slice(),
                    None,
                )
            }
            Self::Progress => agent_progress::print(output),
            Self::Show { account, agent } => output.show::<AgentView>(&item(&account, &agent)),
            Self::Approve { account, agent } => {
                output.act::<AgentView>(&format!("{}/approve", item(&account, &agent)), None)
            }
            Self::Revoke { account, agent } => {
                output.act::<AgentView>(&format!("{}/revoke", item(&account, &agent)), None)
            }
            Self::Change {
                account,
                agent,
                services,
                name,
                standby,
            } => {
                let changes = AgentChanges {
                    name,
                    services: new_list(texts(&services)),
                    standby,
                };
                output.change::<AgentView>(&item(&account, &agent), &changes)
            }
            Self::Delete { account, agent } => output.delete(&item(&account, &agent)),
        }
    }
}

impl Shown for AgentView {
    fn facts(&self) -> Vec<(&'static str, String)> {
        let states = self.tunnels.iter().map(state);
        let ended = self.ended_without_another().map(EndedTunnel::in_short);
        let facts = [
            ("agent", self.agent_id.to_string()),
            ("enrollment", or_dash(self.enrollment_id.as_ref())),
            ("name", self.name.clone()),
            ("services", joined(&self.services)),
            ("status", word(self.status)),
            ("standby", yes_or_no(self.standby)),
            ("tunnels", self.tunnels.len().to_string()),
            ("state", joined(states.chain(ended))),
            ("slots", joined(self.tunnels.iter().map(tunnel::slots))),
            ("share", joined(self.tunnels.iter().map(tunnel::share))),
            ("version", or_dash(self.version.as_ref())),
            ("update", or_dash(self.update.as_ref())),
            (
                "release keys",
                joined(self.update.iter().flat_map(AgentUpdate::short_keys)),
            ),
            (
                "certificate until",
                or_dash(self.certificate_not_after.as_ref()),
            ),
            ("ephemeral", yes_or_no(self.ephemeral)),
            ("enrollment token", or_dash(self.enrollment_token.as_ref())),
            ("created", self.created_at.clone()),
        ];
        let tunnels = self
            .tunnels
            .iter()
            .map(|tunnel| ("tunnel", in_words(tunnel)));
        let missing = (!self.missing_nodes.is_empty()).then(|| {
            (
                "missing",
                format!(
                    "tunnels at nodes that do not answer: {}",
                    joined(&self.missing_nodes)
                ),
            )
        });
        let ended = self
            .ended_tunnels
            .iter()
            .map(|ended| ("ended", ended.to_string()));
        let absent = self.absent_since.as_ref();
        let absent = absent.map(|at| {
            (
                "absent",
                format!("since {at}; deleted after an hour without a tunnel"),
            )
        });
        let refused = self
            .refused_version
            .as_ref()
            .map(|refused| ("refused", refused.to_string()));
        facts
            .into_iter()
            .chain(tunnels)
            .chain(ended)
            .chain(absent)
            .chain(refused)
            .chain(missing)
            .collect()
    }
}

impl Listed for AgentView {
    const PLURAL: &'static str = "agents";
    const COLUMNS: usize = 14;
}

fn state(tunnel: &TunnelReport) -> String {
    let standby = if tunnel.standby { ", standby" } else { "" };
    format!("{}{standby}", tunnel.state_in_words())
}

fn in_words(tunnel: &TunnelReport) -> String {
    let TunnelReport {
        service,
        age_seconds,
        idle_seconds,
        in_flight,
        ..
    } = tunnel;
    let slots = tunnel.slots.map_or_else(String::new, |_| {
        format!(", {} slots in use", tunnel::slots(tunnel))
    });
    let share = tunnel.share_percent.map_or_else(String::new, |percent| {
        format!(", {percent} % of the requests")
    });
    let round_trip = tunnel.round_trip_us.map(Duration::from_micros);
    let round_trip = round_trip.map_or(String::new(), |time| format!(", round trip {time:.1?}"));
    let [age, idle] =
        [age_seconds, idle_seconds].map(|seconds| format_duration(Duration::from_secs(*seconds)));
    let node = tunnel
        .node
        .map_or(String::new(), |node| format!(" at node {node}"));
    let state = state(tunnel);
    format!(
        "{service}{node}: {state}, up {age}, idle {idle}, {in_flight} requests in \
         flight{slots}{share}{round_trip}"
    )
}
