//! Files of the data folder that are alike on all nodes of a region: certificate authorities and
//! the admin token.

use std::fs;
use std::io;
use std::path::Path;

use gw_shared::files;
use gw_store::StoreError;
use serde::{Deserialize, Serialize};

/// Files in the data folder that are one secret of the region.
#[derive(Debug)]
pub struct SharedSecret {
    /// Its name in the database.
    pub name: &'static str,
    /// Names of the files in the data folder.
    pub files: &'static [&'static str],
    /// Every data folder has it.
    pub(crate) is_required: bool,
}

/// Key and certificate of the first authority of agents and nodes.
pub const AGENT_CA: SharedSecret = SharedSecret {
    name: "agent-ca",
    files: &["agent-ca.key", "agent-ca.crt"],
    is_required: true,
};
/// Token that authenticates the administrator.
pub const ADMIN_TOKEN: SharedSecret = SharedSecret {
    name: "admin token",
    files: &["admin.token"],
    is_required: false,
};
pub(crate) const DEVELOPMENT_CA: SharedSecret = SharedSecret {
    name: "dev-ca",
    files: &["dev-ca.key", "dev-ca.crt"],
    is_required: false,
};

/// All of them.
pub const SHARED_SECRETS: [SharedSecret; 3] = [AGENT_CA, ADMIN_TOKEN, DEVELOPMENT_CA];

/// Names of files and their contents.
#[derive(Serialize, Deserialize)]
struct SharedFiles(Vec<(String, String)>);

impl SharedSecret {
    /// Reads the files, for the database.
    pub fn read(&self, folder: &Path) -> io::Result<Vec<u8>> {
        let read = |file: &&str| Ok(((*file).to_owned(), files::read_text(&folder.join(file))?));
        let read = self.files.iter().map(read).collect::<io::Result<_>>()?;
        Ok(serde_json::to_vec(&SharedFiles(read))?)
    }

    /// Whether the folder has all of its files.
    pub(crate) fn is_in(&self, folder: &Path) -> bool {
        self.files.iter().all(|file| folder.join(file).exists())
    }

    /// As [`Self::read`]; `None` if the folder has none of the files, and they are not required.
    pub fn read_if_there(&self, folder: &Path) -> io::Result<Option<Vec<u8>>> {
        let is_there = self.is_required || self.files.iter().any(|file| folder.join(file).exists());
        is_there.then(|| self.read(folder)).transpose()
    }

    /// Writes the files as they are in the database. Files that are the same stay as they are.
    pub fn write(&self, folder: &Path, stored: &[u8]) -> io::Result<()> {
        let SharedFiles(stored) = serde_json::from_slice(stored).map_err(|error| {
            io::Error::other(StoreError::Corrupt(format!("{}: {error}", self.name)))
        })?;
        for (file, contents) in stored
            .iter()
            .filter(|(file, _)| self.files.contains(&file.as_str()))
        {
            let path = folder.join(file);
            if fs::read(&path).ok().as_deref() != Some(contents.as_bytes()) {
                files::write_private(&path, contents.as_bytes())?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_move_to_another_folder() {
        let [from, to] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        for (file, text) in [("agent-ca.key", "key"), ("agent-ca.crt", "certificate\n")] {
            fs::write(from.path().join(file), text).unwrap();
        }
        let stored = AGENT_CA.read_if_there(from.path()).unwrap().unwrap();
        AGENT_CA.write(to.path(), &stored).unwrap();
        assert_eq!(AGENT_CA.read(to.path()).unwrap(), stored);
        assert_eq!(
            fs::read_to_string(to.path().join("agent-ca.crt")).unwrap(),
            "certificate\n"
        );
    }

    #[test]
    fn a_part_of_a_secret_is_refused_and_files_of_other_names_are_not_written() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(DEVELOPMENT_CA.read_if_there(folder.path()).unwrap(), None);
        assert!(
            AGENT_CA
                .read_if_there(folder.path())
                .unwrap_err()
                .to_string()
                .contains("agent-ca.key")
        );
        fs::write(folder.path().join("dev-ca.key"), "key").unwrap();
        assert!(
            DEVELOPMENT_CA
                .read_if_there(folder.path())
                .unwrap_err()
                .to_string()
                .contains("dev-ca.crt")
        );
        ADMIN_TOKEN
            .write(folder.path(), br#"[["../evil","x"],["dev-ca.key","x"]]"#)
            .unwrap();
        assert_eq!(
            fs::read_to_string(folder.path().join("dev-ca.key")).unwrap(),
            "key"
        );
        assert!(ADMIN_TOKEN.write(folder.path(), b"nonsense").is_err());
    }
}
