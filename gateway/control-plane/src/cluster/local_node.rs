//! This process as a node of the region.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::limits;
use gw_base::service::hostname::Region;
use gw_base::tls::node::NodeTls;
use gw_base::tls::pki::NodeIdentity;
use gw_region::{NodeSlot, Placement, View};
use rustls_pki_types::CertificateDer;
use tokio::sync::watch;

/// The newest view and TLS configurations of this node, for threads other than the workers.
pub struct LocalNode {
    pub(super) region: Region,
    /// `None` until the first view is published.
    tls: watch::Sender<Option<Arc<NodeTls>>>,
    latest: Mutex<LatestView>,
}

/// `None` until the first view is published.
#[derive(Default)]
struct LatestView {
    /// Number of TLS configurations so far, each with a certificate of its own.
    certificates_used: u64,
    view: Option<Arc<View>>,
    /// Processes whose requests were refused since the last epoch.
    refused: BTreeSet<(NodeSlot, u128)>,
}

impl LocalNode {
    /// Creates a node of `region` without a view and TLS configurations.
    pub fn new(region: Region) -> Arc<Self> {
        Arc::new(Self {
            region,
            tls: watch::Sender::default(),
            latest: Mutex::default(),
        })
    }

    /// Newest TLS configurations; `None` until the first view is published.
    pub fn tls(&self) -> Option<Arc<NodeTls>> {
        self.tls.borrow().clone()
    }

    /// Waits until the certificate that another node has shown is of no trusted authority any more.
    pub(super) async fn distrusts(&self, certificate: &CertificateDer<'_>) {
        let is_distrusted =
            |tls: &Option<Arc<NodeTls>>| tls.as_ref().is_none_or(|tls| !tls.trusts(certificate));
        // Fails when this is dropped, which the caller holds.
        let _ = self.tls.subscribe().wait_for(is_distrusted).await;
    }

    pub(super) fn certificates_used(&self) -> u64 {
        self.latest().certificates_used
    }

    /// Newest placement of the services; `None` until the first view is published.
    pub fn placement(&self) -> Option<Arc<Placement>> {
        self.view().map(|view| view.shared_placement())
    }

    /// Newest view of the region; `None` until the first one is published.
    pub(crate) fn view(&self) -> Option<Arc<View>> {
        self.latest().view.clone()
    }

    /// Whether this process is a node of the region, as far as it is known here.
    pub(super) fn knows(&self, node: NodeIdentity) -> bool {
        self.latest()
            .view
            .as_ref()
            .is_some_and(|view| view.knows(node.slot, node.session))
    }

    /// Notes that a request of this process is refused. Returns whether it is the first one since
    /// the last change of the members, so that a node that tries every second does not fill the
    /// log.
    pub(super) fn refuses_first(&self, node: NodeIdentity) -> bool {
        let mut latest = self.latest();
        latest.refused.len() < limits::CLUSTER_CONNECTIONS
            && latest.refused.insert((node.slot, node.session))
    }

    /// Uses this configuration for new connections.
    pub(crate) fn use_tls(&self, tls: Arc<NodeTls>) {
        // First: a connection with an earlier certificate must not be kept under the later number.
        self.tls.send_replace(Some(tls));
        self.latest().certificates_used += 1;
    }

    pub(crate) fn use_view(&self, view: Arc<View>) {
        let mut latest = self.latest();
        if latest
            .view
            .as_ref()
            .is_none_or(|last| last.epoch() != view.epoch())
        {
            latest.refused.clear();
        }
        latest.view = Some(view);
    }

    fn latest(&self) -> MutexGuard<'_, LatestView> {
        // No change under the lock can panic.
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
