//! Proofs of control over a name, and what publishes them.

use async_trait::async_trait;
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};

use crate::error::AcmeError;

/// Kind of challenge that is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChallengeKind {
    /// A TXT record (RFC 8555 §8.4).
    Dns01,
    /// A certificate with the digest, on port 443 (RFC 8737).
    TlsAlpn01,
    /// A response in plain HTTP, on port 80 (RFC 8555 §8.3).
    Http01,
}

/// Proof of control over one name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Proof {
    /// The name, without `*.`.
    pub name: String,
    /// SHA-256 of the key authorization, base64url: the value of the TXT record. For
    /// [`ChallengeKind::Http01`] the key authorization itself: the token, a dot, and the thumbprint
    /// of the account's key (RFC 8555 §8.1).
    pub value: String,
}

impl Proof {
    /// SHA-256 of the key authorization. `None` if the value is none.
    pub fn digest(&self) -> Option<[u8; 32]> {
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(&self.value).ok()?;
        bytes.try_into().ok()
    }
}

/// Publishes proofs. Each function may be called again with the same proofs, also by another
/// process.
#[async_trait]
pub trait Publisher: Send + Sync {
    /// Kind of challenge that it answers.
    fn kind(&self) -> ChallengeKind;

    /// Publishes the proofs.
    async fn publish(&self, proofs: &[Proof]) -> Result<(), AcmeError>;

    /// Whether the authority sees all proofs. The authority looks only after this.
    async fn is_visible(&self, proofs: &[Proof]) -> Result<bool, AcmeError>;

    /// Takes the proofs back. Proofs that are not published are none of its failures.
    async fn withdraw(&self, proofs: &[Proof]) -> Result<(), AcmeError>;
}
