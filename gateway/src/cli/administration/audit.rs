//! `gw-gateway audit`

use clap::Args;
use gw_control_plane::control::AuditEntryView;
use gw_shared::id::AccountId;

use crate::cli::client::output::{CommandError, Listed, Output, Shown, or_dash};

#[derive(Args)]
pub(crate) struct AuditArguments {
    /// Only entries of this account.
    #[arg(long)]
    account: Option<AccountId>,
    /// Most entries to print.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
}

impl AuditArguments {
    pub(crate) fn run(self, output: &mut Output) -> Result<(), CommandError> {
        let account = self
            .account
            .as_ref()
            .map(|account| ("account", account.as_str()));
        let limit = usize::try_from(self.limit).unwrap_or(usize::MAX);
        output.list::<AuditEntryView>("/audit-log", account.as_slice(), Some(limit))
    }
}

impl Shown for AuditEntryView {
    fn facts(&self) -> Vec<(&'static str, String)> {
        vec![
            ("at", self.at.clone()),
            ("actor", self.actor.clone()),
            ("action", self.action.clone()),
            ("account", or_dash(self.account.as_ref())),
            ("target", self.target.clone()),
            ("detail", self.detail.to_string()),
        ]
    }
}

impl Listed for AuditEntryView {
    const PLURAL: &'static str = "entries";
    const COLUMNS: usize = 6;
}
