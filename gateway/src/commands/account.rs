//! `gw-gateway account`

use clap::Subcommand;
use gw_gateway::control::{AccountView, NewAccount};
use gw_shared::id::AccountId;

use super::console::{CommandError, Console, Listed, Shown};

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Make an account.
    Create { account: AccountId },
    /// List all accounts.
    List,
    /// Show an account.
    Show { account: AccountId },
    /// Delete an account that has nothing left in it.
    Delete { account: AccountId },
}

impl Command {
    pub(crate) fn run(self, console: &mut Console) -> Result<(), CommandError> {
        match self {
            Self::Create { account } => {
                console.create::<AccountView>("/accounts", &NewAccount { id: account.to_string() })
            }
            Self::List => console.list::<AccountView>("/accounts", &[], None),
            Self::Show { account } => console.show::<AccountView>(&format!("/accounts/{account}")),
            Self::Delete { account } => console.delete(&format!("/accounts/{account}")),
        }
    }
}

impl Shown for AccountView {
    fn facts(&self) -> Vec<(&'static str, String)> {
        vec![("account", self.id.to_string()), ("created", self.created_at.clone())]
    }
}

impl Listed for AccountView {
    const PLURAL: &'static str = "accounts";
    const COLUMNS: usize = 2;
}
