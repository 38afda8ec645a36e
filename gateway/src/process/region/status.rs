//! `region status`: the database of a region and its contents.

use serde::Serialize;

use super::nodes::ListedNode;
use super::{RegionError, key_path, postgres};
use crate::config::Config;
use crate::control::node_name;
use crate::region::RegionKey;
use crate::store::{EngineState, LastChange, PostgresInspector, RecordsOfKind, RegionState};

/// What is known about a region without asking its nodes.
#[derive(Debug, Serialize)]
pub struct Status {
    /// URL without the password.
    pub database: String,
    pub engine: EngineState,
    pub region: RegionState,
    /// `None` if this node has the key of the region; otherwise the reason why it has not.
    pub key_problem: Option<String>,
    pub nodes: Vec<ListedNode>,
    pub records: Vec<RecordsOfKind>,
    pub last_change: Option<ChangeStatus>,
}

/// The newest change.
#[derive(Debug, Serialize)]
pub struct ChangeStatus {
    pub number: i64,
    /// RFC 3339, by the clock of the node.
    pub at: String,
    pub actor: String,
    pub action: String,
    /// `None` after a day.
    pub node: Option<String>,
}

/// Reads the state of the region. Changes nothing, and does not need the region key.
pub fn status(config: &Config) -> Result<Status, RegionError> {
    let settings = postgres(config)?;
    let mut inspector = PostgresInspector::connect(settings, &node_name())?;
    let region = inspector.region()?.ok_or_else(|| RegionError::NoRegion(settings.to_string()))?;
    let key = RegionKey::load(key_path(config)?).map_err(|error| error.to_string());
    let key_problem =
        key.and_then(|key| region.check(config.region.apex(), &key).map_err(|error| error.to_string())).err();
    Ok(Status {
        database: settings.to_string(),
        engine: inspector.engine()?,
        nodes: ListedNode::all(&inspector.nodes()?, u64::try_from(region.revision.0).unwrap_or(0)),
        region,
        key_problem,
        records: inspector.records()?,
        last_change: inspector.last_change()?.map(ChangeStatus::from),
    })
}

impl From<LastChange> for ChangeStatus {
    fn from(change: LastChange) -> Self {
        let LastChange { number, at, actor, action, node } = change;
        Self { number, at: at.to_string(), actor, action, node }
    }
}
