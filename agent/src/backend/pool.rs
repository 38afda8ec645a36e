//! Connections to the backends of one service: those that wait for a request, and new ones.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use ::h2::ext::Protocol as Switch;
use gw_shared::http::{BodyDecoder, Framing, UpgradeProtocol};
use gw_shared::runtime;
use http::Method;
use http::request::Parts;
use http::uri::Authority;

use super::choice::{Health, least_loaded};
use super::connect::{self, ConnectError, Dialled, Wanted};
use super::exchange::{RequestHalf, ResponseHalf};
use super::h2::Opened;
use super::options::{Address, Backends, Endpoint, Host, Protocol};
use super::{ResponseError, h1, h2};
use crate::telemetry::request_scope::Passage;
use crate::telemetry::trace;

/// Shorter than the keep-alive of common servers (nginx 75 s, Apache 5 s, Node 5 s): the backend seldom closes first.
const IDLE_FOR: Duration = Duration::from_secs(4);

/// How long one backend is waited for while there is another to try. The last one has all the time it takes, as for
/// everything a backend does.
const PATIENCE: Duration = Duration::from_secs(3);

/// The backends of one service.
pub(crate) struct Pool {
    backends: Box<[Backend]>,
    host: Host,
    /// Counts requests, so that backends that are equally busy take turns.
    turn: Cell<usize>,
}

/// One backend and its connections.
struct Backend {
    endpoint: Endpoint,
    health: Cell<Health>,
    connects: Cell<u64>,
    failed_connects: Cell<u64>,
    /// Requests that it has now.
    requests: Cell<u32>,
    /// Most HTTP/1.1 connections kept: as many as requests can run at a time, or each peak would end in new handshakes.
    idle_max: usize,
    /// HTTP/1.1, last used first out.
    idle: RefCell<Vec<(Instant, Box<h1::Connection>)>>,
    shared: h2::Connections,
    /// ALPN selected HTTP/1.1 the last time: it is of no use to wait for a connection to share.
    speaks_http1: Cell<bool>,
}

/// How a backend does.
pub(crate) struct BackendState {
    /// Its URL.
    pub(crate) name: String,
    /// The last attempt to connect to it did not fail.
    pub(crate) is_good: bool,
    /// Attempts to connect to it, and those that failed.
    pub(crate) connects: u64,
    pub(crate) failures: u64,
    /// Connections that have a request, and those that have none.
    pub(crate) in_use: usize,
    pub(crate) idle: usize,
}

/// A connection on loan for one request.
pub(crate) struct Lease<'a> {
    backend: &'a Backend,
    host: Host,
    /// Has served requests before, and may close under our hands.
    pub(crate) was_kept: bool,
    connection: Connection,
    _load: Load<'a>,
}

enum Connection {
    Http1(Box<h1::Connection>),
    Http2(h2::Place),
}

/// A request that counts at its backend.
struct Load<'a>(&'a Cell<u32>);

impl Drop for Load<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Pool {
    pub(crate) fn new(backends: &Backends, idle_max: u32) -> Self {
        let idle_max = usize::try_from(idle_max).unwrap_or(usize::MAX);
        let backend = |endpoint: &Endpoint| Backend {
            endpoint: endpoint.clone(),
            health: Cell::default(),
            connects: Cell::default(),
            failed_connects: Cell::default(),
            requests: Cell::default(),
            idle_max,
            idle: RefCell::default(),
            shared: h2::Connections::default(),
            // Or it speaks nothing else.
            speaks_http1: Cell::new(matches!(endpoint.protocol, Protocol::Http1)),
        };
        Self { backends: backends.endpoints.iter().map(backend).collect(), host: backends.host, turn: Cell::default() }
    }

