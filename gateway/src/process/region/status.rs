//! `region status`: the database of a region and its contents.

use gw_control_plane::control::node_name;
use gw_interface::config::{Config, REGION_KEY, REGION_KEY_NEXT};
use gw_store::{
    EngineState, LastChange, PostgresInspector, ProvenKeys, RecordsOfKind, RegionState,
};
use serde::Serialize;

use super::nodes::ListedNode;
use super::{RegionError, postgres};

/// What is known about a region without asking its nodes.
#[derive(Debug, Serialize)]
pub struct StoredRegionStatus {
    /// URL without the password.
    pub database: String,
    pub engine: EngineState,
    /// Servers that take changes, and what to do; `None` if there is one.
    pub several_primaries: Option<String>,
    pub region: RegionState,
    /// The setting of this node that has the key of the region.
    pub key_in_use: Option<&'static str>,
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
pub fn status(config: &Config) -> Result<StoredRegionStatus, RegionError> {
    let settings = postgres(config)?;
    let mut inspector = PostgresInspector::connect(settings, &node_name())?;
    let region = inspector
        .region()?
        .ok_or_else(|| RegionError::NoRegion(settings.to_string()))?;
    let keys = config
        .region_keys()
        .map_err(RegionError::from)
        .and_then(|keys| keys.ok_or(RegionError::NoKey));
    let in_use = keys.as_ref().map_err(ToString::to_string).and_then(|keys| {
        region
            .check(config.region.apex(), keys)
            .map_err(|error| error.to_string())
    });
    let mut nodes = ListedNode::all(
        &inspector.nodes()?,
        u64::try_from(region.revision.0).unwrap_or(0),
    );
    if let (Ok(keys), Ok(in_use)) = (&keys, &in_use) {
        for proven in inspector.proven_keys(keys)? {
            let node = nodes.iter_mut().find(|node| node.slot == proven.slot.get());
            node.into_iter()
                .for_each(|node| node.keys = key_names(&proven, *in_use));
        }
    }
    Ok(StoredRegionStatus {
        database: settings.to_string(),
        engine: inspector.engine()?,
        several_primaries: settings.several_primaries(),
        nodes,
        region,
        key_in_use: in_use.as_ref().ok().map(|index| SETTINGS[*index]),
        key_problem: in_use.err(),
        records: inspector.records()?,
        last_change: inspector.last_change()?.map(ChangeStatus::from),
    })
}

/// Settings with the accepted keys.
const SETTINGS: [&str; 2] = [REGION_KEY, REGION_KEY_NEXT];

/// Names the keys that a node has. `in_use` is the index of the key of the region.
fn key_names(proven: &ProvenKeys, in_use: usize) -> Vec<&'static str> {
    let name = |index: usize| match index {
        _ if index == in_use => "in use",
        0 => "earlier",
        _ => "next",
    };
    let mut named: Vec<_> = (0..proven.has.len())
        .filter(|index| proven.has[*index])
        .map(name)
        .collect();
    // The key in use first.
    named.sort_by_key(|name| *name != "in use");
    named.extend(proven.has_other.then_some("another"));
    named
}

impl From<LastChange> for ChangeStatus {
    fn from(change: LastChange) -> Self {
        let LastChange {
            number,
            at,
            actor,
            action,
            node,
        } = change;
        Self {
            number,
            at: at.to_string(),
            actor,
            action,
            node,
        }
    }
}
