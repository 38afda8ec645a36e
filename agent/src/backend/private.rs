//! HTTP/1.1 connections that serve one connection of a caller only: the backend may have bound the
//! identity of a user to them (RFC 4559 §6).

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use gw_shared::http::RequestHead;
use gw_shared::http::caller_connection::{CallerConnection, CallerName};

use super::connect::{ConnectError, Offer};
use super::h1::Http1Connection;
use super::pool::{Lease, LeasedConnection, Origin, Pool};
use crate::telemetry::request_scope::RequestScope;

/// As long as the gateway keeps an idle connection of a caller.
const IDLE_FOR: Duration = Duration::from_secs(75);

/// Idle private connections to one backend; the longest idle one is first.
#[derive(Default)]
pub(super) struct PrivateConnections(RefCell<Vec<PrivateConnection>>);

struct PrivateConnection {
    caller: CallerName,
    origin: Rc<Origin>,
    since: Instant,
    connection: Box<Http1Connection>,
}

impl PrivateConnections {
    /// Takes a connection of this caller's connection, unless the backend has closed it.
    fn take(&self, caller: CallerName, origin: &Rc<Origin>) -> Option<Box<Http1Connection>> {
        let mut idle = self.0.borrow_mut();
        let at = idle
            .iter()
            .rposition(|private| private.caller == caller && Rc::ptr_eq(&private.origin, origin))?;
        let PrivateConnection {
            since, connection, ..
        } = idle.remove(at);
        drop(idle);
        if since.elapsed() >= IDLE_FOR || !connection.is_quiet() {
            return None;
        }
        connection.fit_buffers();
        Some(connection)
    }

    /// Keeps a connection for the next request. Closes the longest idle one of more than `most`.
    pub(super) fn keep(
        &self,
        caller: CallerName,
        origin: Rc<Origin>,
        connection: Box<Http1Connection>,
        most: usize,
    ) {
        let mut idle = self.0.borrow_mut();
        idle.push(PrivateConnection {
            caller,
            origin,
            since: Instant::now(),
            connection,
        });
        if idle.len() > most {
            idle.remove(0);
        }
    }

    /// Closes connections that have been idle for too long.
    pub(super) fn prune(&self) {
        self.0
            .borrow_mut()
            .retain(|private| private.since.elapsed() < IDLE_FOR);
    }

    pub(super) fn len(&self) -> usize {
        self.0.borrow().len()
    }
}

/// The connections that a request may use: private ones if it came on a caller's connection that
/// the gateway names.
#[derive(Clone, Copy)]
pub(crate) struct CallerPool<'a> {
    pub(crate) pool: &'a Pool,
    pub(crate) caller: Option<CallerConnection>,
}

impl<'a> CallerPool<'a> {
    /// Leases an open connection, if there is one: see [`Pool::reuse`].
    pub(crate) fn reuse(self, request: &RequestHead, is_repeated: bool) -> Option<Lease<'a>> {
        if self.caller.is_some() {
            self.reuse_private(request)
        } else {
            self.pool.reuse(request, is_repeated)
        }
    }

    /// Leases an open private connection, if there is one.
    pub(crate) fn reuse_private(self, request: &RequestHead) -> Option<Lease<'a>> {
        let name = self.caller?.name()?;
        let mut backends = self.pool.backends.iter();
        let (backend, origin, connection) = backends.find_map(|backend| {
            let origin = backend.origin(&request.authority);
            let connection = backend.private.take(name, &origin)?;
            Some((backend, origin, connection))
        })?;
        let connection = LeasedConnection::Http1(connection);
        let mut lease = self.pool.lease(backend, origin, true, connection);
        lease.caller = self.caller;
        Some(lease)
    }

    /// As [`Pool::connect`]. Private connections speak HTTP/1.1, unless the backend speaks HTTP/2
    /// only.
    pub(crate) async fn connect(
        self,
        request: &RequestHead,
        offer: Offer,
        scope: &RequestScope,
    ) -> Result<Lease<'a>, ConnectError> {
        let offer = if self.caller.is_some() {
            Offer::Http1
        } else {
            offer
        };
        let mut lease = self.pool.connect(request, offer, scope).await?;
        lease.caller = self.caller;
        Ok(lease)
    }
}
