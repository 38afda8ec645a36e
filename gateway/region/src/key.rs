//! The secret that all nodes of a region share.

use std::fmt::{self, Write as _};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use aws_lc_rs::hmac;
use gw_shared::files;
use zeroize::Zeroizing;

/// Secret of a region: 32 random bytes, the same on all nodes. `Debug` does not print it.
///
/// It is used only to derive a key for each purpose.
#[derive(Clone)]
pub struct RegionKey(Arc<Zeroizing<[u8; RegionKey::BYTES]>>);

/// Reason why a region key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RegionKeyError {
    /// The file cannot be read or created.
    #[error("{setting}: {path}: {error}; {}", remedy(setting, error))]
    Io {
        /// Key of the configuration that names the file.
        setting: &'static str,
        /// Path of the file.
        path: String,
        /// Error of the system.
        error: io::Error,
    },
    /// Users other than the owner can read the file, or its group can write it.
    #[error(
        "{setting}: {path}: other users can read it (mode {mode:o}); it must have mode 0600, or \
         0640 for a group: `chmod 600 {path}`, and replace the key if other users work on this \
         machine"
    )]
    Readable {
        /// Key of the configuration that names the file.
        setting: &'static str,
        /// Path of the file.
        path: String,
        /// Permissions of the file.
        mode: u32,
    },
    /// The file contains no key.
    #[error(
        "{setting}: {path}: it must contain 32 bytes, or 64 hexadecimal digits, as `gw-gateway \
         region init` writes them"
    )]
    Malformed {
        /// Key of the configuration that names the file.
        setting: &'static str,
        /// Path of the file.
        path: String,
    },
    /// The system has no random numbers.
    #[error("region_key: the system has no random numbers")]
    Random,
}

fn remedy(setting: &str, error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound if setting == "region_key" => {
            "name the file with the key of the region, which `gw-gateway region init` makes in an \
             existing folder"
        }
        io::ErrorKind::NotFound => "name the file with that key",
        io::ErrorKind::PermissionDenied => "the user of the gateway has to be able to read it",
        _ => "name another file, or correct the cause",
    }
}

impl RegionKey {
    /// Length of a key, in bytes.
    pub const BYTES: usize = 32;

    /// The key of these bytes.
    pub fn new(bytes: [u8; Self::BYTES]) -> Self {
        Self(Arc::new(Zeroizing::new(bytes)))
    }

    /// Reads the key from a file of 32 bytes or of 64 hexadecimal digits. Refuses a file that other
    /// users can read.
    pub fn load(path: &Path) -> Result<Self, RegionKeyError> {
        Self::load_from("region_key", path)
    }

    /// As [`Self::load`], for the key that seals the secrets of a gateway without a region.
    pub fn load_seal_key(path: &Path) -> Result<Self, RegionKeyError> {
        Self::load_from("seal_key", path)
    }

    /// As [`Self::load`]. `setting` is the key of the configuration that names the file.
    pub fn load_from(setting: &'static str, path: &Path) -> Result<Self, RegionKeyError> {
        let name = || path.display().to_string();
        let failed = |error| RegionKeyError::Io {
            setting,
            path: name(),
            error,
        };
        let file = File::open(path).map_err(failed)?;
        let mode = file.metadata().map_err(failed)?.permissions().mode() & 0o777;
        // A group may read it: service managers pass secrets on that way.
        if mode & 0o027 != 0 {
            return Err(RegionKeyError::Readable {
                setting,
                path: name(),
                mode,
            });
        }
        // Room for the digits and a line end, so that a longer file is noticed.
        let mut contents = Zeroizing::new(Vec::with_capacity(LONGEST));
        file.take(LONGEST as u64)
            .read_to_end(&mut contents)
            .map_err(failed)?;
        Self::parse(&contents).ok_or_else(|| RegionKeyError::Malformed {
            setting,
            path: name(),
        })
    }

    /// Creates a random key in a new file of mode 0600. Its folder must exist. Never replaces a
    /// file.
    pub fn create(path: &Path) -> Result<Self, RegionKeyError> {
        let failed = |error| RegionKeyError::Io {
            setting: "region_key",
            path: path.display().to_string(),
            error,
        };
        let mut bytes = Zeroizing::new([0; Self::BYTES]);
        aws_lc_rs::rand::fill(&mut *bytes).map_err(|_| RegionKeyError::Random)?;
        let mut digits = Zeroizing::new(String::with_capacity(LONGEST));
        for byte in bytes.iter() {
            // Writing to a string cannot fail.
            let _ = write!(digits, "{byte:02x}");
        }
        digits.push('\n');
        files::create_private(path, digits.as_bytes()).map_err(failed)?;
        Ok(Self::new(*bytes))
    }

