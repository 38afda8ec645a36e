//! `gw-gateway signing-key`

use clap::Subcommand;
use gw_control_plane::control::{Rotation, SigningKeyView};
use gw_shared::id::SigningKeyId;
use serde_json::json;

use crate::cli::client::output::{CommandError, Listed, Output, Shown, word};

#[derive(Subcommand)]
pub(crate) enum SigningKeyCommand {
    /// List the published keys: the next key, the active key, and retired keys whose tokens are
    /// still valid.
    List,
    /// Create the key that follows the active one. It signs once every verifier can know it.
    Rotate {
        /// Sign with a new key at once, although verifiers may not know it yet, and delete the key
        /// that waits. For stolen keys; delete the others afterwards.
        #[arg(long)]
        immediately: bool,
    },
    /// Withdraw a key that no longer signs. Tokens signed by it are refused from then on.
    Delete {
        /// Identifier as `list` prints it. It may begin with `-`.
        #[arg(allow_hyphen_values = true)]
        kid: SigningKeyId,
    },
}

impl SigningKeyCommand {
    pub(crate) fn run(self, output: &mut Output) -> Result<(), CommandError> {
        match self {
            Self::List => output.list::<SigningKeyView>("/signing-keys", &[], None),
            Self::Rotate { immediately } => output.act::<SigningKeyView>(
                "/signing-keys/rotate",
                Some(&json!(Rotation { immediately })),
            ),
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
