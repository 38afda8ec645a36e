//! `gw-gateway region …`: an operator's commands on the database of a region.

mod init;
mod nodes;
mod rekey;
mod repair;
mod status;
mod transfer;

use std::path::Path;

use gw_control_plane::control::{node_name, postgres_source};
use gw_control_plane::members::remember_primary;
use gw_interface::config::{Config, StoreSettings};
use gw_region::{NodeSlot, OperatorError, RegionKeyError};
use gw_shared::command::Failure;
use gw_shared::doctor::Examination;
use gw_store::{PostgresSettings, PostgresSource, PostgresStore, StoreError};

pub use self::init::{Created, KeyFileResult, init};
pub use self::nodes::{Drained, ListedNode, drain, remove};
pub use self::rekey::{ReplacedKey, rekey};
pub use self::repair::{Repaired, ReplaceableSecret, forget, repair};
pub use self::status::{ChangeStatus, StoredRegionStatus, status};
pub use self::transfer::{Moved, export, import};

use super::doctor;

/// Reason why a command on a region failed.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    #[error(
        "store: it is \"sqlite\"; a region needs PostgreSQL: set store = \"postgres://…\" \
         (docs/region.md)"
    )]
    Sqlite,
    #[error("region_key: missing; set it to the file of the region's key")]
    NoKey,
    #[error(transparent)]
    Key(#[from] RegionKeyError),
    #[error(
        "{error}; the database holds the region {name} already: copy its key from another node"
    )]
    KeyOfOtherNodes { error: RegionKeyError, name: String },
    #[error(
        "store: {database} holds the region {name} already (revision {revision}); nothing was \
         changed. Add this node with `gw-gateway region join`, or use another database"
    )]
    Exists {
        database: String,
        name: String,
        revision: i64,
    },
    #[error("store: {0} holds no region: create one with `gw-gateway region init`")]
    NoRegion(String),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(
        "store: {0}; whether the region was filled is not known: look at it with `gw-gateway \
         region status`, and repeat this command if its revision is 0"
    )]
    UnknownOutcome(String),
    #[error(transparent)]
    Operator(#[from] OperatorError),
    #[error("{0} is not the slot of a node: slots go from 0 to {max}", max = NodeSlot::MAX)]
    NoSlot(u16),
    #[error(
        "the state of the node in slot {0} has changed meanwhile: look at it with `gw-gateway \
         region status`"
    )]
    NodeChanged(u16),
    #[error(
        "the node in slot {slot} has not left within {seconds} s, and goes on: look at it with \
         `gw-gateway region status`, and at its log"
    )]
    StillDraining { slot: u16, seconds: u64 },
    #[error(
        "the nodes {nodes} do not have the next key; nothing was changed. Set region_key_next on \
         them to the same key and replace their processes (SIGUSR2), until `gw-gateway region \
         status` shows `next` for each; or leave them behind with --force"
    )]
    KeyNotKnown { nodes: String },
    #[error(
        "store: {0}; whether the key was replaced is not known: look at it with `gw-gateway region \
         status`, and repeat this command if region_key is still in use"
    )]
    UnknownReplacement(String),
    #[error("{folder}: {reason}; nothing was changed")]
    Source { folder: String, reason: String },
    #[error("{folder}: {reason}")]
    Destination { folder: String, reason: String },
}

impl From<RegionError> for Failure {
    fn from(error: RegionError) -> Self {
        match error {
            RegionError::Sqlite | RegionError::NoKey | RegionError::NoSlot(_) => {
                Self::Usage(error.to_string())
            }
            error => Self::run(error),
        }
    }
}

/// Checks whether a node with this configuration can join its region. Changes nothing.
pub fn join(config: &Config) -> Result<Examination, RegionError> {
    let mut out = Examination::default();
    doctor::store::examine(&mut out, config, postgres(config)?);
    Ok(out)
}

fn postgres(config: &Config) -> Result<&PostgresSettings, RegionError> {
    match &config.store {
        StoreSettings::Sqlite => Err(RegionError::Sqlite),
        StoreSettings::Postgres(settings) => {
            remember_primary(config);
            Ok(settings)
        }
    }
}

fn key_path(config: &Config) -> Result<&Path, RegionError> {
    config.region_key.as_deref().ok_or(RegionError::NoKey)
}

fn source(config: &Config) -> Result<PostgresSource, RegionError> {
    let settings = postgres(config)?;
    settings.look_for_primaries(&node_name());
    settings.refuse_equal_primaries()?;
    Ok(postgres_source(
        config,
        settings,
        config.region_keys()?.ok_or(RegionError::NoKey)?,
    ))
}

/// The store of the region; fails if the database does not belong to it. Does not migrate the
/// tables, because a migration trusts what is in them: only the start of a gateway does.
fn store(config: &Config) -> Result<PostgresStore, RegionError> {
    let mut store = PostgresStore::new(&source(config)?)?;
    store.check_unmigrated()?;
    Ok(store)
}
