//! Secrets: values that print nothing, are wiped when dropped and compared in constant time.

use std::fmt;

use aws_lc_rs::{constant_time, digest};
use zeroize::Zeroizing;

/// A secret in clear, for as long as it takes to hand it over or hash it.
#[derive(Clone)]
pub struct Secret(Zeroizing<String>);

impl Secret {
    pub fn new(clear: String) -> Self {
        Self(Zeroizing::new(clear))
    }

    /// The secret itself. The one way to it: search for this name to see who looks.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}

/// SHA-256 of a secret of 256 random bits: all that is stored of it. Without low-entropy input there is nothing for a
/// slow hash to protect.
#[derive(Clone, PartialEq, Eq)]
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

    /// Whether `candidate` is the secret, in time that depends on its length only.
    pub fn matches(&self, candidate: &str) -> bool {
        constant_time::verify_slices_are_equal(&self.0, &Self::of(candidate).0).is_ok()
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
    fn only_the_secret_itself_matches_and_nothing_prints_it() {
        let hash = SecretHash::of("s3cret");
        assert!(hash.matches("s3cret"));
        assert!(!hash.matches("s3creT") && !hash.matches("") && !hash.matches("s3cret "));
        assert_eq!(SecretHash::from_bytes(hash.as_bytes()), Some(hash.clone()));
        assert_eq!(format!("{:?} {hash:?}", Secret::new("s3cret".into())), "[secret] [hash]");
    }
}
