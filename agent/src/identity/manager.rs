//! The certificate of a running agent: renewed before it expires, replaced after.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::SystemTime;

use rustls_pki_types::CertificateDer;
use tokio::sync::{Mutex, Notify};

use crate::clock::GatewayClock;
use crate::gateway_events::GatewayEvents;
use crate::identity::certificate::Identity;
use crate::identity::issuance::Issuance;
use crate::identity::renewal::WantedRenewal;
use crate::identity::state::{Enrollment, StateDir, StateError};
use crate::proxy::ProxySettings;

/// Replaces the certificate in the state folder: [`keep_fresh`](Self::keep_fresh) through the tunnels,
/// [`recover`](Self::recover) through the apex.
pub(crate) struct CertificateManager {
    pub(super) state: StateDir,
    pub(super) enrollment: Enrollment,
    pub(super) proxies: ProxySettings,
    pub(super) clock: Rc<GatewayClock>,
    pub(super) gateway_events: Rc<GatewayEvents>,
    pub(super) issuance: Issuance,
    /// Certificate that is known to be on the disk.
    durable: RefCell<Option<CertificateDer<'static>>>,
    /// Held while an expired certificate is being replaced.
    pub(super) recovery: Mutex<()>,
    /// Expiry of the current certificate, as last read.
    pub(crate) expiry: Cell<Option<SystemTime>>,
    pub(crate) renewals: Cell<u64>,
    pub(crate) failed_renewals: Cell<u64>,
    /// An early renewal that the gateway wants.
    pub(super) wanted: RefCell<Option<WantedRenewal>>,
    /// Ends the wait for the next renewal.
    pub(super) look_again: Notify,
}

impl CertificateManager {
    pub(crate) fn new(
        state: StateDir,
        enrollment: Enrollment,
        proxies: ProxySettings,
        clock: Rc<GatewayClock>,
        gateway_events: Rc<GatewayEvents>,
    ) -> Self {
        Self {
            state,
            enrollment,
            proxies,
            clock,
            gateway_events,
            issuance: Issuance::default(),
            durable: RefCell::default(),
            recovery: Mutex::default(),
            expiry: Cell::default(),
            renewals: Cell::default(),
            failed_renewals: Cell::default(),
            wanted: RefCell::default(),
            look_again: Notify::new(),
        }
    }

    /// The identity for a tunnel, read each time, because renewal replaces it while the agent runs. It is on the disk: once a
    /// tunnel has used its key, the gateway forgets the key before it, which a crash of the machine must not bring back.
    pub(crate) fn identity_for_tunnel(&self) -> Result<Identity, StateError> {
        let identity = self
            .state
            .durable_identity(self.durable.borrow().as_ref())?;
        self.durable.replace(Some(identity.certificate.clone()));
        Ok(identity)
    }
}
