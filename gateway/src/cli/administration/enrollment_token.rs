//! `gw-gateway enrollment-token`

use std::io::Write;

use clap::{Subcommand, value_parser};
use gw_control_plane::control::{
    BACKEND_PORT, EnrollmentTokenView, NewEnrollmentToken, NewEnrollmentTokenView,
};
use gw_shared::id::{AccountId, EnrollmentTokenId, ServiceId};
use gw_store::Approval;
use http::Method;
use serde_json::json;

use crate::cli::client::output::{
    CommandError, Listed, Output, Shown, joined, word, write_facts, yes_or_no,
};
use crate::cli::texts;

#[derive(Subcommand)]
pub(crate) enum EnrollmentTokenCommand {
    /// Create a token, and print the command that enrolls and runs an agent with it.
    Create {
        account: AccountId,
        /// A service that the agent will serve; repeat for each.
        #[arg(
            long = "service",
            value_name = "SERVICE",
            value_delimiter = ',',
            required = true
        )]
        services: Vec<ServiceId>,
        /// Whether the agent is approved automatically, or waits for `agent approve`.
        #[arg(long, value_enum, default_value = "auto")]
        approval: Approval,
        /// Lifetime of the token, from 1 minute to 30 days: 10m (the default), 12h, 30d.
        #[arg(long, value_name = "TIME", value_parser = NewEnrollmentToken::parse_lifetime)]
        expires_in: Option<u64>,
        /// As --expires-in, in seconds.
        #[arg(
            long,
            value_name = "N",
            value_parser = value_parser!(u64).range(1..=2_592_000),
            conflicts_with = "expires_in",
        )]
        expires_in_seconds: Option<u64>,
        /// Number of agents that may enroll with the token, at most 10000; 1 by default.
        #[arg(
            long,
            value_name = "N",
            value_parser = value_parser!(u32).range(1..=i64::from(NewEnrollmentToken::USES_MAX)),
        )]
        uses: Option<u32>,
        /// Delete the agents of this token when they have had no tunnel for an hour: for agents
        /// that keep no state, such as the replicas of a Deployment.
        #[arg(long)]
        ephemeral: bool,
        /// URL by which the agent reaches the gateway; by default the apex of the region with the
        /// port of the gateway.
        #[arg(long, value_name = "URL")]
        gateway_url: Option<String>,
        /// Port of the backend in the printed command.
        #[arg(
            long,
            value_name = "PORT",
            default_value_t = BACKEND_PORT,
            value_parser = value_parser!(u16).range(1..),
        )]
        backend_port: u16,
    },
    /// List the tokens of an account, without their secrets.
    List { account: AccountId },
    /// Show a token, without its secret.
    Show {
        account: AccountId,
        id: EnrollmentTokenId,
    },
    /// Withdraw a token: no further agent enrolls with it. Agents that used it stay enrolled.
    Delete {
        account: AccountId,
        id: EnrollmentTokenId,
    },
}

impl EnrollmentTokenCommand {
    pub(crate) fn run(self, output: &mut Output) -> Result<(), CommandError> {
        match self {
            Self::Create {
                account,
                services,
                approval,
                expires_in,
                expires_in_seconds,
                uses,
                ephemeral,
                gateway_url,
                backend_port,
            } => {
                let expires_in_seconds = expires_in.or(expires_in_seconds);
                let new = NewEnrollmentToken {
                    services: texts(&services),
                    approval,
                    expires_in_seconds,
                    uses,
                    ephemeral,
                };
                let path = format!("/accounts/{account}/enrollment-tokens");
                let reply = output.api.request_with(Method::POST, &path, &json!(new))?;
                output.tell(&reply, |mut created: NewEnrollmentTokenView, out| {
                    if let Some(gateway_url) = gateway_url {
                        created.gateway.gateway_url = gateway_url;
                    }
                    writeln!(out, "Created:")?;
                    write_facts(&created.enrollment_token, out)?;
                    let uses = match created.enrollment_token.uses {
                        1 => "once".to_owned(),
                        uses => format!("for {uses} agents"),
                    };
                    writeln!(
                        out,
                        "The token is shown only this once, and works {uses}.\n\n\
                         Run beside the backend, which listens on port {backend_port}:\n"
                    )?;
                    writeln!(out, "{}", created.command(backend_port))
                })
            }
            Self::List { account } => output.list::<EnrollmentTokenView>(
                &format!("/accounts/{account}/enrollment-tokens"),
                &[],
                None,
            ),
            Self::Show { account, id } => output.show::<EnrollmentTokenView>(&path(&account, &id)),
            Self::Delete { account, id } => output.delete(&path(&account, &id)),
        }
    }
}

fn path(account: &AccountId, id: &EnrollmentTokenId) -> String {
    format!("/accounts/{account}/enrollment-tokens/{id}")
}

impl Shown for EnrollmentTokenView {
    fn facts(&self) -> Vec<(&'static str, String)> {
        vec![
            ("id", self.id.to_string()),
            ("services", joined(&self.services)),
            ("approval", word(self.approval)),
            ("expires", self.expires_at.clone()),
            ("used", format!("{} of {}", self.used, self.uses)),
            ("ephemeral", yes_or_no(self.ephemeral)),
            ("agents", joined(&self.agents)),
            ("created", self.created_at.clone()),
        ]
    }
}

impl Listed for EnrollmentTokenView {
    const PLURAL: &'static str = "enrollment tokens";
    const COLUMNS: usize = 6;
}
