//! `gw-gateway agent-ca`

use std::thread;
use std::time::{Duration, Instant};

use clap::Subcommand;
use gw_control_plane::control::{AgentCaView, AuthorityEnd, AuthorityReplacement, AuthorityView};
use gw_shared::command;
use gw_store::AuthorityRole;
use http::Method;
use serde_json::json;

use crate::cli::client::api::ApiError;
use crate::cli::client::output::{CommandError, Output, Shown, joined, write_facts};

#[derive(Subcommand)]
pub(crate) enum AgentCaCommand {
    /// Show the authorities of agents and nodes, and the agents, tunnels and nodes that still use
    /// the earlier one.
    Status,
    /// Replace the authority while agents and nodes run. Run it again if it waits for nodes.
    Replace {
        /// End the authority at once: for a stolen key. Tunnels end, and the agents ask for other
        /// certificates with their keys.
        #[arg(long)]
        immediately: bool,
        /// Try again for at most this many seconds while it waits for nodes. Exit code 1 if some
        /// are left.
        #[arg(long, value_name = "SECONDS", conflicts_with = "immediately")]
        wait: Option<u32>,
    },
    /// End the earlier authority. Refused while agents, tunnels or nodes use it.
    Finish {
        /// End it all the same: requests on such tunnels are aborted, and the agents ask for other
        /// certificates with their keys.
        #[arg(long)]
        force: bool,
    },
}

impl AgentCaCommand {
    pub(crate) fn run(self, output: &mut Output) -> Result<(), CommandError> {
        match self {
            Self::Status => output.show::<AgentCaView>("/agent-ca"),
            Self::Replace { immediately, wait } => replace(output, immediately, wait),
            Self::Finish { force } => {
                output.act::<AgentCaView>("/agent-ca/finish", Some(&json!(AuthorityEnd { force })))
            }
        }
    }
}

fn replace(output: &mut Output, immediately: bool, wait: Option<u32>) -> Result<(), CommandError> {
    let options = json!(AuthorityReplacement { immediately });
    let began = Instant::now();
    let mut is_waiting = false;
    loop {
        if is_waiting {
            thread::sleep(Duration::from_secs(1));
            // Without a next authority, the request below would make another one.
            let reply = output.api.request(Method::GET, "/agent-ca")?;
            let view: AgentCaView = reply.parse()?;
            if view.with_role(AuthorityRole::Next).is_none() {
                let note = "another command has decided about the next authority";
                command::note("gw-gateway", format_args!("{note}"));
                output.tell(&reply, |view: AgentCaView, out| write_facts(&view, out))?;
                let issues = view.with_role(AuthorityRole::Earlier);
                return issues.map(drop).ok_or(CommandError::Overtaken);
            }
        }
        let posted = output
            .api
            .request_with(Method::POST, "/agent-ca/replace", &options);
        let is_left = wait.is_some_and(|seconds| began.elapsed().as_secs() < seconds.into());
        if is_waiting && is_left && matches!(posted, Err(ApiError::Refused(_))) {
            // Another command may have decided between the two requests.
            continue;
        }
        let reply = posted?;
        let waits_for = reply.parse::<AgentCaView>()?.waits_for_nodes;
        let wait = wait.filter(|_| !waits_for.is_empty());
        if wait.is_some() && is_left {
            is_waiting = true;
            continue;
        }
        output.tell(&reply, |view: AgentCaView, out| write_facts(&view, out))?;
        return wait.map_or(Ok(()), |_| Err(CommandError::NodesLeft(joined(&waits_for))));
    }
}

impl Shown for AgentCaView {
    fn facts(&self) -> Vec<(&'static str, String)> {
        let of_authority = |authority: &AuthorityView| {
            let label = match authority.role {
                AuthorityRole::Next => "next",
                AuthorityRole::Issuing => "issuing",
                AuthorityRole::Earlier => "earlier",
                AuthorityRole::Ended => "ended",
            };
            let until = authority.not_after.as_deref().unwrap_or("?");
            (label, format!("{}, expires {until}", authority.id))
        };
        let mut facts: Vec<_> = self.authorities.iter().map(of_authority).collect();
        if !self.waits_for_nodes.is_empty() {
            facts.push(("waits for nodes", joined(&self.waits_for_nodes)));
        }
        if self.with_role(AuthorityRole::Earlier).is_some() {
            facts.push((
                "agents left",
                format!("{} of {}", self.agents_left, self.agents),
            ));
            let agents = self.left.iter().map(|left| {
                let until = left.certificate_not_after.as_deref().unwrap_or("?");
                format!("{}/{} (until {until})", left.account, left.agent_id)
            });
            if self.agents_left > 0 {
                facts.push(("left", joined(agents)));
            }
            facts.push(("tunnels left", self.tunnels_left.to_string()));
            if !self.nodes_left.is_empty() {
                facts.push(("nodes left", joined(&self.nodes_left)));
            }
        }
        if !self.missing_nodes.is_empty() {
            facts.push(("nodes that do not answer", joined(&self.missing_nodes)));
        }
        facts
    }

    fn note(&self) -> Option<&'static str> {
        if self.with_role(AuthorityRole::Next).is_some() {
            return Some(
                "Every node must trust the next authority before it issues. Run `gw-gateway \
                 agent-ca replace` again.",
            );
        }
        self.with_role(AuthorityRole::Earlier)?;
        let is_done =
            self.agents_left + self.tunnels_left + self.nodes_left.len() + self.missing_nodes.len()
                == 0;
        Some(if is_done {
            "Nothing uses the earlier authority any more. End it with `gw-gateway agent-ca finish`."
        } else {
            "Connected agents renew their certificates now, agents of the line before at their \
             usual time."
        })
    }
}
