//! The backends of one service and their connections, idle and new.

mod lease;

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use gw_shared::http::RequestHead;
use gw_shared::net::resolve;
use gw_shared::runtime;
use gw_shared::tunnel::control::BackendHealth;
use http::Method;
use tokio::sync::watch;

use self::lease::ActiveRequest;
pub(crate) use self::lease::Lease;
pub(super) use self::lease::LeasedConnection;
use super::ResponseError;
use super::balance::{Health, joint_health, least_loaded};
use super::config::{
    Address, BackendEndpoint, BackendProtocol, Backends, ConnectionSettings, HealthCheck,
    HostHeader,
};
use super::connect::{self, Attempt, ConnectError, Dialled, Offer};
use super::h1::Http1Connection;
use super::h2::{Http2Connection, Http2Connections, NewConnection};
use super::health_check::CheckError;
use super::life::{Lifetime, LiveConnections};
use super::private::PrivateConnections;
use crate::telemetry::request_scope::RequestScope;

/// Shorter than the keep-alive timeouts of common servers (nginx 75 s, Apache 5 s, Node 5 s), so that the backend rarely
/// closes first.
pub(super) const IDLE_FOR: Duration = Duration::from_secs(4);

/// Idle time after which a connection is used only for requests that can be repeated. Some servers close without an
/// announcement after few seconds (gunicorn 2 s).
const IDLE_FOR_ANY: Duration = Duration::from_secs(1);

/// Time limit of a connection attempt while there is another backend or another agent to try.
const FAILOVER_AFTER: Duration = Duration::from_secs(3);

/// Interval at which the names of connected backends are looked up.
const LOOKUP_INTERVAL: Duration = Duration::from_secs(5);

/// Time limit of a connection attempt without a request.
const RECHECK_WITHIN: Duration = Duration::from_secs(2);

/// The backends of one service.
pub(crate) struct Pool {
    /// Hostname of the service.
    pub(super) service: String,
    pub(super) backends: Box<[Backend]>,
    host: HostHeader,
    pub(super) health_check: HealthCheck,
    /// Number of requests, so that equally loaded backends take turns.
    turn: Cell<usize>,
    /// The service has tunnels of other agents, which can serve a request that no backend here takes.
    has_other_tunnels: Cell<bool>,
    /// Safe requests may be repeated.
    retries: Cell<bool>,
    /// Health of the backends together.
    health: watch::Sender<BackendHealth>,
}

/// One backend and its connections.
pub(super) struct Backend {
    pub(super) endpoint: BackendEndpoint,
    health: Cell<Health>,
    connects: Cell<u64>,
    failed_connects: Cell<u64>,
    /// Running requests.
    requests: Cell<u32>,
    /// Most idle HTTP/1.1 connections: as many as concurrent requests, so that a peak does not cause new handshakes.
    idle_max: usize,
    /// Idle HTTP/1.1 connections; the last used one is reused first.
    idle: RefCell<Vec<(Instant, Box<Http1Connection>)>>,
    /// As many at most.
    pub(super) private: PrivateConnections,
    shared: Http2Connections,
    pub(super) live: LiveConnections,
    connections: ConnectionSettings,
    /// The last connection spoke HTTP/1.1, so there is no shared connection to wait for.
    speaks_http1: Cell<bool>,
}

/// State of a backend, for metrics.
pub(crate) struct BackendState {
    /// Its URL.
    pub(crate) name: String,
    /// Neither the last connection attempt nor the health checks fail.
    pub(crate) is_good: bool,
    /// Connection attempts, and failed ones.
    pub(crate) connects: u64,
    pub(crate) failures: u64,
    /// Connections with requests, and idle ones.
    pub(crate) in_use: usize,
    pub(crate) idle: usize,
}

impl Pool {
    pub(crate) fn new(service: &str, backends: &Backends, idle_max: u32) -> Self {
        let idle_max = usize::try_from(idle_max).unwrap_or(usize::MAX);
        let backend = |endpoint: &BackendEndpoint| Backend {
            endpoint: endpoint.clone(),
            health: Cell::default(),
            connects: Cell::default(),
            failed_connects: Cell::default(),
            requests: Cell::default(),
            idle_max,
            idle: RefCell::default(),
            private: PrivateConnections::default(),
            shared: Http2Connections::default(),
            live: LiveConnections::default(),
            connections: backends.connections,
            speaks_http1: Cell::new(matches!(endpoint.protocol, BackendProtocol::Http1)),
        };
        Self {
            service: service.to_owned(),
            backends: backends.endpoints.iter().map(backend).collect(),
            host: backends.host,
            health_check: backends.health_check.clone().unwrap_or_default(),
            turn: Cell::default(),
            has_other_tunnels: Cell::default(),
            retries: Cell::new(true),
            health: watch::Sender::default(),
        }
    }

