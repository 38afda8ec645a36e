//! `gw-gateway agent progress`: how far an update of all agents is, or the replacement of a release
//! key.

use std::collections::{BTreeMap, BTreeSet};

use gw_control_plane::control::AgentView;
use gw_shared::identity::enrollment::EnrollmentStatus;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::cli::client::api::ApiError;
use crate::cli::client::output::{CommandError, Output, joined};
use crate::cli::client::table;

/// Counts of approved agents.
#[derive(Debug, Default, Serialize)]
struct AgentProgress {
    agents: usize,
    /// Agents without a tunnel, by `account/agent`: nothing is known of the keys that they accept.
    not_connected: Vec<String>,
    /// Connected agents by the version that runs.
    versions: BTreeMap<String, usize>,
    /// Connected agents by the public half of each release key that they accept.
    release_keys: BTreeMap<String, usize>,
    /// Connected agents that do not update themselves, or have not reported it yet.
    without_updates: usize,
    /// Slots of nodes of the region that do not answer: their agents may be connected.
    missing_nodes: BTreeSet<u16>,
}

#[derive(Deserialize)]
struct ListedAccount {
    id: String,
}

pub(crate) fn print(output: &mut Output) -> Result<(), CommandError> {
    let mut progress = AgentProgress::default();
    for account in output.api.list("/accounts", &[], None)?.items {
        let ListedAccount { id } = serde_json::from_value(account).map_err(ApiError::from)?;
        let listing = output
            .api
            .list(&format!("/accounts/{id}/agents"), &[], None)?;
        progress.missing_nodes.extend(listing.missing_nodes);
        let agents: Result<Vec<AgentView>, _> = listing
            .items
            .into_iter()
            .map(serde_json::from_value)
            .collect();
        agents
            .map_err(ApiError::from)?
            .iter()
            .for_each(|agent| progress.add(agent));
    }
    if output.json {
        return output.print_json(&json!(progress).to_string());
    }
    output.write(|out| table::write(out, &progress.rows()))
}

impl AgentProgress {
    fn add(&mut self, agent: &AgentView) {
        if agent.status != EnrollmentStatus::Approved {
            return;
        }
        self.agents += 1;
        if agent.tunnels.is_empty() {
            return self
                .not_connected
                .push(format!("{}/{}", agent.account, agent.agent_id));
        }
        *self
            .versions
            .entry(agent.version.clone().unwrap_or_default())
            .or_default() += 1;
        let keys = agent.update.iter().flat_map(|update| &update.release_keys);
        keys.for_each(|key| *self.release_keys.entry(key.clone()).or_default() += 1);
        self.without_updates += usize::from(
            agent
                .update
                .as_ref()
                .is_none_or(|update| update.release_keys.is_empty()),
        );
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let Self {
            agents,
            not_connected,
            versions,
            release_keys,
            without_updates,
            missing_nodes,
        } = self;
        let connected = agents - not_connected.len();
        let row = |label: String, count: usize, of: usize| vec![label, format!("{count} of {of}")];
        let mut rows = vec![row("connected".to_owned(), connected, *agents)];
        rows.extend(
            versions
                .iter()
                .map(|(version, count)| row(format!("version {version}"), *count, connected)),
        );
        rows.extend(
            release_keys
                .iter()
                .map(|(key, count)| row(format!("release key {key}"), *count, connected)),
        );
        rows.push(row(
            "without updates".to_owned(),
            *without_updates,
            connected,
        ));
        if !not_connected.is_empty() {
            rows.push(vec!["not connected".to_owned(), joined(not_connected)]);
        }
        if !missing_nodes.is_empty() {
            rows.push(vec![
                "nodes that do not answer".to_owned(),
                joined(missing_nodes),
            ]);
        }
        rows
    }
}