    /// A waiting connection of the backend whose turn it is, one that the backend has not closed as far as can be seen.
    pub(crate) fn kept(&self) -> Option<Lease<'_>> {
        let backend = match &*self.backends {
            [only] => only,
            several => {
                self.turn.set(self.turn.get().wrapping_add(1));
                several.get(self.next(|_| false)?)?
            }
        };
        Some(self.lease(backend, true, backend.kept()?))
    }

    /// A new connection, or a place on one that others use. Where a backend cannot be reached, others are tried: no
    /// request has been sent.
    pub(crate) async fn connect(&self, wanted: Wanted, passage: &Passage) -> Result<Lease<'_>, ConnectError> {
        let mut tried = vec![false; self.backends.len()];
        let mut failure = ConnectError::Unreachable("there is none".to_owned());
        while let Some(next) = self.next(|at| tried[at]) {
            tried[next] = true;
            let backend = &self.backends[next];
            backend.health.set(backend.health.get().tried(Instant::now()));
            backend.connects.set(backend.connects.get() + 1);
            // While others wait for this one, it counts as busy.
            let load = Load::new(&backend.requests);
            let connecting = backend.connect(wanted);
            let connected = if tried.contains(&false) {
                let late = |_| Err(ConnectError::Unreachable(format!("no connection within {PATIENCE:?}")));
                runtime::timeout(PATIENCE, connecting).await.unwrap_or_else(late)
            } else {
                connecting.await
            };
            drop(load);
            match connected {
                Ok(connection) => {
                    backend.health.set(Health::default());
                    return Ok(self.lease(backend, false, connection));
                }
                Err(error) => {
                    let (request_id, trace_id) = (passage.request_id(), passage.trace_id());
                    tracing::debug!(request_id, trace_id, backend = %backend.endpoint, %error, "no connection");
                    backend.health.set(backend.health.get().failed(Instant::now()));
                    backend.failed_connects.set(backend.failed_connects.get() + 1);
                    failure = error.of(&backend.endpoint);
                }
            }
        }
        Err(failure)
    }

    /// The least busy of those not `tried`, and of those that are set aside only if there is no other.
    fn next(&self, tried: impl Fn(usize) -> bool) -> Option<usize> {
        let now = Instant::now();
        let load = |at: usize| (!tried(at)).then(|| self.backends[at].requests.get());
        let is_good = |at: usize| self.backends[at].health.get().is_good(now);
        let (count, turn) = (self.backends.len(), self.turn.get());
        let good = least_loaded(count, turn, |at| load(at).filter(|_| is_good(at)));
        good.or_else(|| least_loaded(count, turn, load))
    }

    fn lease<'a>(&self, backend: &'a Backend, was_kept: bool, connection: Connection) -> Lease<'a> {
        Lease { backend, host: self.host, was_kept, connection, _load: Load::new(&backend.requests) }
    }

    /// Closes what has waited too long.
    pub(crate) fn prune(&self) {
        for backend in &self.backends {
            backend.idle.borrow_mut().retain(|(since, _)| since.elapsed() < IDLE_FOR);
            backend.shared.prune();
        }
    }

    /// How each backend does.
    pub(crate) fn states(&self) -> impl Iterator<Item = BackendState> {
        self.backends.iter().map(Backend::state)
    }

    /// Connections that have no request.
    pub(crate) fn idle(&self) -> usize {
        self.backends.iter().map(Backend::idle_connections).sum()
    }
}

impl<'a> Load<'a> {
    fn new(requests: &'a Cell<u32>) -> Self {
        requests.set(requests.get() + 1);
        Self(requests)
    }
}

impl Backend {
    fn state(&self) -> BackendState {
        let requests = self.requests.get() as usize;
        BackendState {
            name: self.endpoint.to_string(),
            is_good: !self.health.get().is_failing(),
            connects: self.connects.get(),
            failures: self.failed_connects.get(),
            in_use: if self.speaks_http1.get() { requests } else { self.shared.in_use() },
            idle: self.idle_connections(),
        }
    }

    fn idle_connections(&self) -> usize {
        self.idle.borrow().len() + self.shared.idle()
    }

    fn kept(&self) -> Option<Connection> {
        if !self.speaks_http1.get() {
            return self.shared.place().map(Connection::Http2);
        }
        let mut idle = self.idle.borrow_mut();
        while let Some((since, connection)) = idle.pop() {
            if since.elapsed() < IDLE_FOR && connection.is_quiet() {
                connection.fit_buffers();
                return Some(Connection::Http1(connection));
            }
        }
        None
    }

    async fn connect(&self, wanted: Wanted) -> Result<Connection, ConnectError> {
        let is_tls = matches!(self.endpoint.protocol, Protocol::Tls(_));
        let opened = if is_tls && wanted == Wanted::Http1 {
            match self.open(Wanted::Http1).await {
                // Speaks HTTP/2 alone.
                Err(ConnectError::Tls { nothing_in_common: true, .. }) => self.open_shared().await,
                opened => opened,
            }
        } else if self.speaks_http1.get() {
            self.open(Wanted::Any).await
        } else {
            self.open_shared().await
        }?;
        Ok(match opened {
            Opened::Http1(connection) => Connection::Http1(connection),
            Opened::Http2(place) => Connection::Http2(place),
        })
    }

    async fn open_shared(&self) -> Result<Opened<Box<h1::Connection>>, ConnectError> {
        // Whether it speaks HTTP/2 shows on the first connection.
        self.shared.place_or(|| !self.speaks_http1.get(), self.open(Wanted::Any)).await
    }

