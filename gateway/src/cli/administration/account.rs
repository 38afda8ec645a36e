//! `gw-gateway account`

use std::io::{self, BufRead, Write};

use clap::Subcommand;
use gw_control_plane::control::{AccountChanges, AccountContents, AccountView, NewAccount};
use gw_shared::id::AccountId;
use gw_shared::text::escaped;
use gw_store::DomainsMax;
use http::Method;

use crate::cli::client::output::{CommandError, Listed, Output, Shown, or_dash, yes_or_no};

#[derive(Subcommand)]
pub(crate) enum AccountCommand {
    /// Create an account.
    Create {
        account: AccountId,
        /// Whether the account's plan includes capture of bodies in the request log.
        #[arg(long, value_name = "true|false")]
        capture_allowed: Option<bool>,
        /// Own domains that the account may have; 100 for a new account.
        #[arg(long, value_name = "NUMBER")]
        domains_max: Option<DomainsMax>,
    },
    /// List all accounts.
    List,
    /// Show an account.
    Show { account: AccountId },
    /// Change an account. Omitted settings stay unchanged.
    Change {
        account: AccountId,
        /// Whether the account's plan includes capture of bodies in the request log.
        #[arg(long, value_name = "true|false")]
        capture_allowed: Option<bool>,
        /// Own domains that the account may have; 100 for a new account.
        #[arg(long, value_name = "NUMBER")]
        domains_max: Option<DomainsMax>,
    },
    /// Delete an account: one without services, credentials, service keys and agents, or with all
    /// of them.
    Delete {
        account: AccountId,
        /// Also delete all records of the account, in the same change. Lists them and asks for
        /// confirmation.
        #[arg(long)]
        cascade: bool,
        /// Do not ask.
        #[arg(long, requires = "cascade")]
        yes: bool,
    },
}

impl AccountCommand {
    pub(crate) fn run(self, output: &mut Output) -> Result<(), CommandError> {
        match self {
            Self::Create {
                account,
                capture_allowed,
                domains_max,
            } => output.create::<AccountView>(
                "/accounts",
                &NewAccount {
                    id: account.to_string(),
                    capture_allowed,
                    domains_max,
                    managed_by: None,
                },
            ),
            Self::List => output.list::<AccountView>("/accounts", &[], None),
            Self::Show { account } => output.show::<AccountView>(&format!("/accounts/{account}")),
            Self::Change {
                account,
                capture_allowed,
                domains_max,
            } => output.change::<AccountView>(
                &format!("/accounts/{account}"),
                &AccountChanges {
                    capture_allowed,
                    domains_max,
                    managed_by: None,
                },
            ),
            Self::Delete {
                account,
                cascade: false,
                ..
            } => output.delete(&format!("/accounts/{account}")),
            Self::Delete { account, yes, .. } => delete_all(output, &account, yes),
        }
    }
}

/// Shows what an account has, asks, and deletes all of it.
fn delete_all(output: &mut Output, account: &AccountId, yes: bool) -> Result<(), CommandError> {
    let path = format!("/accounts/{account}");
    if !yes {
        let reply = output
            .api
            .request(Method::GET, &format!("{path}/contents"))?;
        let contents: AccountContents = reply.parse()?;
        // Not on standard output, which a script may read.
        let mut out = io::stderr().lock();
        write_contents(&mut out, account, &contents)?;
        write!(out, "Type {account} to delete all of it: ")?;
        out.flush()?;
        let mut typed = String::new();
        io::stdin().lock().read_line(&mut typed)?;
        if typed.trim() != account.as_str() {
            return Err(CommandError::NotConfirmed(account.to_string()));
        }
    }
    output.delete(&format!("{path}?cascade=true"))
}

fn write_contents(
    out: &mut impl Write,
    account: &AccountId,
    contents: &AccountContents,
) -> io::Result<()> {
    writeln!(out, "Account {account} and with it:")?;
    for (kind, records) in contents.kinds() {
        if records.count == 0 {
            continue;
        }
        writeln!(out, "  {} {kind}", records.count)?;
        for name in &records.names {
            writeln!(out, "    {}", escaped(name))?;
        }
        if records.count > records.names.len() {
            writeln!(
                out,
                "    … and {} more",
                records.count - records.names.len()
            )?;
        }
    }
    Ok(())
}

impl Shown for AccountView {
    fn facts(&self) -> Vec<(&'static str, String)> {
        vec![
            ("account", self.id.to_string()),
            ("capture allowed", yes_or_no(self.capture_allowed)),
            ("managed by", or_dash(self.managed_by.as_ref())),
            ("created", self.created_at.clone()),
            ("domains max", self.domains_max.to_string()),
        ]
    }
}

impl Listed for AccountView {
    const PLURAL: &'static str = "accounts";
    const COLUMNS: usize = 4;
}