    /// Sets whether the service has tunnels of other agents.
    pub(crate) fn set_other_tunnels(&self, exist: bool) {
        self.has_other_tunnels.set(exist);
    }

    /// Sets whether safe requests may be repeated: the setting `retries` of the service.
    pub(crate) fn set_retries(&self, retries: bool) {
        self.retries.set(retries);
    }

    /// Whether a request is repeated after a connection that has ended: its method is safe (RFC 9110 §9.2.1), and it has no body.
    pub(crate) fn may_repeat(&self, request: &RequestHead) -> bool {
        let is_safe = matches!(
            request.method,
            Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE
        );
        self.retries.get() && is_safe && !request.framing.has_body()
    }

    /// Subscribes to the health of the backends together.
    pub(crate) fn health(&self) -> watch::Receiver<BackendHealth> {
        self.health.subscribe()
    }

    /// Leases an open connection to the backend that the load balancing selects, if there is one. `is_repeated` tells whether
    /// the request is repeated if the connection ends.
    pub(crate) fn reuse(&self, is_repeated: bool) -> Option<Lease<'_>> {
        let backend = match &*self.backends {
            [only] => only,
            several => {
                self.turn.set(self.turn.get().wrapping_add(1));
                several.get(self.select(|_| false)?)?
            }
        };
        Some(self.lease(backend, true, backend.reuse(is_repeated)?))
    }

    /// Leases a new connection or a stream on a shared one. If a backend cannot be reached, tries the others.
    pub(crate) async fn connect(
        &self,
        offer: Offer,
        scope: &RequestScope,
    ) -> Result<Lease<'_>, ConnectError> {
        let mut tried = vec![false; self.backends.len()];
        let mut failure = ConnectError::Unreachable("no backend is configured".to_owned());
        while let Some(selected) = self.select(|at| tried[at]) {
            tried[selected] = true;
            let backend = &self.backends[selected];
            backend.attempting();
            // Counts as load while the attempt runs.
            let active = ActiveRequest::new(&backend.requests);
            let limit = backend.connections.timeout;
            let limit = if tried.contains(&false) || self.has_other_tunnels.get() {
                limit.min(FAILOVER_AFTER)
            } else {
                limit
            };
            let connected = backend.connect(offer, limit).await;
            drop(active);
            match connected {
                Ok(connection) => {
                    self.connected(backend);
                    return Ok(self.lease(backend, false, connection));
                }
                Err(error) => {
                    let request_id = scope.request_id();
                    let trace_id = scope.trace_id();
                    tracing::debug!(request_id, trace_id, backend = %backend.endpoint, %error, "cannot connect to the backend");
                    self.failed_to_connect(backend, &error);
                    failure = error.at(&backend.endpoint);
                }
            }
        }
        Err(failure)
    }

    /// Connects to the backends that are down and whose pause has ended, so that one that is up again counts without a
    /// request.
    pub(crate) async fn recheck(&self) {
        let due = |backend: &&Backend| {
            let health = backend.health.get();
            health.is_failing() && health.is_available(Instant::now())
        };
        join_all(self.backends.iter().filter(due).map(async |backend| {
            backend.attempting();
            let dial = async |attempt: &Attempt| {
                connect::dial(&backend.endpoint, Offer::Any, attempt).await
            };
            match Attempt::within(RECHECK_WITHIN, dial).await {
                Ok(_) => self.connected(backend),
                Err(error) => self.failed_to_connect(backend, &error),
            }
        }))
        .await;
    }

    /// Looks at the connections for backends that are gone or do not answer. Called once a second.
    pub(crate) fn look(&self) {
        for backend in &self.backends {
            backend.live.look();
            if !backend.shared.look() {
                // Another backend comes first for what moves, and the next attempt shows whether this one is down.
                self.failed(backend, &ResponseError::Unanswered);
            }
        }
    }

    /// Records a successful attempt. Logs it if the last one failed.
    fn connected(&self, backend: &Backend) {
        let before = backend.health.get();
        let now = before.connected();
        backend.health.set(now);
        if before.is_failing() && !now.is_failing() {
            tracing::info!(service = self.service, backend = %backend.endpoint, "the backend is up again");
        }
        self.publish_health();
    }

    /// Records a failed attempt.
    fn failed_to_connect(&self, backend: &Backend, error: &ConnectError) {
        let failed = backend.failed_connects.get() + 1;
        backend.failed_connects.set(failed);
        self.failed(backend, error);
    }

    /// Records a failure. Logs it unless there was another before.
    fn failed(&self, backend: &Backend, error: &dyn std::error::Error) {
        let before = backend.health.get();
        backend.health.set(before.failed(Instant::now()));
        if !before.is_failing() {
            tracing::warn!(
                service = self.service, backend = %backend.endpoint, error = %error,
                "the backend is down: check that it runs and that its address is correct; it is tried again"
            );
        }
        self.publish_health();
    }

    /// Records a health check. Logs it if it takes the backend down or up.
    pub(super) fn checked(&self, backend: &Backend, result: Result<(), CheckError>) {
        let before = backend.health.get();
        let now = before.checked(result.is_ok());
        backend.health.set(now);
        let service = &self.service;
        let backend = &backend.endpoint;
        match result {
            Err(error) if now.is_failing() && !before.is_failing() => tracing::warn!(
                service, %backend, %error,
                "the backend is down: its health check fails; requests go to others until it succeeds again"
            ),
            Err(error) => {
                tracing::debug!(service, %backend, %error, "the health check of the backend failed");
            }
            Ok(()) if before.is_failing() && !now.is_failing() => {
                tracing::info!(service, %backend, "the backend is up again");
            }
            Ok(()) => {}
        }
        self.publish_health();
    }

    fn publish_health(&self) {
        let now = joint_health(
            self.backends
                .iter()
                .map(|backend| backend.health.get().report()),
        );
        self.health
            .send_if_modified(|before| std::mem::replace(before, now) != now);
    }

    /// Whether every backend is down: the last attempts to connect to it failed, or its health checks do.
    pub(crate) fn is_down(&self) -> bool {
        *self.health.borrow() == BackendHealth::Unhealthy
    }

    /// Selects the least loaded backend that is not `tried`; an ejected one only if no other is left.
    pub(super) fn select(&self, tried: impl Fn(usize) -> bool) -> Option<usize> {
        let now = Instant::now();
        let load = |at: usize| (!tried(at)).then(|| self.backends[at].requests.get());
        let is_available = |at: usize| self.backends[at].health.get().is_available(now);
        let count = self.backends.len();
        let turn = self.turn.get();
        let available = least_loaded(count, turn, |at| load(at).filter(|_| is_available(at)));
        available.or_else(|| least_loaded(count, turn, load))
    }

    /// Leases a new connection to this backend, or a stream on a shared one.
    pub(super) async fn lease_from<'a>(
        &self,
        backend: &'a Backend,
    ) -> Result<Lease<'a>, ConnectError> {
        let limit = backend.connections.timeout;
        let connection = backend.connect(Offer::Any, limit).await?;
        Ok(self.lease(backend, false, connection))
    }

    pub(super) fn lease<'a>(
        &self,
        backend: &'a Backend,
        is_reused: bool,
        connection: LeasedConnection,
    ) -> Lease<'a> {
        Lease {
            backend,
            host: self.host,
            is_reused,
            caller: None,
            connection,
            _active: ActiveRequest::new(&backend.requests),
        }
    }

    /// Adds an idle connection to the first backend. It does not expire before its first request.
    #[cfg(feature = "bench_support")]
    pub(crate) fn add_idle(&self, stream: super::BackendStream) {
        if let Some(backend) = self.backends.first() {
            let connection = Box::new(Http1Connection::new(stream, None, Lifetime::default()));
            let first_request = Instant::now() + Duration::from_secs(60 * 60);
            backend.idle.borrow_mut().push((first_request, connection));
        }
    }

    /// Sets the joint health, as an attempt to connect would.
    #[cfg(test)]
    pub(crate) fn set_health(&self, health: BackendHealth) {
        self.health.send_replace(health);
    }

    /// Closes connections that have been idle for too long.
    pub(crate) fn prune(&self) {
        for backend in &self.backends {
            backend
                .idle
                .borrow_mut()
                .retain(|(since, connection)| since.elapsed() < connection.idle_for());
            backend.private.prune();
            backend.shared.prune();
        }
    }

    /// The state of each backend.
    pub(crate) fn states(&self) -> impl Iterator<Item = BackendState> {
        self.backends.iter().map(Backend::state)
    }

    /// Number of idle connections.
    pub(crate) fn idle(&self) -> usize {
        self.backends.iter().map(Backend::idle_connections).sum()
    }
}