    fn parse(contents: &[u8]) -> Option<Self> {
        if let Ok(bytes) = contents.try_into() {
            return Some(Self::new(bytes));
        }
        let digits = contents.trim_ascii_end();
        if digits.len() != 2 * Self::BYTES || !digits.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        let mut bytes = Zeroizing::new([0; Self::BYTES]);
        for (byte, pair) in bytes
            .iter_mut()
            .zip(std::str::from_utf8(digits).ok()?.as_bytes().chunks(2))
        {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(Self::new(*bytes))
    }

    /// Key of HMAC-SHA-256 for one purpose.
    pub fn derive(&self, purpose: &str) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, &*self.derive_bytes(purpose))
    }

    /// 32 bytes for one purpose.
    pub fn derive_bytes(&self, purpose: &str) -> Zeroizing<[u8; Self::BYTES]> {
        derive_bytes(&**self.0, purpose)
    }
}

/// 32 bytes for one purpose, derived from a secret of at least 256 random bits: HMAC as a
/// pseudorandom function of the purpose's name.
pub fn derive_bytes(secret: &[u8], purpose: &str) -> Zeroizing<[u8; RegionKey::BYTES]> {
    let secret = hmac::Key::new(hmac::HMAC_SHA256, secret);
    let mut derived = Zeroizing::new([0; RegionKey::BYTES]);
    derived.copy_from_slice(hmac::sign(&secret, purpose.as_bytes()).as_ref());
    derived
}

/// Bytes of a key file that are read: more than the longest valid file.
const LONGEST: usize = 2 * RegionKey::BYTES + 8;

impl fmt::Debug for RegionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn load(contents: &[u8], mode: u32) -> Result<RegionKey, RegionKeyError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("region.key");
        fs::write(&path, contents).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        RegionKey::load(&path)
    }

    fn tag(key: &RegionKey, purpose: &str) -> Vec<u8> {
        hmac::sign(&key.derive(purpose), b"message")
            .as_ref()
            .to_vec()
    }

    #[test]
    fn bytes_and_digits_are_the_same_key() {
        let bytes: [u8; 32] = std::array::from_fn(|at| at as u8 * 7);
        let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let expected = tag(&RegionKey::new(bytes), "a");
        for contents in [
            &bytes[..],
            digits.as_bytes(),
            format!("{}\n", digits.to_uppercase()).as_bytes(),
        ] {
            assert_eq!(tag(&load(contents, 0o600).unwrap(), "a"), expected);
        }
        assert_ne!(
            tag(&RegionKey::new(bytes), "b"),
            expected,
            "each purpose has its own key"
        );
    }

    #[test]
    fn other_contents_are_refused() {
        for contents in [
            &b""[..],
            &[1; 31],
            &[b'0'; 63],
            &[b'0'; 65],
            &[b'g'; 64],
            &[0; 200],
        ] {
            assert!(
                matches!(load(contents, 0o600), Err(RegionKeyError::Malformed { .. })),
                "{contents:?}"
            );
        }
    }

    #[test]
    fn a_created_key_is_private_random_and_never_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let [one, two] = ["one", "two"].map(|name| folder.path().join(name));
        let created = RegionKey::create(&one).unwrap();
        assert_eq!(
            fs::metadata(&one).unwrap().permissions().mode() & 0o777,
            0o600
        );
        assert_eq!(fs::read(&one).unwrap().len(), 2 * RegionKey::BYTES + 1);
        assert_eq!(
            tag(&created, "a"),
            tag(&RegionKey::load(&one).unwrap(), "a")
        );
        assert_ne!(
            tag(&created, "a"),
            tag(&RegionKey::create(&two).unwrap(), "a")
        );
        let refused = RegionKey::create(&one).unwrap_err().to_string();
        assert!(refused.contains("one: File exists"), "{refused}");
        let refused = RegionKey::create(&folder.path().join("none/key"))
            .unwrap_err()
            .to_string();
        assert!(refused.contains("none/key: No such file"), "{refused}");
    }

    #[test]
    fn a_file_that_others_can_read_is_refused() {
        for mode in [0o604, 0o666, 0o620] {
            assert!(
                matches!(load(&[1; 32], mode), Err(RegionKeyError::Readable { .. })),
                "{mode:o}"
            );
        }
        assert!(load(&[1; 32], 0o640).is_ok());
        assert_eq!(format!("{:?}", RegionKey::new([1; 32])), "[secret]");
    }
}
