//! Secrets in the data folder of a single gateway, sealed with a key that is kept elsewhere:
//! private signing keys in the database, and files beside it. In PostgreSQL the region key seals
//! them.

use std::io;
use std::path::Path;
use std::sync::Arc;

use gw_base::tls::pki::KeyFile;
use gw_region::RegionKey;
use gw_shared::files;
use gw_shared::identity::secret::Secret;

use super::{Sealer, StoreError, StoredRecord};

/// Beginning of a sealed secret. No secret begins with it.
const SEALED: &str = "gw-sealed:";
/// Name of the credential of systemd with the key.
pub const CREDENTIAL: &str = "seal-key";

/// Seals what is written and opens what is read; without a key, reads and writes secrets as they
/// are.
#[derive(Clone, Default)]
pub struct Sealing(Option<Arc<Sealer>>);

impl Sealing {
    /// With the key in the file `seal_key`, if there is one.
    pub fn load(seal_key: Option<&Path>) -> Result<Self, StoreError> {
        let Some(path) = seal_key else {
            return Ok(Self::default());
        };
        let key = RegionKey::load_seal_key(path)
            .map_err(|error| StoreError::SealKey(error.to_string()))?;
        Ok(Self(Some(Arc::new(Sealer::new(&key.into())?))))
    }

    pub(super) fn has_key(&self) -> bool {
        self.0.is_some()
    }

    fn seal(&self, name: &str, secret: &str) -> Result<String, StoreError> {
        match &self.0 {
            Some(sealer) => Ok(format!("{SEALED}{}", sealer.seal(name, secret.as_bytes())?)),
            None => Ok(secret.to_owned()),
        }
    }

    fn open(&self, name: &str, stored: &str) -> Result<String, StoreError> {
        let Some(sealed) = stored.strip_prefix(SEALED) else {
            return Ok(stored.to_owned());
        };
        let sealer = self
            .0
            .as_ref()
            .ok_or_else(|| StoreError::Sealed(name.to_owned()))?;
        let opened = sealer
            .open(name, sealed.trim_end())
            .ok()
            .and_then(|bytes| String::from_utf8(bytes).ok());
        let other_key = || {
            StoreError::SealKey(format!(
                "seal_key: {name} does not open with this key; use the key that sealed it, or \
                 restore a backup into an empty data folder"
            ))
        };
        opened.ok_or_else(other_key)
    }

    /// Seals the private key of a record. Hashes of secrets are stored as they are.
    pub(super) fn seal_record(&self, record: &StoredRecord) -> Result<StoredRecord, StoreError> {
        let mut record = record.clone();
        if let Some((name, secret)) = record.secret_mut() {
            *secret = Secret::new(self.seal(&name, secret.reveal())?);
        }
        Ok(record)
    }

    pub(super) fn open_record(&self, mut record: StoredRecord) -> Result<StoredRecord, StoreError> {
        if let Some((name, secret)) = record.secret_mut() {
            *secret = Secret::new(self.open(&name, secret.reveal())?);
        }
        Ok(record)
    }

    /// Whether the record has a secret that is not sealed.
    pub(super) fn is_plain(record: &mut StoredRecord) -> bool {
        record
            .secret_mut()
            .is_some_and(|(_, secret)| !secret.reveal().starts_with(SEALED))
    }

    /// Reads a file of the data folder.
    pub fn read_file(&self, path: &Path) -> Result<String, StoreError> {
        self.open(&name_of(path), &files::read_text(path)?)
    }

    /// Replaces a file of the data folder.
    pub fn write_file(&self, path: &Path, text: &str) -> Result<(), StoreError> {
        Ok(files::write_private(
            path,
            self.seal(&name_of(path), text)?.as_bytes(),
        )?)
    }

    /// Seals a file that is not sealed yet. Returns whether it was sealed now.
    pub fn seal_file(&self, path: &Path) -> Result<bool, StoreError> {
        if !self.has_key() || !path.exists() {
            return Ok(false);
        }
        let text = files::read_text(path)?;
        if text.starts_with(SEALED) {
            return Ok(false);
        }
        self.write_file(path, &text)?;
        Ok(true)
    }
}

fn name_of(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

impl KeyFile for Sealing {
    fn read(&self, path: &Path) -> io::Result<String> {
        self.read_file(path).map_err(io::Error::other)
    }

    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        self.write_file(path, text).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn sealing(folder: &Path, byte: u8) -> Sealing {
        let path = folder.join(format!("key-{byte}"));
        fs::write(&path, [byte; 32]).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
        Sealing::load(Some(&path)).unwrap()
    }

    #[test]
    fn a_file_is_sealed_once_and_opens_under_its_name_with_its_key_only() {
        let folder = tempfile::tempdir().unwrap();
        let [file, other] = ["admin.token", "agent-ca.key"].map(|name| folder.path().join(name));
        let sealed = sealing(folder.path(), 1);
        let plain = Sealing::default();
        plain.write_file(&file, "secret\n").unwrap();
        assert_eq!(
            sealed.read_file(&file).unwrap(),
            "secret\n",
            "not sealed yet"
        );
        assert!(
            !plain.seal_file(&file).unwrap()
                && sealed.seal_file(&file).unwrap()
                && !sealed.seal_file(&file).unwrap()
        );
        assert!(!fs::read_to_string(&file).unwrap().contains("secret"));
        assert_eq!(
            fs::metadata(&file).unwrap().permissions().mode() & 0o777,
            0o600
        );
        assert_eq!(sealed.read_file(&file).unwrap(), "secret\n");
        let refused = plain.read_file(&file).unwrap_err().to_string();
        assert!(
            refused.contains("admin.token is sealed") && refused.contains("seal_key"),
            "{refused}"
        );
        let refused = sealing(folder.path(), 2)
            .read_file(&file)
            .unwrap_err()
            .to_string();
        assert!(
            refused.contains("admin.token does not open with this key"),
            "{refused}"
        );
        fs::copy(&file, &other).unwrap();
        assert!(
            matches!(sealed.read_file(&other), Err(StoreError::SealKey(_))),
            "under another name"
        );
        let missing = Sealing::load(Some(Path::new("/nowhere/key")))
            .err()
            .unwrap()
            .to_string();
        assert!(missing.contains("seal_key: /nowhere/key: "), "{missing}");
    }
}
