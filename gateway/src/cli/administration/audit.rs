//! `gw-gateway audit …`

use std::io::Write;

use clap::Subcommand;
use gw_control_plane::control::{AuditEntryView, AuditVerificationView};
use gw_shared::id::AccountId;
use gw_shared::text::escaped;
use gw_store::AuditHead;
use http::Method;

use crate::cli::client::output::{
    CommandError, Listed, Output, Shown, or_dash, write_facts, yes_or_no,
};

#[derive(Subcommand)]
pub(crate) enum AuditCommand {
    /// List all changes, the newest first.
    List {
        /// Only entries of this account.
        #[arg(long)]
        account: Option<AccountId>,
        /// Most entries to print.
        #[arg(
            long,
            value_name = "N",
            default_value_t = 100,
            value_parser = clap::value_parser!(u32).range(1..),
        )]
        limit: u32,
    },
    /// Check that no entry was changed, added or removed. Exit code 1 if one was.
    Verify {
        /// A head that was noted before, NUMBER:HASH: the log has to contain this entry. Can be
        /// given several times.
        #[arg(long, value_name = "HEAD")]
        head: Vec<AuditHead>,
    },
}

impl AuditCommand {
    pub(crate) fn run(self, output: &mut Output) -> Result<(), CommandError> {
        match self {
            Self::List { account, limit } => {
                let account = account
                    .as_ref()
                    .map(|account| ("account", account.as_str()));
                let limit = usize::try_from(limit).unwrap_or(usize::MAX);
                output.list::<AuditEntryView>("/audit-log", account.as_slice(), Some(limit))
            }
            Self::Verify { head } => verify(output, &head),
        }
    }
}

fn verify(output: &mut Output, noted: &[AuditHead]) -> Result<(), CommandError> {
    let heads: Vec<String> = noted.iter().map(AuditHead::to_string).collect();
    let query = match heads.as_slice() {
        [] => String::new(),
        heads => format!("?heads={}", heads.join(",")),
    };
    let path = format!("/audit-log/verification{query}");
    // A long log takes longer than other requests.
    let reply = output.api.wait_for(Method::GET, &path, None)?;
    let found: AuditVerificationView = reply.parse()?;
    output.tell(&reply, |view: AuditVerificationView, out| {
        write_facts(&view, out)?;
        for problem in &view.problems {
            writeln!(
                out,
                "entry {}: {}",
                problem.number,
                escaped(&problem.problem)
            )?;
        }
        Ok(())
    })?;
    if let Some(error) = found.archive_error {
        return Err(CommandError::NotCompared(error));
    }
    if found.valid {
        Ok(())
    } else {
        Err(CommandError::Tampered(found.problem_count))
    }
}

impl Shown for AuditVerificationView {
    fn facts(&self) -> Vec<(&'static str, String)> {
        vec![
            ("valid", yes_or_no(self.valid)),
            ("entries", self.entries.to_string()),
            ("head", or_dash(self.head.as_ref())),
            ("compared heads", self.compared_heads.to_string()),
            ("problems", self.problem_count.to_string()),
        ]
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