impl Backend {
    /// Looks the name of the backend up at regular intervals while there are connections to it, so that connections to addresses
    /// that the name no longer has get no further requests. Never returns.
    pub(super) async fn keep_looking_up(&self) {
        let Address::Tcp { host, port } = &self.endpoint.address else {
            return std::future::pending().await;
        };
        loop {
            runtime::sleep(LOOKUP_INTERVAL).await;
            if resolve::without_lookup(host).is_some() || !self.live.any() {
                continue;
            }
            match resolve::resolve_recent(host, *port).await {
                Ok(addresses) => self.live.answered(&addresses),
                Err(error) => {
                    tracing::debug!(backend = %self.endpoint, %error, "cannot resolve the name of the backend");
                }
            }
        }
    }

    fn state(&self) -> BackendState {
        let requests = self.requests.get() as usize;
        BackendState {
            name: self.endpoint.to_string(),
            is_good: !self.health.get().is_failing(),
            connects: self.connects.get(),
            failures: self.failed_connects.get(),
            in_use: if self.speaks_http1.get() {
                requests
            } else {
                self.shared.in_use()
            },
            idle: self.idle_connections(),
        }
    }

    fn attempting(&self) {
        self.health
            .set(self.health.get().attempting(Instant::now()));
        self.connects.set(self.connects.get() + 1);
    }

