//! The services of a running agent and the state of their tunnels, for the admin endpoints.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};

use crate::backend::Pool;
use crate::telemetry::counts::Counts;
use crate::tunnel::session::{Phase, Session};

/// The services that have a backend and for which the agent keeps a tunnel, by hostname.
#[derive(Default)]
pub(crate) struct ServiceRegistry {
    services: RefCell<BTreeMap<String, Rc<RegisteredService>>>,
    /// The agent accepts no more requests.
    pub(crate) stopping: Cell<bool>,
}

/// One service.
pub(crate) struct RegisteredService {
    pub(crate) pool: Rc<Pool>,
    pub(crate) counts: Rc<Counts>,
    /// May contain sessions that have ended.
    sessions: RefCell<Vec<Weak<Session>>>,
    pub(crate) tunnels_opened: Cell<u64>,
    pub(crate) failed_attempts: Cell<u64>,
}

impl ServiceRegistry {
    pub(crate) fn add(&self, hostname: &str, pool: &Rc<Pool>) -> Rc<RegisteredService> {
        let service = Rc::new(RegisteredService {
            pool: Rc::clone(pool),
            counts: Rc::default(),
            sessions: RefCell::default(),
            tunnels_opened: Cell::default(),
            failed_attempts: Cell::default(),
        });
        self.services
            .borrow_mut()
            .insert(hostname.to_owned(), Rc::clone(&service));
        service
    }

    /// Removes `service`, unless it has been added again meanwhile.
    pub(crate) fn remove(&self, hostname: &str, service: &Rc<RegisteredService>) {
        let mut services = self.services.borrow_mut();
        if services
            .get(hostname)
            .is_some_and(|found| Rc::ptr_eq(found, service))
        {
            services.remove(hostname);
        }
    }

    /// The services by hostname.
    pub(crate) fn services(&self) -> BTreeMap<String, Rc<RegisteredService>> {
        self.services.borrow().clone()
    }
}

impl RegisteredService {
    /// Records a tunnel that was opened and is not ready yet.
    pub(crate) fn opened(&self, session: &Rc<Session>) {
        self.tunnels_opened.set(self.tunnels_opened.get() + 1);
        let mut sessions = self.sessions.borrow_mut();
        sessions.retain(|session| session.strong_count() > 0);
        sessions.push(Rc::downgrade(session));
    }

    /// Records a failed attempt to open a tunnel.
    pub(crate) fn failed(&self) {
        self.failed_attempts.set(self.failed_attempts.get() + 1);
    }

    pub(crate) fn sessions(&self) -> Vec<Rc<Session>> {
        self.sessions
            .borrow()
            .iter()
            .filter_map(Weak::upgrade)
            .collect()
    }

    /// Whether a tunnel can receive requests.
    pub(crate) fn is_up(&self) -> bool {
        let is_up = |session: &Rc<Session>| {
            matches!(*session.phase.borrow(), Phase::Ready | Phase::GatewayDrains)
        };
        self.sessions().iter().any(is_up)
    }
}
