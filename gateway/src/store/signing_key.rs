//! Keys that sign access tokens, parsed from their records.

use aws_lc_rs::digest;
use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use gw_shared::id::SigningKeyId;
use gw_shared::identity::secret::Secret;
use jsonwebtoken::{DecodingKey, EncodingKey};

use super::SigningKeyRecord;
use crate::clock::Timestamp;

/// A signing key, ready for use.
pub struct SigningKey {
    pub id: SigningKeyId,
    pub active_from: Timestamp,
    pub(crate) private: EncodingKey,
    pub(crate) public: DecodingKey,
}

impl SigningKey {
    /// Generates a key that signs from `active_from` on.
    pub fn generate(now: Timestamp, active_from: Timestamp) -> Result<SigningKeyRecord, aws_lc_rs::error::Unspecified> {
        let pair = Ed25519KeyPair::generate()?;
        let public_key = URL_SAFE_NO_PAD.encode(pair.public_key());
        let private_key = Secret::new(URL_SAFE_NO_PAD.encode(pair.to_pkcs8v1()?));
        // The thumbprint of the JWK (RFC 7638 §3): members in lexicographic order, no spaces.
        let canonical = format!(r#"{{"crv":"Ed25519","kty":"OKP","x":"{public_key}"}}"#);
        let thumbprint = URL_SAFE_NO_PAD.encode(digest::digest(&digest::SHA256, canonical.as_bytes()));
        let id = SigningKeyId::new(&thumbprint).map_err(|_| aws_lc_rs::error::Unspecified)?;
        Ok(SigningKeyRecord { id, private_key, public_key, created_at: now, active_from })
    }

    /// Parses a record; `None` if it does not hold a valid key, which then neither signs nor verifies.
    pub(crate) fn from_record(record: &SigningKeyRecord) -> Option<Self> {
        let private = URL_SAFE_NO_PAD.decode(record.private_key.reveal()).ok()?;
        Some(Self {
            id: record.id.clone(),
            active_from: record.active_from,
            private: EncodingKey::from_ed_der(&private),
            public: DecodingKey::from_ed_components(&record.public_key).ok()?,
        })
    }
}

/// The public keys as a JWK Set (RFC 7517 §5).
pub(super) fn key_set<'a>(keys: impl Iterator<Item = &'a SigningKeyRecord>) -> Bytes {
    let keys: Vec<_> = keys
        .map(|key| {
            serde_json::json!({
                "kty": "OKP", "crv": "Ed25519", "x": key.public_key, "kid": key.id, "use": "sig", "alg": "EdDSA",
            })
        })
        .collect();
    serde_json::json!({ "keys": keys }).to_string().into()
}