    async fn open(&self, wanted: Wanted) -> Result<Opened<Box<h1::Connection>>, ConnectError> {
        let Dialled { stream, is_http2, receive_limit } = connect::dial(&self.endpoint, wanted).await?;
        if wanted == Wanted::Any {
            self.speaks_http1.set(!is_http2);
        }
        if !is_http2 {
            return Ok(Opened::Http1(Box::new(h1::Connection::new(stream, receive_limit))));
        }
        let connection = h2::Connection::start(stream).await?;
        Ok(Opened::Http2(self.shared.keep(&connection)))
    }
}

fn http1_exchange<'a>(
    connection: &'a h1::Connection,
    framing: Framing,
    upgrade: Option<&'a UpgradeProtocol>,
) -> (RequestHalf<'a>, ResponseHalf<'a>) {
    let response = ResponseHalf::Http1(connection, BodyDecoder::new(Framing::None));
    (RequestHalf::Http1 { connection, framing, upgrade }, response)
}

impl Lease<'_> {
    /// The two halves of an exchange of which nothing is sent yet.
    pub(crate) fn exchange(
        &self,
        parts: &Parts,
        framing: Framing,
    ) -> Result<(RequestHalf<'_>, ResponseHalf<'_>), ResponseError> {
        match &self.connection {
            Connection::Http1(connection) => Ok(http1_exchange(connection, framing, None)),
            Connection::Http2(place) => {
                let (request, response) = place.request(parts, self.authority(parts), None, framing)?;
                Ok((RequestHalf::Http2(request), ResponseHalf::Http2(response)))
            }
        }
    }

    /// The halves of an exchange that asks for another protocol: by `Upgrade` (RFC 9110 §7.8), or over HTTP/2 by extended
    /// CONNECT (RFC 8441). The request has no body.
    pub(crate) fn exchange_protocol<'b>(
        &'b self,
        parts: &Parts,
        protocol: &'b UpgradeProtocol,
    ) -> Result<(RequestHalf<'b>, ResponseHalf<'b>), ResponseError> {
        let refused = |why: &str| Err(ResponseError::Switch(why.to_owned()));
        match &self.connection {
            Connection::Http1(connection) => Ok(http1_exchange(connection, Framing::None, Some(protocol))),
            Connection::Http2(place) if !place.takes_protocols() => {
                refused("it speaks HTTP/2 and takes no extended CONNECT there (RFC 8441)")
            }
            Connection::Http2(_) if parts.method != Method::GET => {
                refused("it speaks HTTP/2, where no method can be given (RFC 8441)")
            }
            Connection::Http2(place) => {
                let protocol = Switch::from(protocol.as_str());
                let (request, response) =
                    place.request(parts, self.authority(parts), Some(&protocol), Framing::None)?;
                Ok((RequestHalf::Http2(request), ResponseHalf::Http2(response)))
            }
        }
    }

    /// What the backend is told to be.
    pub(crate) fn authority<'b>(&'b self, parts: &'b Parts) -> &'b Authority {
        match (self.host, parts.uri.authority()) {
            (Host::Preserve, Some(authority)) => authority,
            (Host::Rewrite, _) | (Host::Preserve, None) => &self.backend.endpoint.authority,
        }
    }

    /// Whether `error` shows that the backend has not begun with the request.
    pub(crate) fn did_not_begin(&self, error: &ResponseError) -> bool {
        match &self.connection {
            Connection::Http1(connection) => {
                matches!(error, ResponseError::Reset(error) if connection.broke_off_before(error))
            }
            Connection::Http2(place) => {
                let refused = matches!(error, ResponseError::Unprocessed(_));
                if refused {
                    place.retire();
                }
                refused
            }
        }
    }

    /// What a span tells of it.
    pub(crate) fn describe(&self) -> trace::Connection {
        let (address, port) = match &self.backend.endpoint.address {
            Address::Tcp { host, port } => (host.clone(), Some(*port)),
            Address::Unix(path) => (path.display().to_string(), None),
        };
        trace::Connection { address, port, was_kept: self.was_kept, is_http2: self.is_http2() }
    }

    pub(crate) fn is_http2(&self) -> bool {
        matches!(self.connection, Connection::Http2(_))
    }

    /// Breaks the exchange off. Over HTTP/2 dropping its halves has done so.
    pub(crate) fn abort(self) {
        if let Connection::Http1(connection) = &self.connection {
            connection.reset_when_dropped();
        }
    }

    /// Keeps a connection whose last response was read to its end.
    pub(crate) fn give_back(self) {
        if let Connection::Http1(connection) = self.connection {
            let mut idle = self.backend.idle.borrow_mut();
            if idle.len() < self.backend.idle_max {
                idle.push((Instant::now(), connection));
            }
        }
    }
}
