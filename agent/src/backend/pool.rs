//! The backends of one service and their connections, idle and new.

mod host_mapping;
mod lease;
mod origin;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use gw_shared::http::RequestHead;
use gw_shared::net::resolve;
use gw_shared::runtime;
use gw_shared::tunnel::control::BackendHealth;
use http::Method;
use http::uri::Authority;
use rustls_pki_types::ServerName;
use tokio::sync::watch;

use self::lease::ActiveRequest;
pub(crate) use self::lease::Lease;
pub(super) use self::lease::LeasedConnection;
pub(super) use self::origin::Origin;
use super::ResponseError;
use super::balance::{Health, joint_health, least_loaded};
use super::config::{
    Address, BackendEndpoint, BackendProtocol, BackendTls, Backends, ConnectionSettings,
    HealthCheck, HostHeader,
};
use super::connect::{Attempt, ConnectError, Offer};
use super::h1::Http1Connection;
use super::health_check::CheckError;
use super::life::LiveConnections;
use super::private::PrivateConnections;
use crate::telemetry::request_scope::RequestScope;

/// Shorter than the keep-alive timeouts of common servers (nginx 75 s, Apache 5 s, Node 5 s), so
/// that the backend rarely closes first.
pub(super) const IDLE_FOR: Duration = Duration::from_secs(4);

