//! The workers, as the control plane reaches them.

use std::sync::Arc;
use std::time::Instant;

use gw_base::tls::ServerConfigs;
use gw_base::tls::node::NodeTls;
use gw_region::owners::ownership::WorkerId;
use gw_region::{NodeSlot, View};
use gw_store::Directory;
use gw_telemetry::counters::WorkerReport;
use tokio::sync::mpsc::UnboundedSender;

use crate::rate_limit::Level;
use crate::replay::Replay;

/// A worker uses a view.
#[derive(Debug)]
pub struct ViewApplied {
    /// Number of the publication.
    pub number: u64,
    /// The worker.
    pub worker: WorkerId,
    /// Levels of the buckets of services that have moved to other nodes.
    pub levels: Vec<Level>,
}

/// A process of another node that does not answer, and that was declared dead or has lost its slot
/// to another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostNode {
    /// Slot of the node.
    pub slot: NodeSlot,
    /// Session of the process.
    pub session: u128,
    /// Only tunnels opened at this time or earlier are cut: later ones came through the next
    /// process in the slot.
    pub until: Instant,
}

/// Messages of the control plane to the workers. Publications never block: a worker that is late
/// uses the latest. The messages of [`Self::publish_levels`] and [`Self::end_connections`] wait
/// until every worker has room in its mailbox.
///
/// A trait with one implementor, `worker::WorkerHandles`: the control plane must not import the
/// worker, and a message type of its own would be matched and forwarded in two places.
pub trait Workers: Send + Sync {
    /// Number of workers.
    fn count(&self) -> usize;
    /// Makes every worker use this directory from now on.
    fn publish_directory(&self, directory: &Arc<Directory>);
    /// Tells every worker that a read of the records that began at this time is over. Directories
    /// with what was read were published before.
    fn publish_read(&self, began: Instant);
    /// Makes every worker use this view of the region from now on. Each worker then sends a message
    /// with `number` on `applied`, unless a later view comes first.
    fn publish_view(&self, number: u64, view: &Arc<View>, applied: &UnboundedSender<ViewApplied>);
    /// Makes every worker continue the buckets of services that come to this node at these levels.
    fn publish_levels(&self, levels: &Arc<Vec<Level>>);
    /// Makes every worker use this configuration for new links to other nodes.
    fn publish_node_tls(&self, tls: &Arc<NodeTls>);
    /// Makes every worker end its connections with a lost node: links, and tunnels that one of the
    /// two nodes splices.
    fn end_connections(&self, lost: LostNode);
    /// Makes every worker use these certificates for new connections.
    fn publish_certificates(&self, certificates: &Arc<ServerConfigs>);
    /// Reports of the workers that answer in time.
    fn reports(&self, with_services: bool) -> Vec<WorkerReport>;
    /// Posts a replay to the owner of its service; gives it back if the owner has no room.
    fn replay(&self, owner: WorkerId, replay: Box<Replay>) -> Result<(), Box<Replay>>;
}