    fn idle_connections(&self) -> usize {
        self.idle.borrow().len() + self.private.len() + self.shared.idle()
    }

    fn reuse(&self, is_repeated: bool) -> Option<LeasedConnection> {
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
            // One system call, which a readiness wait cannot replace: half of the busy connections are reused before the
            // ring would report that the backend has closed them, and some requests cannot be sent again.
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
    async fn connect(
        &self,
        offer: Offer,
        limit: Duration,
    ) -> Result<LeasedConnection, ConnectError> {
        let is_tls = matches!(self.endpoint.protocol, BackendProtocol::Tls(_));
        let opened = if is_tls && offer == Offer::Http1 {
            match self.open(Offer::Http1, limit).await {
                // The backend supports HTTP/2 only.
                Err(ConnectError::Tls {
                    no_common_protocol: true,
                    ..
                }) => self.open_shared(limit).await,
                opened => opened,
            }
        } else if self.speaks_http1.get() {
            self.open(Offer::Any, limit).await
        } else {
            self.open_shared(limit).await
        }?;
        Ok(match opened {
            NewConnection::Http1(connection) => LeasedConnection::Http1(connection),
            NewConnection::Http2(stream) => LeasedConnection::Http2(stream),
        })
    }

    async fn open_shared(
        &self,
        limit: Duration,
    ) -> Result<NewConnection<Box<Http1Connection>>, ConnectError> {
        // The first connection shows whether the backend speaks HTTP/2.
        let is_shared = || !self.speaks_http1.get();
        self.shared
            .reserve_or_open(limit, is_shared, self.open(Offer::Any, limit))
            .await
    }

    async fn open(
        &self,
        offer: Offer,
        limit: Duration,
    ) -> Result<NewConnection<Box<Http1Connection>>, ConnectError> {
        Attempt::within(limit, async |attempt| self.attempt(offer, attempt).await).await
    }

    async fn attempt(
        &self,
        offer: Offer,
        attempt: &Attempt,
    ) -> Result<NewConnection<Box<Http1Connection>>, ConnectError> {
        let dialled = connect::dial(&self.endpoint, offer, attempt).await?;
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
        let live = self.live.add(stream.socket(), peer);
        let lifetime = Lifetime::new(live, self.connections.max_age);
        if !is_http2 {
            let connection = Http1Connection::new(stream, receive_limit, lifetime);
            return Ok(NewConnection::Http1(Box::new(connection)));
        }
        let connection = Http2Connection::start(stream, lifetime).await?;
        Ok(NewConnection::Http2(self.shared.add(&connection)))
    }
}
