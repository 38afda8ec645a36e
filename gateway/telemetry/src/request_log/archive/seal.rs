//! Encryption of objects with keys derived from the region key (AES-256-GCM).
//!
//! Each object has a key of its own, derived from its name: a single key would be used for more
//! messages than random nonces allow (NIST SP 800-38D §8.3). An object, or a body within it,
//! therefore opens under its own name only.

use aws_lc_rs::aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey};
use aws_lc_rs::hmac;
use gw_region::{DerivedKeys, RegionKey, RegionKeys};

use super::ArchiveError;

/// Name of the key that the keys of objects are derived from.
const PURPOSE: &str = "gw archive 1";
/// First byte of a sealed part. Another format has another number.
const VERSION: u8 = 1;
const TAG_LEN: usize = 16;
/// Bytes that sealing adds.
pub(super) const OVERHEAD: usize = 1 + NONCE_LEN + TAG_LEN;

/// Keys of all objects: sealed with the region key in use, opened with each that this node has.
pub(super) struct ObjectSealing {
    accepted: DerivedKeys<hmac::Key>,
    previous: Option<hmac::Key>,
}

/// Key of one object.
pub(super) struct ObjectKey {
    key: RandomizedNonceKey,
    name: String,
}

impl ObjectSealing {
    pub(super) fn new(keys: &RegionKeys) -> Self {
        let derive = |key: &RegionKey| key.derive(PURPOSE);
        Self {
            accepted: keys.derive(derive),
            previous: keys.previous().map(derive),
        }
    }

    /// Key that seals the object with the whole name `name`.
    pub(super) fn object(&self, name: &str) -> Result<ObjectKey, ArchiveError> {
        ObjectKey::new(self.accepted.in_use(), name)
    }

    /// Opens the part at `offset` of an object that was sealed with any of the keys.
    pub(super) fn open(
        &self,
        name: &str,
        offset: u64,
        sealed: &[u8],
    ) -> Result<Vec<u8>, ArchiveError> {
        let refused = || ArchiveError::Refused(name.to_owned());
        let mut keys = self.accepted.all().iter().chain(&self.previous);
        keys.find_map(|key| {
            ObjectKey::new(key, name)
                .and_then(|key| key.open(offset, sealed.to_vec()))
                .ok()
        })
        .ok_or_else(refused)
    }
}

impl ObjectKey {
    fn new(key: &hmac::Key, name: &str) -> Result<Self, ArchiveError> {
        let derived = hmac::sign(key, name.as_bytes());
        let key = RandomizedNonceKey::new(&AES_256_GCM, derived.as_ref());
        let key = key.map_err(|_| ArchiveError::Seal(name.to_owned()))?;
        Ok(Self {
            key,
            name: name.to_owned(),
        })
    }

    /// Appends the sealed `part` to `out`. `offset` is the position of the part in the object.
    pub(super) fn seal(
        &self,
        offset: u64,
        mut part: Vec<u8>,
        out: &mut Vec<u8>,
    ) -> Result<(), ArchiveError> {
        let nonce = self
            .key
            .seal_in_place_append_tag(Aad::from(offset.to_be_bytes()), &mut part);
        let nonce = nonce.map_err(|_| ArchiveError::Seal(self.name.clone()))?;
        out.push(VERSION);
        out.extend_from_slice(nonce.as_ref());
        out.extend_from_slice(&part);
        Ok(())
    }

    /// Opens the part at `offset`.
    pub(super) fn open(&self, offset: u64, mut sealed: Vec<u8>) -> Result<Vec<u8>, ArchiveError> {
        let refused = || ArchiveError::Refused(self.name.clone());
        let Some((&mut VERSION, rest)) = sealed.split_first_mut() else {
            return Err(refused());
        };
        let (nonce, ciphertext) = rest.split_at_mut_checked(NONCE_LEN).ok_or_else(refused)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| refused())?;
        let opened = self
            .key
            .open_in_place(nonce, Aad::from(offset.to_be_bytes()), ciphertext);
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
        let sealing = |byte| ObjectSealing::new(&RegionKey::new([byte; 32]).into());
        let mut sealed = Vec::new();
        sealing(1)
            .object("a")
            .unwrap()
            .seal(7, b"content".to_vec(), &mut sealed)
            .unwrap();
        assert_eq!(sealed.len(), b"content".len() + OVERHEAD);
        let open = |byte, name: &str, offset, sealed: &[u8]| {
            sealing(byte)
                .object(name)
                .unwrap()
                .open(offset, sealed.to_vec())
                .map_err(|error| error.to_string())
        };
        assert_eq!(open(1, "a", 7, &sealed).unwrap(), b"content");
        let refused = open(1, "b", 7, &sealed).unwrap_err();
        assert!(
            refused.contains("archive: b: does not open with the region key"),
            "{refused}"
        );
        assert!(open(1, "a", 8, &sealed).is_err() && open(2, "a", 7, &sealed).is_err());
        for at in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            assert!(open(1, "a", 7, &changed).is_err(), "byte {at}");
            assert!(open(1, "a", 7, &sealed[..at]).is_err(), "{at} bytes");
        }
    }

    #[test]
    fn objects_of_the_previous_key_open_and_none_are_sealed_with_it() {
        let [old, new, other] = [1, 2, 3].map(|byte| RegionKey::new([byte; 32]));
        let sealed = |keys: &RegionKeys| {
            let mut sealed = Vec::new();
            ObjectSealing::new(keys)
                .object("a")
                .unwrap()
                .seal(0, b"content".to_vec(), &mut sealed)
                .unwrap();
            sealed
        };
        let after = RegionKeys::new(new.clone(), None, Some(old.clone()));
        let [by_old, by_new] = [&old.into(), &after].map(sealed);
        let open =
            |keys: &RegionKeys, sealed: &[u8]| ObjectSealing::new(keys).open("a", 0, sealed).ok();
        assert_eq!(
            [&by_old, &by_new].map(|sealed| open(&after, sealed)),
            [(); 2].map(|()| Some(b"content".to_vec()))
        );
        assert_eq!(
            (
                open(&new.clone().into(), &by_old),
                open(&new.into(), &by_new).is_some()
            ),
            (None, true)
        );
        assert_eq!(open(&other.into(), &by_new), None);
    }
}
