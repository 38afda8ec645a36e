//! What can be seen of an agent from outside: `/metrics`, `/readyz` and `/healthz` on a listener of its own, off unless
//! configured. Served on the agent's reactor, where everything that is shown lives; few at a time, and a page takes
//! microseconds.

mod counts;
mod listener;
mod page;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::time::SystemTime;

pub(crate) use counts::Counts;
pub(crate) use listener::{Observers, serve};

use crate::backend::Pool;
use crate::tunnel::session::{Phase, Session};

/// Of one agent.
#[derive(Default)]
pub(crate) struct Observed {
    /// By hostname, those that have a backend and are to have a tunnel.
    services: RefCell<BTreeMap<String, Rc<ObservedService>>>,
    /// When the certificate expires that the agent has now, as it last looked.
    pub(crate) certificate_expiry: Cell<Option<SystemTime>>,
    pub(crate) renewals: Cell<u64>,
    pub(crate) failed_renewals: Cell<u64>,
    /// The agent takes no more requests.
    pub(crate) stopping: Cell<bool>,
}

/// One service.
pub(crate) struct ObservedService {
    pool: Rc<Pool>,
    pub(crate) counts: Rc<Counts>,
    /// Those that have ended among them.
    sessions: RefCell<Vec<Weak<Session>>>,
    tunnels_opened: Cell<u64>,
    failed_attempts: Cell<u64>,
}

impl Observed {
    /// A service is to have a tunnel.
    pub(crate) fn enter(&self, hostname: &str, pool: &Rc<Pool>) -> Rc<ObservedService> {
        let service = Rc::new(ObservedService {
            pool: Rc::clone(pool),
            counts: Rc::default(),
            sessions: RefCell::default(),
            tunnels_opened: Cell::default(),
            failed_attempts: Cell::default(),
        });
        self.services.borrow_mut().insert(hostname.to_owned(), Rc::clone(&service));
        service
    }

    /// It is over, unless it has begun anew meanwhile.
    pub(crate) fn leave(&self, hostname: &str, service: &Rc<ObservedService>) {
        let mut services = self.services.borrow_mut();
        if services.get(hostname).is_some_and(|found| Rc::ptr_eq(found, service)) {
            services.remove(hostname);
        }
    }
}

#[cfg(test)]
impl Observed {
    /// Failed attempts of all services.
    pub(crate) fn failed_attempts(&self) -> u64 {
        self.services.borrow().values().map(|service| service.failed_attempts.get()).sum()
    }
}

impl ObservedService {
    /// A tunnel was opened; it has yet to become ready.
    pub(crate) fn opened(&self, session: &Rc<Session>) {
        self.tunnels_opened.set(self.tunnels_opened.get() + 1);
        let mut sessions = self.sessions.borrow_mut();
        sessions.retain(|session| session.strong_count() > 0);
        sessions.push(Rc::downgrade(session));
    }

    /// No tunnel came of an attempt.
    pub(crate) fn failed(&self) {
        self.failed_attempts.set(self.failed_attempts.get() + 1);
    }

    fn sessions(&self) -> Vec<Rc<Session>> {
        self.sessions.borrow().iter().filter_map(Weak::upgrade).collect()
    }

    /// Requests can come.
    fn is_up(&self) -> bool {
        let is_up = |session: &Rc<Session>| matches!(*session.phase.borrow(), Phase::Ready | Phase::GatewayDrains);
        self.sessions().iter().any(is_up)
    }
}

#[cfg(test)]
mod tests;
