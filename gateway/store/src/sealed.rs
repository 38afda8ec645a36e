//! Secrets as they are stored in the database: sealed with a key derived from the region key
//! (AES-256-GCM).

use aws_lc_rs::aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use gw_region::{DerivedKeys, RegionKeys};
use gw_shared::identity::secret::Secret;

use super::{StoreError, StoredRecord};

/// Name of the derived key.
const PURPOSE: &str = "gw store 1";

/// Seals and opens secrets: seals with the region key in use, opens with each that this node has.
/// Each secret is bound to the name that it is stored under.
pub struct Sealer(DerivedKeys<RandomizedNonceKey>);

impl Sealer {
    /// Derives the sealing keys from the region keys. Fails with [`StoreError::Corrupt`] if a
    /// derived key is not accepted.
    pub fn new(keys: &RegionKeys) -> Result<Self, StoreError> {
        let derived = keys
            .try_derive(|key| RandomizedNonceKey::new(&AES_256_GCM, &*key.derive_bytes(PURPOSE)));
        derived
            .map(Self)
            .map_err(|_| StoreError::Corrupt("the region key cannot be used".to_owned()))
    }

    /// The nonce, the ciphertext and the tag, in base64.
    pub fn seal(&self, name: &str, secret: &[u8]) -> Result<String, StoreError> {
        let mut sealed = secret.to_vec();
        let nonce = self
            .0
            .in_use()
            .seal_in_place_append_tag(Aad::from(name.as_bytes()), &mut sealed);
        let nonce = nonce.map_err(|_| StoreError::Corrupt(format!("cannot seal {name}")))?;
        Ok(STANDARD.encode([&nonce.as_ref()[..], &sealed].concat()))
    }

    /// Opens a secret that was sealed under this name. Fails with [`StoreError::Corrupt`] if it is
    /// not base64, was changed, or was sealed under another name or key.
    pub fn open(&self, name: &str, sealed: &str) -> Result<Vec<u8>, StoreError> {
        let refused = || StoreError::Corrupt(format!("{name} does not open with this region key"));
        let bytes = STANDARD.decode(sealed).map_err(|_| refused())?;
        let (nonce, ciphertext) = bytes.split_at_checked(NONCE_LEN).ok_or_else(refused)?;
        let open = |key: &RandomizedNonceKey| {
            // A failed attempt leaves no ciphertext.
            let mut ciphertext = ciphertext.to_vec();
            let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
            let opened = key
                .open_in_place(nonce, Aad::from(name.as_bytes()), &mut ciphertext)
                .ok()?
                .len();
            ciphertext.truncate(opened);
            Some(ciphertext)
        };
        self.0.all().iter().find_map(open).ok_or_else(refused)
    }

    /// Seals the secret parts of a record. Hashes of secrets are stored as they are.
    pub(super) fn seal_record(&self, record: &StoredRecord) -> Result<StoredRecord, StoreError> {
        let mut sealed = record.clone();
        if let Some((name, secret)) = sealed.secret_mut() {
            *secret = Secret::new(self.seal(&name, secret.reveal().as_bytes())?);
        }
        Ok(sealed)
    }

    pub(super) fn open_record(&self, mut record: StoredRecord) -> Result<StoredRecord, StoreError> {
        if let Some((name, secret)) = record.secret_mut() {
            let opened = self.open(&name, secret.reveal())?;
            *secret = Secret::new(String::from_utf8(opened).map_err(StoreError::corrupt)?);
        }
        Ok(record)
    }
}

#[cfg(test)]
mod tests {
    use gw_region::RegionKey;

    use super::*;

    fn sealer(byte: u8) -> Sealer {
        Sealer::new(&RegionKey::new([byte; 32]).into()).unwrap()
    }

    #[test]
    fn while_the_key_is_replaced_either_opens_and_the_one_in_use_seals() {
        let [old, new] = [1, 2].map(|byte| RegionKey::new([byte; 32]));
        let keys = RegionKeys::new(old, Some(new), None);
        let both = Sealer::new(&keys).unwrap();
        for (in_use, only) in [(0, sealer(1)), (1, sealer(2))] {
            keys.switch_to(in_use);
            assert_eq!(
                only.open("a", &both.seal("a", b"secret").unwrap()).unwrap(),
                b"secret"
            );
            assert_eq!(
                both.open("a", &only.seal("a", b"secret").unwrap()).unwrap(),
                b"secret"
            );
        }
    }

    #[test]
    fn a_secret_opens_under_its_name_and_key_only() {
        let sealed = sealer(1).seal("a", b"secret").unwrap();
        assert_eq!(sealer(1).open("a", &sealed).unwrap(), b"secret");
        assert!(sealer(1).open("b", &sealed).is_err(), "another name");
        assert!(sealer(2).open("a", &sealed).is_err(), "another key");
        assert_ne!(
            sealer(1).seal("a", b"secret").unwrap(),
            sealed,
            "a new nonce each time"
        );
        for broken in ["", "AAAA", "not base64!", &sealed[..sealed.len() - 4]] {
            assert!(sealer(1).open("a", broken).is_err(), "{broken}");
        }
    }
}
