//! Entry point of gateway/simulation: an agent as a task of the calling thread's reactor, its state
//! folder, and what invariants need to know of it. Not a public interface.

use std::collections::BTreeMap;
use std::rc::{Rc, Weak};

use tokio::sync::watch;

use crate::backend::BackendState;
use crate::config::Config;
use crate::identity::state::{Enrollment, StateDir, StateError};
use crate::lifecycle;
use crate::tunnel::AgentContext;
use crate::tunnel::registry::RegisteredService;
use crate::tunnel::session::Session;

/// Stores the identity of an agent that has enrolled, as `gw-agent enroll` does: its private key
/// followed by its certificates, and the certificate of the gateway's authority. Both are PEM.
pub fn enrolled(
    state: &StateDir,
    enrollment: &Enrollment,
    identity: &str,
    gateway_authority: &str,
) -> Result<(), StateError> {
    state.complete(enrollment, identity, Some(gateway_authority))
}

/// Makes an agent that no supervisor runs, without trace collector, admin listener and lock of the
/// state folder. The future ends after `stop` has become true, or its sender was dropped, and the
/// last request has ended. Must be called by a task, and the future awaited by one: both use the
/// reactor of the thread. Other tasks of the agent remain, which on a thread of its own end with
/// the reactor.
pub fn run(
    config: Config,
    stop: watch::Receiver<bool>,
) -> (RunningAgent, impl Future<Output = ()>) {
    let (agent, running) = lifecycle::alone(config, stop);
    (RunningAgent(Rc::downgrade(&agent)), running)
}

/// An agent of this thread, which the handle does not keep alive.
#[derive(Clone)]
pub struct RunningAgent(Weak<AgentContext>);

impl RunningAgent {
    /// What the agent holds now, by hostname of the service; `None` once its tasks have been
    /// dropped. Services that the agent does not serve, or not any more, are left out.
    pub fn probe(&self) -> Option<BTreeMap<String, ServiceProbe>> {
        let agent = self.0.upgrade()?;
        let services = agent.registry.services();
        let probes = services
            .into_iter()
            .map(|(hostname, service)| (hostname, ServiceProbe::of(&service)));
        Some(probes.collect())
    }
}

/// What an agent holds for one service.
#[derive(Debug, Clone)]
pub struct ServiceProbe {
    /// Open tunnels.
    pub tunnels: Vec<TunnelProbe>,
    /// Connections of each backend.
    pub backends: Vec<BackendProbe>,
    /// Requests that arrived.
    pub requests: u64,
    /// Requests without a complete response of the backend, by error code.
    pub failures: Vec<(&'static str, u64)>,
    /// Tunnels that were opened.
    pub tunnels_opened: u64,
    /// Failed attempts to open a tunnel.
    pub failed_attempts: u64,
    /// A tunnel can receive requests.
    pub is_up: bool,
}

/// What a tunnel holds at the agent.
#[derive(Debug, Clone)]
pub struct TunnelProbe {
    /// Name of the phase.
    pub phase: String,
    /// Most requests at once.
    pub slots: u32,
    /// Requests that are at a backend.
    pub slots_in_use: u32,
}

/// Connections of one backend.
#[derive(Debug, Clone)]
pub struct BackendProbe {
    /// Its URL.
    pub name: String,
    /// Neither the last attempt to connect nor the health checks fail.
    pub is_good: bool,
    /// Attempts to connect.
    pub connects: u64,
    /// Failed attempts to connect.
    pub failures: u64,
    /// Connections with requests.
    pub in_use: usize,
    /// Connections without a request.
    pub idle: usize,
}

impl ServiceProbe {
    fn of(service: &RegisteredService) -> Self {
        Self {
            tunnels: service.sessions().iter().map(TunnelProbe::of).collect(),
            backends: service.pool.states().map(BackendProbe::of).collect(),
            requests: service.counts.requests(),
            failures: service.counts.failures(),
            tunnels_opened: service.tunnels_opened.get(),
            failed_attempts: service.failed_attempts.get(),
            is_up: service.is_up(),
        }
    }
}

impl TunnelProbe {
    fn of(session: &Rc<Session>) -> Self {
        Self {
            phase: format!("{:?}", *session.phase.borrow()),
            slots: session.slots.total(),
            slots_in_use: session.slots.in_use(),
        }
    }
}

impl BackendProbe {
    fn of(state: BackendState) -> Self {
        let BackendState {
            name,
            is_good,
            connects,
            failures,
            in_use,
            idle,
        } = state;
        Self {
            name,
            is_good,
            connects,
            failures,
            in_use,
            idle,
        }
    }
}
