//! The agent's tunnels, one per service.

mod control_messages;
pub(crate) mod dial;
pub(crate) mod reconnect;
pub(crate) mod registry;
pub(crate) mod service;
pub(crate) mod session;

use std::rc::Rc;

use crate::clock::GatewayClock;
use crate::config::Config;
use crate::gateway_events::GatewayEvents;
use crate::identity::manager::CertificateManager;
use crate::telemetry::trace::Tracing;
use crate::tunnel::reconnect::Reconnects;
use crate::tunnel::registry::ServiceRegistry;

/// State that all tasks of one agent share.
pub(crate) struct Agent {
    pub(crate) config: Config,
    pub(crate) gateway_events: Rc<GatewayEvents>,
    pub(crate) clock: Rc<GatewayClock>,
    pub(crate) certificates: CertificateManager,
    pub(crate) reconnects: Reconnects,
    pub(crate) registry: ServiceRegistry,
    /// `None` without a trace collector.
    pub(crate) tracing: Option<Tracing>,
}

impl Agent {
    pub(crate) fn new(config: Config, tracing: Option<Tracing>) -> Self {
        let clock = Rc::new(GatewayClock::default());
        let gateway_events = Rc::new(GatewayEvents::new(config.enrollment.services.iter().cloned()));
        let certificates = CertificateManager::new(
            config.state.clone(),
            config.enrollment.clone(),
            Rc::clone(&clock),
            Rc::clone(&gateway_events),
        );
        Self {
            config,
            gateway_events,
            clock,
            certificates,
            reconnects: Reconnects::default(),
            registry: ServiceRegistry::default(),
            tracing,
        }
    }
}
