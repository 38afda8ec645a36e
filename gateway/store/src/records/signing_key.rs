//! Keys that sign access tokens, and their parsed form.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use aws_lc_rs::digest;
use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use gw_base::clock::Timestamp;
use gw_shared::id::SigningKeyId;
use gw_shared::identity::secret::Secret;
use gw_shared::version::later_members::LaterMembers;
use jsonwebtoken::{DecodingKey, EncodingKey};
use serde::{Deserialize, Serialize};

use super::{Directory, Indexing, RecordKind};

/// A key that signs access tokens, from its `active_from` to that of the next key.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SigningKeyRecord {
    /// Thumbprint of the public key (RFC 7638): `kid` of the tokens that it signs.
    pub id: SigningKeyId,
    /// Ed25519, PKCS #8, base64url. As sensitive as the authority's key in the data folder.
    #[serde(with = "gw_shared::identity::secret::revealed")]
    pub private_key: Secret,
    /// Time of creation.
    pub created_at: Timestamp,
    /// Time from which the key signs tokens. The JWK Set has the key before.
    pub active_from: Timestamp,
    /// Members of a later version.
    #[serde(flatten)]
    pub later: LaterMembers,
}

/// The signing keys, ready for use.
#[derive(Clone, Default)]
pub struct SigningKeys {
    pub(super) keys: Arc<HashMap<SigningKeyId, SigningKey>>,
    /// Number of keys that are stored, and not used because they are not what their id says.
    refused: usize,
    jwks: Bytes,
}

impl RecordKind for SigningKeyRecord {
    type Id = SigningKeyId;
    type Index = SigningKeys;

    const HAS_SECRET: bool = true;

    fn id(&self) -> SigningKeyId {
        self.id.clone()
    }

    fn secret_mut(&mut self) -> Option<&mut Secret> {
        Some(&mut self.private_key)
    }

    fn put_into(&self, directory: &mut Directory, all: &Indexing<'_>) {
        Self::fill(&all.records.signing_keys, directory, all);
    }

    fn remove_from(_: &SigningKeyId, directory: &mut Directory, all: &Indexing<'_>) {
        Self::fill(&all.records.signing_keys, directory, all);
    }

    fn fill(all: &BTreeMap<SigningKeyId, Self>, directory: &mut Directory, _: &Indexing<'_>) {
        directory.signing_keys = SigningKeys::of(all);
    }

    #[cfg(test)]
    fn sample() -> Self {
        Self {
            id: SigningKeyId::new(&"k".repeat(43)).unwrap(),
            private_key: Secret::new("private".into()),
            created_at: Timestamp(1),
            active_from: Timestamp(2),
            later: LaterMembers::default(),
        }
    }
}

impl SigningKeys {
    fn of(records: &BTreeMap<SigningKeyId, SigningKeyRecord>) -> Self {
        let usable = |record| match SigningKey::from_record(record) {
            Ok(key) => Some(key),
            Err(reason) => {
                tracing::error!(kid = %record.id, %reason,
                    "a signing key is not used; `gw-gateway signing-key delete` removes it");
                None
            }
        };
        let keys: Vec<SigningKey> = records.values().filter_map(usable).collect();
        Self {
            refused: records.len() - keys.len(),
            jwks: key_set(&keys),
            keys: Arc::new(keys.into_iter().map(|key| (key.id.clone(), key)).collect()),
        }
    }
}

impl Directory {
    /// Returns the signing key with this id, the `kid` of a token.
    pub fn signing_key(&self, id: &str) -> Option<&SigningKey> {
        self.signing_keys.keys.get(id)
    }

    /// The latest of the keys that may sign at `now`. If none may sign yet, because the clock was
    /// set back, the earliest.
    pub fn active_signing_key(&self, now: Timestamp) -> Option<&SigningKey> {
        let order = |key: &&SigningKey| (key.active_from, key.id.clone());
        let active = self
            .signing_keys
            .keys
            .values()
            .filter(|key| key.active_from <= now)
            .max_by_key(order);
        active.or_else(|| self.signing_keys.keys.values().min_by_key(order))
    }

    /// Number of signing keys that are stored, and not used because they are not what their id
    /// says.
    pub fn refused_signing_keys(&self) -> usize {
        self.signing_keys.refused
    }

    /// The public keys as JSON of a JWK Set (RFC 7517 §5).
    pub fn jwks(&self) -> &Bytes {
        &self.signing_keys.jwks
    }
}

/// A signing key, ready for use.
pub struct SigningKey {
    /// Thumbprint of the public key (RFC 7638).
    pub id: SigningKeyId,
    /// Time from which the key signs tokens.
    pub active_from: Timestamp,
    /// Key that signs tokens with EdDSA (RFC 8037).
    pub private: EncodingKey,
    /// Key that verifies tokens.
    pub public: DecodingKey,
    /// Ed25519, 32 bytes as base64url: `x` of the JWK (RFC 8037).
    pub x: String,
}

/// Reason why the record of a signing key is not used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidSigningKey {
    /// The private key is not base64url of an Ed25519 key in PKCS #8.
    #[error("its private key is not Ed25519 in PKCS #8")]
    PrivateKey,
    /// The id is not the thumbprint of the public key.
    #[error("its id is not the thumbprint of its key")]
    Id,
}

impl SigningKey {
    /// Generates a key that signs from `active_from` on.
    pub fn generate(
        now: Timestamp,
        active_from: Timestamp,
    ) -> Result<SigningKeyRecord, aws_lc_rs::error::Unspecified> {
        Self::record_of(&Ed25519KeyPair::generate()?, now, active_from)
    }

