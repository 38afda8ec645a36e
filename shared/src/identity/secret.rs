//! Secrets: their values are never printed, are wiped on drop and are compared in constant time.

use std::fmt;
use std::hash::{Hash, Hasher};

use aws_lc_rs::{constant_time, digest};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use zeroize::Zeroizing;

use crate::text::hexadecimal;

/// A secret in clear text. `Debug` does not print it.
#[derive(Clone)]
pub struct Secret(Zeroizing<String>);

impl Secret {
    pub fn new(clear: String) -> Self {
        Self(Zeroizing::new(clear))
    }

    /// The secret's text. Calls to this method are the only places that see it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

/// Parses a received secret. To write one, see [`revealed`].
impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(Self::new)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}

/// SHA-256 of a secret of 256 random bits, stored in its place. A slow hash protects only secrets
/// of low entropy.
#[derive(Clone, Eq)]
pub struct SecretHash([u8; digest::SHA256_OUTPUT_LEN]);

impl SecretHash {
    pub fn of(secret: &str) -> Self {
        let mut hash = [0; digest::SHA256_OUTPUT_LEN];
        hash.copy_from_slice(digest::digest(&digest::SHA256, secret.as_bytes()).as_ref());
        Self(hash)
    }

    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Whether `candidate` is the secret. The time depends only on the length of `candidate`.
    pub fn matches(&self, candidate: &str) -> bool {
        *self == Self::of(candidate)
    }
}

/// For the key of a map: the time of a lookup tells something about the hash, and nothing about its
/// secret.
impl Hash for SecretHash {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

/// Compares in constant time.
impl PartialEq for SecretHash {
    fn eq(&self, other: &Self) -> bool {
        constant_time::verify_slices_are_equal(&self.0, &other.0).is_ok()
    }
}

/// Writes 64 hexadecimal digits.
impl Serialize for SecretHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&hexadecimal(&self.0))
    }
}

impl<'de> Deserialize<'de> for SecretHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let digit = |at: usize| {
            text.get(at..at + 2)
                .and_then(|digits| u8::from_str_radix(digits, 16).ok())
        };
        let bytes: Option<Vec<u8>> = (0..text.len()).step_by(2).map(digit).collect();
        bytes
            .and_then(|bytes| Self::from_bytes(&bytes))
            .ok_or_else(|| serde::de::Error::custom("a hash is 64 hexadecimal digits"))
    }
}

/// Module for `#[serde(with = "…")]` that writes a [`Secret`] in clear text. Use it only for files
/// that only their owner can read.
pub mod revealed {
    use super::{Deserialize, Deserializer, Secret, Serializer};

    pub fn serialize<S: Serializer>(secret: &Secret, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(secret.reveal())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Secret, D::Error> {
        Secret::deserialize(deserializer)
    }
}

/// As [`revealed`], for a secret that may be absent.
pub mod revealed_if_present {
    use super::{Deserialize, Deserializer, Secret, Serialize, Serializer};

    pub fn serialize<S: Serializer>(
        secret: &Option<Secret>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        secret.as_ref().map(Secret::reveal).serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Secret>, D::Error> {
        Option::deserialize(deserializer)
    }
}

impl fmt::Debug for SecretHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[hash]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_secret_matches_and_debug_does_not_print_it() {
        let hash = SecretHash::of("s3cret");
        assert!(hash.matches("s3cret"));
        assert!(!hash.matches("s3creT") && !hash.matches("") && !hash.matches("s3cret "));
        assert_eq!(SecretHash::from_bytes(hash.as_bytes()), Some(hash.clone()));
        let secret = Secret::new("s3cret".into());
        assert_eq!(format!("{secret:?} {hash:?}"), "[secret] [hash]");
    }
}
