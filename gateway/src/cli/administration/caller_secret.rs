//! `gw-gateway credential` and `gw-gateway key`: the same commands for both kinds of caller secret.

use std::str::FromStr;

use clap::Subcommand;
use gw_control_plane::control::{
    CallerSecretChanges, CredentialView, NewCallerSecret, NewCredentialView, NewServiceKeyView,
    SecretKind, ServiceKeyView,
};
use gw_shared::id::{AccountId, ClientId, InvalidId, KeyId, ServiceId};

use crate::cli::client::output::{CommandError, Listed, Output, Shown, joined, or_dash, yes_or_no};
use crate::cli::{Switch, new_list, texts};

/// A kind of caller secret with its commands.
pub(crate) trait SecretCollection:
    SecretKind<View: Listed, NewView: Shown> + FromStr<Err = InvalidId> + Send + Sync + 'static
{
    /// Path segment in the API, below the account.
    const COLLECTION: &'static str;
}

impl SecretCollection for ClientId {
    const COLLECTION: &'static str = "credentials";
}

impl SecretCollection for KeyId {
    const COLLECTION: &'static str = "service-keys";
}

#[derive(Subcommand)]
pub(crate) enum CallerSecretCommand<K: SecretCollection> {
    /// Create one. Its secret is shown only this once.
    Create {
        account: AccountId,
        /// A service that it gives access to; repeat for each.
        #[arg(
            long = "service",
            value_name = "SERVICE",
            value_delimiter = ',',
            required = true
        )]
        services: Vec<ServiceId>,
        /// Display name. Creating the same name again changes nothing.
        #[arg(long)]
        name: Option<String>,
        #[command(flatten)]
        switch: Switch,
    },
    /// List all of an account.
    List { account: AccountId },
    /// Show one.
    Show { account: AccountId, id: K },
    /// Change one. Omitted settings stay unchanged.
    Change {
        account: AccountId,
        id: K,
        /// A service that it gives access to; repeat for each. Replaces the previous list.
        #[arg(long = "service", value_name = "SERVICE", value_delimiter = ',')]
        services: Vec<ServiceId>,
        /// Display name.
        #[arg(long)]
        name: Option<String>,
        #[command(flatten)]
        switch: Switch,
    },
    /// Replace the secret; the new one is shown only this once. The old one is refused from then
    /// on.
    RotateSecret { account: AccountId, id: K },
    /// Delete one. Its secret is refused from then on.
    Delete { account: AccountId, id: K },
}

impl<K: SecretCollection> CallerSecretCommand<K> {
    pub(crate) fn run(self, output: &mut Output) -> Result<(), CommandError> {
        let collection = |account: &AccountId| format!("/accounts/{account}/{}", K::COLLECTION);
        let item = |account: &AccountId, id: &K| format!("{}/{id}", collection(account));
        match self {
            Self::Create {
                account,
                services,
                name,
                switch,
            } => {
                let new = NewCallerSecret {
                    name,
                    allowed_services: texts(&services),
                    enabled: switch.enabled(),
                    managed_by: None,
                };
                output.create::<K::NewView>(&collection(&account), &new)
            }
            Self::List { account } => output.list::<K::View>(&collection(&account), &[], None),
            Self::Show { account, id } => output.show::<K::View>(&item(&account, &id)),
            Self::Change {
                account,
                id,
                services,
                name,
                switch,
            } => {
                let allowed_services = new_list(texts(&services));
                let changes = CallerSecretChanges {
                    name,
                    allowed_services,
                    enabled: switch.enabled(),
                    managed_by: None,
                };
                output.change::<K::View>(&item(&account, &id), &changes)
            }
            Self::RotateSecret { account, id } => {
                output.act::<K::NewView>(&format!("{}/rotate-secret", item(&account, &id)), None)
            }
            Self::Delete { account, id } => output.delete(&item(&account, &id)),
        }
    }
}

impl Shown for CredentialView {
    fn facts(&self) -> Vec<(&'static str, String)> {
        vec![
            ("client id", self.client_id.to_string()),
            ("name", or_dash(self.name.as_ref())),
            ("services", joined(&self.allowed_services)),
            ("enabled", yes_or_no(self.enabled)),
            ("managed by", or_dash(self.managed_by.as_ref())),
            ("created", self.created_at.clone()),
        ]
    }
}

impl Listed for CredentialView {
    const PLURAL: &'static str = "credentials";
    const COLUMNS: usize = 6;
}

impl Shown for ServiceKeyView {
    fn facts(&self) -> Vec<(&'static str, String)> {
        vec![
            ("key id", self.key_id.to_string()),
            ("name", or_dash(self.name.as_ref())),
            ("services", joined(&self.allowed_services)),
            ("enabled", yes_or_no(self.enabled)),
            ("managed by", or_dash(self.managed_by.as_ref())),
            ("created", self.created_at.clone()),
        ]
    }
}

impl Listed for ServiceKeyView {
    const PLURAL: &'static str = "service keys";
    const COLUMNS: usize = 6;
}

impl Shown for NewCredentialView {
    fn facts(&self) -> Vec<(&'static str, String)> {
        let secret = self
            .client_secret
            .clone()
            .map(|secret| ("client secret", secret));
        self.credential.facts().into_iter().chain(secret).collect()
    }

    fn note(&self) -> Option<&'static str> {
        Some(secret_note(self.client_secret.as_ref()))
    }
}

impl Shown for NewServiceKeyView {
    fn facts(&self) -> Vec<(&'static str, String)> {
        let secret = self
            .service_key
            .clone()
            .map(|secret| ("service key", secret));
        self.key.facts().into_iter().chain(secret).collect()
    }

    fn note(&self) -> Option<&'static str> {
        Some(secret_note(self.service_key.as_ref()))
    }
}

fn secret_note(secret: Option<&String>) -> &'static str {
    match secret {
        Some(_) => "The secret is shown only this once. Store it now.",
        None => "The secret was shown only when it was created. Use rotate-secret to replace it.",
    }
}
