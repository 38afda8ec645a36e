//! `gw-gateway enrollment-token`

use std::io::Write;

use clap::{Subcommand, value_parser};
use gw_gateway::control::{EnrollmentTokenView, NewEnrollmentToken, NewEnrollmentTokenView};
use gw_gateway::store::Approval;
use gw_shared::id::{AccountId, EnrollmentTokenId, ServiceId};
use http::Method;
use serde_json::json;

use super::output::{CommandError, Listed, Output, Shown, joined, or_dash, word, write_facts};
use super::texts;

#[derive(Subcommand)]
pub(crate) enum EnrollmentTokenCommand {
    /// Create a token, and print the command that enrolls an agent with it.
    Create {
        account: AccountId,
        /// A service that the agent will serve; repeat for each.
        #[arg(long = "service", value_name = "SERVICE", required = true)]
        services: Vec<ServiceId>,
        /// Whether the agent is approved automatically, or waits for `agent approve`.
        #[arg(long, value_enum, default_value = "auto")]
        approval: Approval,
        /// Lifetime of the token; 600 by default, which is also the maximum.
        #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..=600))]
        expires_in_seconds: Option<u64>,
        /// URL by which the agent reaches the gateway; by default the apex of the region with the port of the gateway.
        #[arg(long, value_name = "URL")]
        gateway_url: Option<String>,
    },
    /// List the tokens of an account, without their secrets.
    List { account: AccountId },
    /// Show a token, without its secret.
    Show { account: AccountId, id: EnrollmentTokenId },
    /// Withdraw a token. An agent that used it stays enrolled.
    Delete { account: AccountId, id: EnrollmentTokenId },
}

impl EnrollmentTokenCommand {
    pub(crate) fn run(self, output: &mut Output) -> Result<(), CommandError> {
        match self {
            Self::Create { account, services, approval, expires_in_seconds, gateway_url } => {
                let new = NewEnrollmentToken { services: texts(&services), approval, expires_in_seconds };
                let path = format!("/accounts/{account}/enrollment-tokens");
                let reply = output.api.request_with(Method::POST, &path, &json!(new))?;
                output.tell(&reply, |mut created: NewEnrollmentTokenView, out| {
                    if let Some(gateway_url) = gateway_url {
                        created.gateway_url = gateway_url;
                    }
                    writeln!(out, "Created:")?;
                    write_facts(&created.enrollment_token, out)?;
                    writeln!(out, "The token is shown only this once, and works once. Run on the agent's machine:\n")?;
                    writeln!(out, "{}", created.command())
                })
            }
            Self::List { account } => {
                output.list::<EnrollmentTokenView>(&format!("/accounts/{account}/enrollment-tokens"), &[], None)
            }
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
            ("used by", or_dash(self.used_by.as_ref())),
            ("created", self.created_at.clone()),
        ]
    }
}

impl Listed for EnrollmentTokenView {
    const PLURAL: &'static str = "enrollment tokens";
    const COLUMNS: usize = 5;
}
