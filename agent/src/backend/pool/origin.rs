//! The connections to a backend for one host that requests name.
//!
//! A backend with TLS gets the host as its server name (SNI, RFC 6066 §3), selects its certificate
//! and its settings by it, and may refuse a request for another host on the same connection (421,
//! RFC 9110 §15.5.20). Without TLS, all hosts are one origin.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use rustls_pki_types::ServerName;

use super::lease::LeasedConnection;
use super::{Backend, IDLE_FOR};
use crate::backend::config::BackendProtocol;
use crate::backend::connect::{self, Attempt, ConnectError, Dialled, Offer};
use crate::backend::h1::Http1Connection;
use crate::backend::h2::{Http2Connection, Http2Connections, NewConnection};
use crate::backend::life::Lifetime;

/// Idle time after which a connection is used only for requests that can be repeated. Some servers
/// close without an announcement after few seconds (gunicorn 2 s).
const IDLE_FOR_ANY: Duration = Duration::from_secs(1);

/// How long the name of the backend's URL is sent after the backend has refused that of the
/// request.
const REFUSED_FOR: Duration = Duration::from_secs(10 * 60);

pub(in crate::backend) struct Origin {
    /// The host. `None` if the configuration has the only server name.
    name: Option<ServerName<'static>>,
    /// The backend has refused the name, and until then gets that of its URL.
    refused_until: Cell<Option<Instant>>,
    /// Idle HTTP/1.1 connections; the last used one is reused first.
    idle: RefCell<Vec<(Instant, Box<Http1Connection>)>>,
    pub(super) shared: Http2Connections,
    /// The last connection spoke HTTP/1.1, so there is no shared connection to wait for.
    pub(super) speaks_http1: Cell<bool>,
}

impl Origin {
    pub(super) fn new(protocol: &BackendProtocol, name: Option<ServerName<'static>>) -> Self {
        Self {
            name,
            refused_until: Cell::default(),
            idle: RefCell::default(),
            shared: Http2Connections::default(),
            speaks_http1: Cell::new(matches!(protocol, BackendProtocol::Http1)),
        }
    }

    pub(super) fn is_named(&self, name: &ServerName<'_>) -> bool {
        self.name.as_ref() == Some(name)
    }

    /// Number of idle HTTP/1.1 connections.
    pub(super) fn idle(&self) -> usize {
        self.idle.borrow().len()
    }

    /// Keeps an idle connection. `since` is the end of its last request.
    pub(super) fn keep(&self, since: Instant, connection: Box<Http1Connection>) {
        self.idle.borrow_mut().push((since, connection));
    }

    /// Closes connections that have been idle for too long.
    pub(super) fn prune(&self) {
        self.idle
            .borrow_mut()
            .retain(|(since, connection)| since.elapsed() < connection.idle_for());
        self.shared.prune();
    }

    pub(super) fn reuse(&self, is_repeated: bool) -> Option<LeasedConnection> {
        if !self.speaks_http1.get() {
            return self.shared.reserve().map(LeasedConnection::Http2);
        }
        let mut idle = self.idle.borrow_mut();
        let now = Instant::now();
        let most = if is_repeated { IDLE_FOR } else { IDLE_FOR_ANY };
        // The last one has been idle for the shortest time.
        while let Some((since, connection)) =
            idle.pop_if(|(since, _)| now.duration_since(*since) < most)
        {
            // One system call, which a readiness wait cannot replace: half of the busy connections
            // are reused before the ring would report that the backend has closed them, and some
            // requests cannot be sent again.
            if now.duration_since(since) < connection.idle_for()
                && !connection.is_outdated(now)
                && connection.is_quiet()
            {
                connection.fit_buffers();
                return Some(LeasedConnection::Http1(connection));
            }
        }
        None
    }

    /// `limit` bounds each attempt.
    pub(super) async fn connect(
        &self,
        backend: &Backend,
        offer: Offer,
        limit: Duration,
    ) -> Result<LeasedConnection, ConnectError> {
        let is_tls = matches!(backend.endpoint.protocol, BackendProtocol::Tls(_));
        let open = async |offer| {
            Attempt::within(limit, async |attempt| {
                self.attempt(backend, offer, attempt).await
            })
            .await
        };
        // The first connection shows whether the backend speaks HTTP/2.
        let open_shared = || {
            let is_shared = || !self.speaks_http1.get();
            self.shared
                .reserve_or_open(limit, is_shared, open(Offer::Any))
        };
        let opened = if is_tls && offer == Offer::Http1 {
            match open(Offer::Http1).await {
                // The backend supports HTTP/2 only.
                Err(error) if error.is_of_protocol() => open_shared().await,
                opened => opened,
            }
        } else if self.speaks_http1.get() {
            open(Offer::Any).await
        } else {
            open_shared().await
        }?;
        Ok(match opened {
            NewConnection::Http1(connection) => LeasedConnection::Http1(connection),
            NewConnection::Http2(stream) => LeasedConnection::Http2(stream),
        })
    }

    async fn attempt(
        &self,
        backend: &Backend,
        offer: Offer,
        attempt: &Attempt,
    ) -> Result<NewConnection<Box<Http1Connection>>, ConnectError> {
        let dialled = self.dial(backend, offer, attempt).await?;
        attempt.awaits(format!(
            "{} has not sent its HTTP/2 settings",
            dialled.peer()
        ));
        let Dialled {
            stream,
            is_http2,
            receive_limit,
            peer,
        } = dialled;
        if offer == Offer::Any {
            self.speaks_http1.set(!is_http2);
        }
        let live = backend.live.add(stream.socket(), peer);
        let lifetime = Lifetime::new(live, backend.connections.max_age);
        if !is_http2 {
            let connection = Http1Connection::new(stream, receive_limit, lifetime);
            return Ok(NewConnection::Http1(Box::new(connection)));
        }
        let connection = Http2Connection::start(stream, lifetime).await?;
        Ok(NewConnection::Http2(self.shared.add(&connection)))
    }

    /// Connects with the name of the origin, or with that of the URL if the backend refuses the
    /// former.
    pub(in crate::backend) async fn dial(
        &self,
        backend: &Backend,
        offer: Offer,
        attempt: &Attempt,
    ) -> Result<Dialled, ConnectError> {
        let is_refused = |until| Instant::now() < until;
        if let Some(name) = &self.name
            && !self.refused_until.get().is_some_and(is_refused)
        {
            match connect::dial(&backend.endpoint, offer, Some(name), attempt).await {
                Err(error) if error.may_be_of_name() => {
                    let until = Instant::now() + REFUSED_FOR;
                    self.refused_until.set(Some(until));
                }
                dialled => return dialled,
            }
        }
        connect::dial(&backend.endpoint, offer, None, attempt).await
    }
}
