//! This process as a node of the region.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::hostname::Region;
use crate::region::Placement;
use crate::tls::node::NodeTls;

/// The newest placement and TLS configurations of this node, for threads other than the workers.
pub(crate) struct LocalNode {
    pub(super) region: Region,
    latest: Mutex<Latest>,
}

/// `None` until the first placement is published.
#[derive(Default)]
struct Latest {
    tls: Option<Arc<NodeTls>>,
    placement: Option<Arc<Placement>>,
}

impl LocalNode {
    pub(crate) fn new(region: Region) -> Arc<Self> {
        Arc::new(Self { region, latest: Mutex::default() })
    }

    pub(crate) fn tls(&self) -> Option<Arc<NodeTls>> {
        self.latest().tls.clone()
    }

    pub(crate) fn placement(&self) -> Option<Arc<Placement>> {
        self.latest().placement.clone()
    }

    /// Uses this configuration for new connections.
    pub(crate) fn use_tls(&self, tls: Arc<NodeTls>) {
        self.latest().tls = Some(tls);
    }

    pub(crate) fn use_placement(&self, placement: Arc<Placement>) {
        self.latest().placement = Some(placement);
    }

    fn latest(&self) -> MutexGuard<'_, Latest> {
        // Each change under the lock is one assignment.
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
