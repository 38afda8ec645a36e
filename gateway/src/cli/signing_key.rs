//! `gw-gateway signing-key`

use clap::Subcommand;
use gw_gateway::control::{Rotation, SigningKeyView};
use gw_shared::id::SigningKeyId;
use serde_json::json;

use super::output::{CommandError, Listed, Output, Shown, word};

#[derive(Subcommand)]
pub(crate) enum Command {
    /// List the keys: the next, the active, and the retired whose tokens are still good.
    List,
    /// Make the key that follows the active one. It signs once every verifier can know it.
    Rotate {
        /// Sign with it now, although verifiers may not know it yet: for when the active key is in the wrong hands.
        #[arg(long)]
        immediately: bool,
    },
    /// Withdraw a key that signs no more. The tokens it signed are refused from then on.
    Delete { kid: SigningKeyId },
}

impl Command {
    pub(crate) fn run(self, output: &mut Output) -> Result<(), CommandError> {
        match self {
            Self::List => output.list::<SigningKeyView>("/signing-keys", &[], None),
            Self::Rotate { immediately } => {
                output.act::<SigningKeyView>("/signing-keys/rotate", Some(&json!(Rotation { immediately })))
            }
            Self::Delete { kid } => output.delete(&format!("/signing-keys/{kid}")),
        }
    }
}

impl Shown for SigningKeyView {
    fn facts(&self) -> Vec<(&'static str, String)> {
        vec![
            ("kid", self.kid.to_string()),
            ("status", word(self.status)),
            ("active from", self.active_from.clone()),
            ("created", self.created_at.clone()),
        ]
    }
}

impl Listed for SigningKeyView {
    const PLURAL: &'static str = "signing keys";
    const COLUMNS: usize = 4;
}
