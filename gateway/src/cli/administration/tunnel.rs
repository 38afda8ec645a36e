//! `gw-gateway tunnel`

use std::io::Write;
use std::time::Duration;

use clap::Subcommand;
use gw_control_plane::control::AgentView;
use gw_shared::id::{AccountId, ServiceId};
use gw_telemetry::counters::TunnelReport;
use humantime::format_duration;
use serde_json::json;

use crate::cli::client::api::{ApiError, Listing};
use crate::cli::client::output::{CommandError, Output, joined, or_dash};
use crate::cli::client::table;

#[derive(Subcommand)]
pub(crate) enum TunnelCommand {
    /// List the open tunnels of an account: the state of each, since when and why, its slots, and
    /// its share of the requests.
    List {
        account: AccountId,
        /// Only tunnels of this service.
        #[arg(long)]
        service: Option<ServiceId>,
    },
}

impl TunnelCommand {
    pub(crate) fn run(self, output: &mut Output) -> Result<(), CommandError> {
        let Self::List { account, service } = self;
        let mut listing = output
            .api
            .list(&format!("/accounts/{account}/agents"), &[], None)?;
        let agents: Result<Vec<AgentView>, _> = listing
            .items
            .into_iter()
            .map(serde_json::from_value)
            .collect();
        let label = service.map(|service| format!("{account}--{service}"));
        let mut tunnels = Vec::new();
        for agent in agents.map_err(ApiError::from)? {
            listing.missing_nodes.extend(agent.missing_nodes);
            tunnels.extend(agent.tunnels);
        }
        tunnels.retain(|tunnel| label.as_ref().is_none_or(|label| tunnel.service == *label));
        tunnels.sort_by(|one, other| {
            (&one.service, &one.agent_id).cmp(&(&other.service, &other.agent_id))
        });
        let missing_nodes = listing.missing_nodes;
        if output.json {
            let items = tunnels.iter().map(|tunnel| json!(tunnel)).collect();
            return output.print_json(
                &json!(Listing {
                    items,
                    missing_nodes,
                    ..Listing::default()
                })
                .to_string(),
            );
        }
        output.write(|out| {
            if tunnels.is_empty() {
                writeln!(out, "No tunnels.")?;
            } else {
                table::write(out, &rows(&tunnels))?;
            }
            if !missing_nodes.is_empty() {
                writeln!(
                    out,
                    "Missing: the tunnels of nodes that do not answer: {}.",
                    joined(missing_nodes)
                )?;
            }
            Ok(())
        })
    }
}

fn rows(tunnels: &[TunnelReport]) -> Vec<Vec<String>> {
    const HEADER: [&str; 11] = [
        "SERVICE",
        "AGENT",
        "STATE",
        "STANDBY",
        "SLOTS",
        "REQUESTS",
        "SHARE",
        "IN FLIGHT",
        "UP",
        "NODE",
        "VERSION",
    ];
    let row = |tunnel: &TunnelReport| {
        vec![
            tunnel.service.clone(),
            tunnel.agent_id.clone(),
            tunnel.state_in_words(),
            if tunnel.standby { "yes" } else { "no" }.to_owned(),
            slots(tunnel),
            tunnel.requests.to_string(),
            share(tunnel),
            tunnel.in_flight.to_string(),
            format_duration(Duration::from_secs(tunnel.age_seconds)).to_string(),
            or_dash(tunnel.node.as_ref()),
            tunnel.agent_version.clone(),
        ]
    };
    [HEADER.map(str::to_owned).to_vec()]
        .into_iter()
        .chain(tunnels.iter().map(row))
        .collect()
}

/// Slots in use and all of them.
pub(crate) fn slots(tunnel: &TunnelReport) -> String {
    let Some(all) = tunnel.slots else {
        return "-".to_owned();
    };
    format!("{} of {all}", tunnel.slots_in_use.unwrap_or(0))
}

/// Share of the requests of the tunnel's service.
pub(crate) fn share(tunnel: &TunnelReport) -> String {
    tunnel
        .share_percent
        .map_or_else(|| "-".to_owned(), |percent| format!("{percent} %"))
}