/// Most hosts to which there are connections of their own. A service has 21 at most, its own name
/// and domains.
const ORIGINS_MAX: usize = 32;

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
    /// The hostname as the authority of the agent's own checks.
    pub(super) authority: Authority,
    pub(super) backends: Box<[Backend]>,
    host: HostHeader,
    pub(super) health_check: HealthCheck,
    /// Number of requests, so that equally loaded backends take turns.
    turn: Cell<usize>,
    /// The service has tunnels of other agents, which can serve a request that no backend here
    /// takes.
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
    /// Most idle HTTP/1.1 connections: as many as concurrent requests, so that a peak does not
    /// cause new handshakes.
    idle_max: usize,
    /// Never empty. The first one is for all requests without a server name of their own.
    origins: RefCell<Vec<Rc<Origin>>>,
    /// As many idle ones at most.
    pub(super) private: PrivateConnections,
    pub(super) live: LiveConnections,
    connections: ConnectionSettings,
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
            origins: RefCell::new(vec![Rc::new(Origin::new(&endpoint.protocol, None))]),
            private: PrivateConnections::default(),
            live: LiveConnections::default(),
            connections: backends.connections,
        };
        Self {
            service: service.to_owned(),
            // Never invalid: services are hostnames.
            authority: service
                .parse()
                .unwrap_or_else(|_| Authority::from_static("localhost")),
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

    /// Whether a request is repeated after a connection that has ended: its method is safe (RFC
    /// 9110 §9.2.1), and it has no body.
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

    /// Leases an open connection to the backend that the load balancing selects, if there is one.
    /// `is_repeated` tells whether the request is repeated if the connection ends.
    pub(crate) fn reuse(&self, request: &RequestHead, is_repeated: bool) -> Option<Lease<'_>> {
        let backend = match &*self.backends {
            [only] => only,
            several => {
                self.turn.set(self.turn.get().wrapping_add(1));
                several.get(self.select(|_| false)?)?
            }
        };
        let origin = backend.origin(&request.authority);
        let connection = origin.reuse(is_repeated)?;
        Some(self.lease(backend, origin, true, connection))
    }

    /// Leases a new connection or a stream on a shared one. If a backend cannot be reached, tries
    /// the others.
    pub(crate) async fn connect(
        &self,
        request: &RequestHead,
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
            let origin = backend.origin(&request.authority);
            let connected = origin.connect(backend, offer, limit).await;
            drop(active);
            match connected {
                Ok(connection) => {
                    self.connected(backend);
                    return Ok(self.lease(backend, origin, false, connection));
                }
                Err(error) => {
                    let request_id = scope.request_id();
                    let trace_id = scope.trace_id();
                    tracing::debug!(
                        request_id,
                        trace_id,
                        backend = %backend.endpoint,
                        %error,
                        "cannot connect to the backend"
                    );
                    self.failed_to_connect(backend, &error);
                    failure = error.at(&backend.endpoint);
                }
            }
        }
        Err(failure)
    }

    /// Connects to the backends that are down and whose pause has ended, so that one that is up
    /// again counts without a request.
    pub(crate) async fn recheck(&self) {
        let due = |backend: &&Backend| {
            let health = backend.health.get();
            health.is_failing() && health.is_available(Instant::now())
        };
        join_all(self.backends.iter().filter(due).map(async |backend| {
            backend.attempting();
            let origin = backend.origin(&self.authority);
            let dial = async |attempt: &Attempt| origin.dial(backend, Offer::Any, attempt).await;
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
            let origins = backend.origins.borrow();
            let unanswered: usize = origins.iter().map(|origin| origin.shared.look()).sum();
            if unanswered > 0 {
                // Another backend comes first for what moves, and the next attempt shows whether
                // this one is down.
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
            tracing::info!(service = self.service, backend = %backend.endpoint,
                "the backend is up again");
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
                "the backend is down: check that it runs and that its address is correct; it is \
                 tried again"
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
                "the backend is down: its health check fails; requests go to others until it \
                 succeeds again"
            ),
            Err(error) => {
                tracing::debug!(service, %backend, %error,
                    "the health check of the backend failed");
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

    /// Whether every backend is down: the last attempts to connect to it failed, or its health
    /// checks do.
    pub(crate) fn is_down(&self) -> bool {
        *self.health.borrow() == BackendHealth::Unhealthy
    }

    /// Selects the least loaded backend that is not `tried`; an ejected one only if no other is
    /// left.
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
        request: &RequestHead,
    ) -> Result<Lease<'a>, ConnectError> {
        let limit = backend.connections.timeout;
        let origin = backend.origin(&request.authority);
        let connection = origin.connect(backend, Offer::Any, limit).await?;
        Ok(self.lease(backend, origin, false, connection))
    }

    pub(super) fn lease<'a>(
        &self,
        backend: &'a Backend,
        origin: Rc<Origin>,
        is_reused: bool,
        connection: LeasedConnection,
    ) -> Lease<'a> {
        Lease {
            backend,
            origin,
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
            let connection = Box::new(Http1Connection::new(
                stream,
                None,
                super::life::Lifetime::default(),
            ));
            let first_request = Instant::now() + Duration::from_secs(60 * 60);
            backend.origins.borrow()[0].keep(first_request, connection);
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
                .origins
                .borrow()
                .iter()
                .for_each(|origin| origin.prune());
            backend.private.prune();
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
    /// Looks the name of the backend up at regular intervals while there are connections to it, so
    /// that connections to addresses that the name no longer has get no further requests. Never
    /// returns.
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
                    tracing::debug!(backend = %self.endpoint, %error,
                        "cannot resolve the name of the backend");
                }
            }
        }
    }

    fn state(&self) -> BackendState {
        let requests = self.requests.get() as usize;
        let origins = self.origins.borrow();
        BackendState {
            name: self.endpoint.to_string(),
            is_good: !self.health.get().is_failing(),
            connects: self.connects.get(),
            failures: self.failed_connects.get(),
            in_use: if origins.iter().all(|origin| origin.speaks_http1.get()) {
                requests
            } else {
                origins.iter().map(|origin| origin.shared.in_use()).sum()
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
        let origins = self.origins.borrow();
        let idle = |origin: &Rc<Origin>| origin.idle() + origin.shared.idle();
        origins.iter().map(idle).sum::<usize>() + self.private.len()
    }

    /// The connections for requests to `authority`.
    pub(super) fn origin(&self, authority: &Authority) -> Rc<Origin> {
        let mut origins = self.origins.borrow_mut();
        let default = Rc::clone(&origins[0]);
        let BackendProtocol::Tls(BackendTls {
            sends_host: true, ..
        }) = &self.endpoint.protocol
        else {
            return default;
        };
        let host = authority.host().trim_matches(['[', ']']);
        let Ok(name) = ServerName::try_from(host) else {
            return default;
        };
        if let Some(known) = origins.iter().find(|origin| origin.is_named(&name)) {
            return Rc::clone(known);
        }
        if origins.len() == ORIGINS_MAX {
            // Its idle connections close.
            origins.remove(1);
        }
        let origin = Rc::new(Origin::new(&self.endpoint.protocol, Some(name.to_owned())));
        origins.push(Rc::clone(&origin));
        origin
    }

    /// Keeps an idle connection, unless there are as many as concurrent requests.
    fn keep(&self, origin: &Origin, connection: Box<Http1Connection>) {
        let idle: usize = self.origins.borrow().iter().map(|it| it.idle()).sum();
        if idle < self.idle_max {
            origin.keep(Instant::now(), connection);
        }
    }
}
