//! Messages to a worker.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::Sender;
use gw_base::tls::ServerConfigs;
use gw_base::tls::node::NodeTls;
use gw_interface::rate_limit::{Level, PredecessorCharge, SuccessorBuckets};
use gw_interface::replay::Replay;
use gw_interface::workers::{LostNode, ViewApplied};
use gw_region::{NodeSlot, View};
use gw_store::Directory;
use gw_telemetry::counters::Scrape;
use tokio::sync::mpsc::UnboundedSender;

use crate::apex::ApexCharge;
use crate::ingress::HandedOver;
use crate::pipe;
use crate::upstream::CrossCoreRequest;

/// What another thread asks of a worker.
pub enum WorkerMessage {
    /// Serve a connection whose service this worker owns.
    Connection(Box<HandedOver>),
    /// Relay a request of a service that this worker owns, for the caller of another worker.
    Relay(Box<CrossCoreRequest>),
    /// Relay a captured request again.
    Replay(Box<Replay>),
    /// Wake one end of a pipe.
    Wake(pipe::Wake),
    /// Take one request out of a bucket of the apex that this worker owns.
    ChargeApex(Box<ApexCharge>),
    /// Something was published: look at it.
    Published,
    /// Use this directory from now on.
    Directory(Arc<Directory>),
    /// The feed has read the records, or failed to; it began at this time. What it read was sent
    /// before.
    RecordsRead(Instant),
    /// Use this view of the region from now on.
    View(Box<NewView>),
    /// Continue the buckets of services that come to this node at these levels.
    NodeLevels(Arc<Vec<Level>>),
    /// Ask the agents whose tunnels come through the node `via` to connect again.
    MoveTunnels {
        /// Node that the tunnels come through.
        via: NodeSlot,
    },
    /// End the connections with this node, and the tunnels that come through it.
    NodeLost(LostNode),
    /// Use this configuration for new links to other nodes.
    NodeTls(Arc<NodeTls>),
    /// Use these certificates for new connections.
    Certificates(Arc<ServerConfigs>),
    /// Continue the buckets of this worker's services at these levels.
    Levels(Arc<Vec<Level>>),
    /// Admit a request of the predecessor.
    ChargeForPredecessor(Box<PredecessorCharge>),
    /// Another process takes over: leave it the buckets.
    Succeeded(Box<Succeeded>),
    /// Send requests without a tunnel here to the process that takes over, which serves the other
    /// end of this socket, once the links before have ended.
    LinkToSuccessor(OwnedFd),
    /// Serve the requests of the process that this one has replaced, which has the other end of
    /// this socket.
    LinkOfPredecessor(OwnedFd),
    /// Report the levels of the buckets.
    ReportLevels(Sender<Vec<Level>>),
    /// Report the labels of services that have lost their last tunnel and expect it back within
    /// seconds.
    ReportAwaited(Sender<Vec<String>>),
    /// Report counters and state.
    Scrape(Scrape),
    /// Accept no more connections, finish running requests; with a successor, leave it the
    /// connections that wait to be accepted.
    Drain {
        /// Whether another process takes over.
        successor: bool,
    },
    /// In a drain: report whether no request runs or may be on its way.
    ReportQuiet(Sender<bool>),
    /// No request runs on any worker: end connections without a request.
    EndQuiet,
    /// The drain is over: refuse requests, let the agents end their tunnels.
    End,
    /// Stop now.
    Stop,
    /// Panic, in a task without which the worker is of no use. For tests of the whole gateway; not
    /// in release builds.
    #[cfg(debug_assertions)]
    Panic,
}

/// A view of the region.
#[derive(Clone)]
pub struct NewView {
    /// Number of the publication.
    pub number: u64,
    /// View to use from now on.
    pub view: Arc<View>,
    /// Receives a message once the worker uses the view.
    pub(crate) applied: UnboundedSender<ViewApplied>,
}

/// The buckets of the process that takes over.
pub struct Succeeded {
    /// Asks the other process to admit requests.
    pub buckets: SuccessorBuckets,
    /// Receives the levels of the buckets that are not full.
    pub levels: Sender<Vec<Level>>,
}
