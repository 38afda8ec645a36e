//! `region init`: creates a region in an empty database.

use std::path::PathBuf;

use gw_control_plane::control::node_name;
use gw_interface::config::Config;
use gw_region::{RegionKey, RegionKeyError};
use gw_store::{PostgresInspector, PostgresStore};

use super::{RegionError, key_path, postgres, source};

/// A new region.
#[derive(Debug)]
pub struct Created {
    /// `{region}.{domain}`
    pub name: String,
    /// URL without the password.
    pub database: String,
    /// UUID of the region.
    pub id: String,
    pub key: PathBuf,
    pub key_file: KeyFileResult,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyFileResult {
    Created,
    /// It existed and was not changed.
    Kept,
}

/// Creates the key of the region if its file does not exist, and the tables. Fails if the database
/// holds a region.
pub fn init(config: &Config) -> Result<Created, RegionError> {
    let settings = postgres(config)?;
    let path = key_path(config)?;
    let existing = PostgresInspector::connect(settings, &node_name())?.region()?;
    let loaded = RegionKey::load(path);
    if let Some(region) = existing {
        let key = loaded.map_err(|error| RegionError::KeyOfOtherNodes {
            error,
            name: region.name.clone(),
        })?;
        region.check(config.region.apex(), &key.into())?;
        let database = settings.to_string();
        return Err(RegionError::Exists {
            database,
            name: region.name,
            revision: region.revision.0,
        });
    }
    let key_file = match loaded {
        Ok(_) => KeyFileResult::Kept,
        Err(RegionKeyError::Io { error, .. }) if error.kind() == std::io::ErrorKind::NotFound => {
            RegionKey::create(path)?;
            KeyFileResult::Created
        }
        Err(error) => return Err(error.into()),
    };
    // Loads the key from its file, as nodes do.
    let source = source(config)?;
    PostgresStore::create(&source)?;
    let region = PostgresStore::new(&source)?.check()?;
    let name = config.region.apex().to_owned();
    let database = settings.to_string();
    Ok(Created {
        name,
        database,
        id: region.id,
        key: path.to_owned(),
        key_file,
    })
}
