//! Tunnels, at the gateway.

pub(crate) mod attempt_budget;
mod authorities;
mod bound_callers;
mod candidate;
pub(crate) mod choice;
mod control;
mod downloads;
pub(crate) mod flow_control;
pub mod handshake;
pub(crate) mod health;
mod latest;
mod registry;
pub(crate) mod session;
pub mod waiting;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use futures_util::future::LocalBoxFuture;
use gw_base::agent_releases::AgentReleases;
use gw_base::error::{Error, Overload};
use gw_base::process::freeze::Freeze;
use gw_base::service::hostname::Region;
use gw_base::tls::ServerConfigs;
use gw_interface::control_plane::Executor;
use gw_interface::rate_limit::Bucket;
use gw_region::owners::ownership::WorkerId;
use gw_region::{NodeSlot, Peering};
use gw_shared::id::RequestIds;
use gw_store::{Directory, Service};
use gw_telemetry::counters::Counters;

pub(crate) use self::candidate::InFlight;
pub(crate) use self::downloads::Downloads;
pub(crate) use self::handshake::replaced_keys::ReplacedKeys;
pub(crate) use self::registry::{Chosen, Registry, Serving};
use self::waiting::Waiting;
use self::waiting::grace::TunnelGrace;
use crate::current::Current;
use crate::lifecycle::Lifecycle;
use crate::memory::relay::RelayMemory;

/// The tunnels of one worker, and the parts of the worker that their tasks use.
pub(crate) struct Tunnels {
    pub(crate) worker: WorkerId,
    pub(crate) region: Region,
    /// Whether agents must send a client certificate. Otherwise they may sign a challenge.
    pub(crate) agent_mtls: bool,
    pub(crate) registry: RefCell<Registry>,
    /// Versions of agents that are served, and programs for the others.
    pub(crate) releases: Arc<AgentReleases>,
    /// Programs that are being sent.
    pub(crate) downloads: Rc<Downloads>,
    /// Rate at which this worker admits tunnels of all services, in a region of several nodes: when
    /// services move to this node, the agents of all of them connect at once.
    pub(crate) admissions: Option<RefCell<Bucket>>,
    /// Which services this node of a region owns, and whether it is suspended; `None` if it is the
    /// only one.
    pub(crate) peering: Option<Rc<Peering>>,
    /// Requests that wait for a tunnel.
    pub(crate) waiting: Rc<Waiting>,
    /// Tunnels that agents had with the predecessor.
    pub(crate) grace: Arc<TunnelGrace>,
    pub(crate) directory: Rc<Current<Directory>>,
    pub(crate) freeze: Rc<Freeze>,
    pub(crate) certificates: Rc<Current<ServerConfigs>>,
    pub(crate) executor: Executor,
    pub(crate) replaced_keys: ReplacedKeys,
    pub(crate) relay_memory: Rc<RelayMemory>,
    pub(crate) counters: Rc<Counters>,
    pub(crate) ids: Rc<RequestIds>,
    pub(crate) lifecycle: Rc<Lifecycle>,
}

/// The path of a tunnel that another node splices.
pub(crate) struct Via {
    pub(crate) node: NodeSlot,
    /// Resolves when the path is cut.
    pub(crate) silent: LocalBoxFuture<'static, ()>,
}

impl Tunnels {
    /// Whether a refusal of a tunnel may be logged as a warning. Limited by a rate, so that agents
    /// cannot fill the log.
    pub(crate) fn may_log_refusal(&self) -> bool {
        self.registry.borrow().openings().may_log_refusal()
    }

    /// Whether agents are to connect to other nodes.
    pub(crate) fn is_suspended(&self) -> bool {
        self.peering
            .as_ref()
            .is_some_and(|peering| peering.signals.is_suspended())
    }

    /// Whether another node owns the service.
    pub(crate) fn is_elsewhere(&self, service: &Service) -> bool {
        self.peering
            .as_ref()
            .is_some_and(|peering| peering.is_elsewhere(&service.hostname))
    }

    /// Labels of the services of this worker whose agents lost their last tunnel a moment ago, or
    /// have not come back since the takeover.
    pub(crate) fn awaited_services(&self, now: Instant) -> Vec<String> {
        let registry = self.registry.borrow();
        let directory = self.directory.in_use();
        let is_own = |label: &str| {
            let service = directory.service(label);
            service.is_some_and(|service| service.owner == self.worker)
        };
        let awaited = self.grace.awaited(now).chain(registry.lost(now));
        let awaited = awaited.filter(|label| is_own(label) && !registry.has_tunnel(label));
        awaited.map(str::to_owned).collect()
    }

    fn take_admission(&self, now: Instant) -> Result<(), Error> {
        let Some(admissions) = &self.admissions else {
            return Ok(());
        };
        admissions
            .borrow_mut()
            .take(now)
            .map_err(|_| Error::Overloaded(Overload::Admissions))
    }
}