    /// The record of a key that signs from `active_from` on.
    pub fn record_of(
        pair: &Ed25519KeyPair,
        now: Timestamp,
        active_from: Timestamp,
    ) -> Result<SigningKeyRecord, aws_lc_rs::error::Unspecified> {
        let private_key = Secret::new(URL_SAFE_NO_PAD.encode(pair.to_pkcs8v1()?));
        let id = SigningKeyId::new(&thumbprint(&x_of(pair)))
            .map_err(|_| aws_lc_rs::error::Unspecified)?;
        Ok(SigningKeyRecord {
            id,
            private_key,
            created_at: now,
            active_from,
            later: LaterMembers::default(),
        })
    }

    /// Parses a record. The public key is derived from the private key, and its thumbprint must be
    /// the id of the record: a record cannot make tokens of another key valid.
    pub fn from_record(record: &SigningKeyRecord) -> Result<Self, InvalidSigningKey> {
        let private = URL_SAFE_NO_PAD.decode(record.private_key.reveal());
        let private = private.map_err(|_| InvalidSigningKey::PrivateKey)?;
        let pair =
            Ed25519KeyPair::from_pkcs8(&private).map_err(|_| InvalidSigningKey::PrivateKey)?;
        let x = x_of(&pair);
        if record.id.as_str() != thumbprint(&x) {
            return Err(InvalidSigningKey::Id);
        }
        Ok(Self {
            id: record.id.clone(),
            active_from: record.active_from,
            private: EncodingKey::from_ed_der(&private),
            public: DecodingKey::from_ed_components(&x)
                .map_err(|_| InvalidSigningKey::PrivateKey)?,
            x,
        })
    }
}

fn x_of(pair: &Ed25519KeyPair) -> String {
    URL_SAFE_NO_PAD.encode(pair.public_key())
}

/// The thumbprint of a JWK (RFC 7638 §3): members in lexicographic order, no spaces.
fn thumbprint(x: &str) -> String {
    let canonical = format!(r#"{{"crv":"Ed25519","kty":"OKP","x":"{x}"}}"#);
    URL_SAFE_NO_PAD.encode(digest::digest(&digest::SHA256, canonical.as_bytes()))
}

/// The public keys as a JWK Set (RFC 7517 §5).
fn key_set(keys: &[SigningKey]) -> Bytes {
    let keys: Vec<_> = keys
        .iter()
        .map(|key| {
            serde_json::json!({
                "kty": "OKP",
                "crv": "Ed25519",
                "x": key.x,
                "kid": key.id,
                "use": "sig",
                "alg": "EdDSA",
            })
        })
        .collect();
    serde_json::json!({ "keys": keys }).to_string().into()
}

#[cfg(test)]
mod tests {
    use gw_base::service::hostname::Region;

    use super::super::{Records, StoredRecord};
    use super::*;

    #[test]
    fn a_record_is_used_only_under_the_thumbprint_of_its_private_key() {
        let [own, other] =
            [1, 2].map(|at| SigningKey::generate(Timestamp(0), Timestamp(at)).unwrap());
        let key = SigningKey::from_record(&own).unwrap();
        assert_eq!((&key.id, key.active_from), (&own.id, Timestamp(1)));
        let refused = |record| SigningKey::from_record(&record).err().unwrap();
        let swapped = SigningKeyRecord {
            private_key: other.private_key.clone(),
            ..own.clone()
        };
        assert_eq!(refused(swapped), InvalidSigningKey::Id);
        assert_eq!(
            refused(SigningKeyRecord {
                id: other.id,
                ..own.clone()
            }),
            InvalidSigningKey::Id
        );
        for text in ["not base64url!", "AAAA", ""] {
            let broken = SigningKeyRecord {
                private_key: Secret::new(text.into()),
                ..own.clone()
            };
            assert_eq!(refused(broken), InvalidSigningKey::PrivateKey);
        }
    }

    #[test]
    fn a_public_key_in_a_record_of_an_earlier_version_is_ignored() {
        let own = SigningKey::generate(Timestamp(0), Timestamp(0)).unwrap();
        let mut document = serde_json::to_value(&own).unwrap();
        document["public_key"] = "AAAA".into();
        let read: SigningKeyRecord = serde_json::from_value(document).unwrap();
        assert_eq!(
            SigningKey::from_record(&read).unwrap().x,
            SigningKey::from_record(&own).unwrap().x
        );
    }

    #[test]
    fn a_signing_key_that_is_not_what_its_id_says_is_neither_used_nor_published() {
        let [good, bad] =
            [(); 2].map(|()| SigningKey::generate(Timestamp(1), Timestamp(1)).unwrap());
        let swapped = SigningKeyRecord {
            private_key: good.private_key.clone(),
            ..bad
        };
        let records = Records::from_iter([good.clone(), swapped].map(StoredRecord::SigningKey));
        let directory = Directory::new(&records, &Region::new("eu1", "example.com"), 1);
        assert_eq!(
            directory.signing_keys.keys.keys().collect::<Vec<_>>(),
            [&good.id]
        );
        assert_eq!(directory.refused_signing_keys(), 1);
        let published: serde_json::Value = serde_json::from_slice(directory.jwks()).unwrap();
        assert_eq!(published["keys"].as_array().unwrap().len(), 1);
        assert_eq!(published["keys"][0]["kid"], good.id.as_str());
    }
}
