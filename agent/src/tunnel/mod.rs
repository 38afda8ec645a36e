//! The agent's tunnels, one per service.

mod control_messages;
pub(crate) mod dial;
pub(crate) mod reconnect;
pub(crate) mod registry;
pub(crate) mod service;
pub(crate) mod session;

use std::fmt;
use std::rc::Rc;
use std::sync::mpsc::Sender;

use crate::backend::Backends;
use crate::clock::GatewayClock;
use crate::config::Config;
use crate::identity::renewal::CertificateManager;
use crate::program::Updates;
#[cfg(any(test, feature = "bench_support"))]
use crate::program::stored::UpdateRecord;
use crate::services::AssignedServices;
use crate::succession::{AgentEvents, SuccessionWatch};
use crate::telemetry::trace::Tracing;
use crate::tunnel::reconnect::Reconnects;
use crate::tunnel::registry::ServiceRegistry;

/// State that all tasks of one agent share.
pub(crate) struct AgentContext {
    pub(crate) config: Config,
    pub(crate) services: Rc<AssignedServices>,
    pub(crate) clock: Rc<GatewayClock>,
    pub(crate) certificates: CertificateManager,
    pub(crate) reconnects: Reconnects,
    pub(crate) registry: ServiceRegistry,
    pub(crate) updates: Updates,
    pub(crate) succession: SuccessionWatch,
    /// To the process.
    pub(crate) events: AgentEvents,
    /// `None` without a trace collector.
    pub(crate) tracing: Option<Tracing>,
    /// Receives each service once its first tunnel is ready, if a receiver is interested.
    pub(crate) relayed: Option<Sender<RelayedService>>,
}

/// A service that the gateway relays to this agent. Displayed as one line for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelayedService {
    /// Where callers reach it.
    pub url: String,
    /// URLs of its backends.
    pub backends: String,
}

impl fmt::Display for RelayedService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} -> {}", self.url, self.backends)
    }
}

impl AgentContext {
    /// An agent in a process that nothing replaces.
    #[cfg(any(test, feature = "bench_support"))]
    pub(crate) fn alone(config: Config) -> Self {
        Self::new(
            config,
            None,
            Updates::new(None, None, &UpdateRecord::default()),
            AgentEvents::new().0,
        )
    }

    pub(crate) fn new(
        config: Config,
        tracing: Option<Tracing>,
        updates: Updates,
        events: AgentEvents,
    ) -> Self {
        let clock = Rc::new(GatewayClock::default());
        let services = Rc::new(AssignedServices::new(
            config.enrollment.gateway_name.clone(),
            config.enrollment.services.iter().cloned(),
        ));
        let certificates = CertificateManager::new(
            config.state.clone(),
            config.enrollment.clone(),
            config.proxies.clone(),
            Rc::clone(&clock),
            Rc::clone(&services),
        );
        Self {
            config,
            services,
            clock,
            certificates,
            reconnects: Reconnects::default(),
            registry: ServiceRegistry::default(),
            updates,
            succession: SuccessionWatch::default(),
            events,
            tracing,
            relayed: None,
        }
    }

    /// The service at `hostname` as callers and people see it.
    pub(crate) fn relayed_service(&self, hostname: &str, backends: &Backends) -> RelayedService {
        let url = match self.config.enrollment.gateway_port {
            443 => format!("https://{hostname}"),
            port => format!("https://{hostname}:{port}"),
        };
        RelayedService {
            url,
            backends: backends.to_string(),
        }
    }
}
