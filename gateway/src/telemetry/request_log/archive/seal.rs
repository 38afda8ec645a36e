//! Encryption of objects with keys derived from the region key (AES-256-GCM).
//!
//! Each object has a key of its own, derived from its name: a single key would be used for more messages than random
//! nonces allow (NIST SP 800-38D §8.3). An object, or a body within it, therefore opens under its own name only.

use aws_lc_rs::aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey};
use aws_lc_rs::hmac;

use super::ArchiveError;
use crate::region::RegionKey;

/// Name of the key that the keys of objects are derived from.
const PURPOSE: &str = "gw archive 1";
/// First byte of a sealed part. Another format has another number.
const VERSION: u8 = 1;
const TAG_LEN: usize = 16;
/// Bytes that sealing adds.
pub(super) const OVERHEAD: usize = 1 + NONCE_LEN + TAG_LEN;

/// Key of all objects.
pub(super) struct Sealing(hmac::Key);

/// Key of one object.
pub(super) struct ObjectKey {
    key: RandomizedNonceKey,
    name: String,
}

impl Sealing {
    pub(super) fn new(key: &RegionKey) -> Self {
        Self(key.derive(PURPOSE))
    }

    /// Key of the object with the whole name `name`.
    pub(super) fn object(&self, name: &str) -> Result<ObjectKey, ArchiveError> {
        let derived = hmac::sign(&self.0, name.as_bytes());
        let key = RandomizedNonceKey::new(&AES_256_GCM, derived.as_ref());
        let key = key.map_err(|_| ArchiveError::Seal(name.to_owned()))?;
        Ok(ObjectKey { key, name: name.to_owned() })
    }
}

impl ObjectKey {
    /// Appends the sealed `part` to `out`. `offset` is the position of the part in the object.
    pub(super) fn seal(&self, offset: u64, mut part: Vec<u8>, out: &mut Vec<u8>) -> Result<(), ArchiveError> {
        let nonce = self.key.seal_in_place_append_tag(Aad::from(offset.to_be_bytes()), &mut part);
        let nonce = nonce.map_err(|_| ArchiveError::Seal(self.name.clone()))?;
        out.push(VERSION);
        out.extend_from_slice(nonce.as_ref());
        out.extend_from_slice(&part);
        Ok(())
    }

    /// Opens the part at `offset`.
    pub(super) fn open(&self, offset: u64, mut sealed: Vec<u8>) -> Result<Vec<u8>, ArchiveError> {
        let refused = || ArchiveError::Refused(self.name.clone());
        let Some((&mut VERSION, rest)) = sealed.split_first_mut() else { return Err(refused()) };
        let (nonce, ciphertext) = rest.split_at_mut_checked(NONCE_LEN).ok_or_else(refused)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| refused())?;
        let opened = self.key.open_in_place(nonce, Aad::from(offset.to_be_bytes()), ciphertext);
        let length = opened.map_err(|_| refused())?.len();
        sealed.drain(..1 + NONCE_LEN);
        sealed.truncate(length);
        Ok(sealed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_opens_under_its_name_offset_and_key_only() {
        let sealing = |byte| Sealing::new(&RegionKey::new([byte; 32]));
        let mut sealed = Vec::new();
        sealing(1).object("a").unwrap().seal(7, b"content".to_vec(), &mut sealed).unwrap();
        assert_eq!(sealed.len(), b"content".len() + OVERHEAD);
        let open = |byte, name: &str, offset, sealed: &[u8]| {
            sealing(byte).object(name).unwrap().open(offset, sealed.to_vec()).map_err(|error| error.to_string())
        };
        assert_eq!(open(1, "a", 7, &sealed).unwrap(), b"content");
        let refused = open(1, "b", 7, &sealed).unwrap_err();
        assert!(refused.contains("archive: b: does not open with the region key"), "{refused}");
        assert!(open(1, "a", 8, &sealed).is_err() && open(2, "a", 7, &sealed).is_err());
        for at in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            assert!(open(1, "a", 7, &changed).is_err(), "byte {at}");
            assert!(open(1, "a", 7, &sealed[..at]).is_err(), "{at} bytes");
        }
    }
}
