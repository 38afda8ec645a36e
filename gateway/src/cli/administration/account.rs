//! `gw-gateway account`

use clap::Subcommand;
use gw_control_plane::control::{AccountChanges, AccountView, NewAccount};
use gw_shared::id::AccountId;

use crate::cli::client::output::{CommandError, Listed, Output, Shown, yes_or_no};

#[derive(Subcommand)]
pub(crate) enum AccountCommand {
    /// Create an account.
    Create {
        account: AccountId,
        /// Whether the account's plan includes capture of bodies in the request log.
        #[arg(long, value_name = "true|false")]
        capture_allowed: Option<bool>,
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
    },
    /// Delete an account without services, credentials, service keys and agents.
    Delete { account: AccountId },
}

impl AccountCommand {
    pub(crate) fn run(self, output: &mut Output) -> Result<(), CommandError> {
        match self {
            Self::Create {
                account,
                capture_allowed,
            } => output.create::<AccountView>(
                "/accounts",
                &NewAccount {
                    id: account.to_string(),
                    capture_allowed,
                },
            ),
            Self::List => output.list::<AccountView>("/accounts", &[], None),
            Self::Show { account } => output.show::<AccountView>(&format!("/accounts/{account}")),
            Self::Change {
                account,
                capture_allowed,
            } => output.change::<AccountView>(
                &format!("/accounts/{account}"),
                &AccountChanges { capture_allowed },
            ),
            Self::Delete { account } => output.delete(&format!("/accounts/{account}")),
        }
    }
}

impl Shown for AccountView {
    fn facts(&self) -> Vec<(&'static str, String)> {
        vec![
            ("account", self.id.to_string()),
            ("capture allowed", yes_or_no(self.capture_allowed)),
            ("created", self.created_at.clone()),
        ]
    }
}

impl Listed for AccountView {
    const PLURAL: &'static str = "accounts";
    const COLUMNS: usize = 3;
}
