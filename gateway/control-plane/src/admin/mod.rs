//! The admin listener: the administration API, the console, health, readiness and metrics.

mod api;
mod console;
mod ephemeral_agents;
mod hosts;
mod metrics;
mod nodes;
mod problem;
mod serve;
mod unread;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::{ConnectInfo, State};
use axum::http::{StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use gw_base::clock::Timestamp;
use gw_shared::id::RequestId;
use gw_shared::telemetry::metrics::exposition;
use gw_shared::telemetry::trace::SpanCounts;
use gw_telemetry::request_log::{LogError, RequestLog, RequestView};
use gw_telemetry::timeseries::Series;
use tokio::sync::Semaphore;

use crate::control::{Actor, Control, ControlError, GatewayAddress, ReplayEdits, replay};
use crate::members::RegionInputs;
use console::Console;
use problem::Problem;
pub use serve::serve;
use unread::Unread;

/// State of the request handlers.
#[derive(Clone)]
pub struct Admin {
    /// Control plane of this process.
    pub control: Arc<Control>,
    /// Request log of this process.
    pub request_log: Arc<RequestLog>,
    /// `None` without a collector of spans.
    pub spans: Option<Arc<SpanCounts>>,
    /// Time series of this process.
    pub series: Arc<Series>,
    /// Set while the gateway drains.
    pub draining: Arc<AtomicBool>,
    /// The membership in a region of several nodes.
    pub region: Option<RegionInputs>,
    console: Arc<Console>,
    /// One backup is made at a time.
    backups: Arc<Semaphore>,
    /// The metrics are written for one client at a time.
    scrapes: Arc<Semaphore>,
    /// Metrics on their way to clients.
    unread: Unread,
}

/// The work of a request panicked; the log has the details.
struct Panicked;

/// Why a request has no result.
enum NoResult {
    Refused(ControlError),
    Panicked(Panicked),
}

impl From<ControlError> for NoResult {
    fn from(error: ControlError) -> Self {
        Self::Refused(error)
    }
}

impl From<Panicked> for NoResult {
    fn from(panicked: Panicked) -> Self {
        Self::Panicked(panicked)
    }
}

impl Admin {
    /// `port` is the port for callers and agents.
    pub fn new(
        control: Arc<Control>,
        request_log: Arc<RequestLog>,
        spans: Option<Arc<SpanCounts>>,
        series: Arc<Series>,
        draining: Arc<AtomicBool>,
        region: Option<RegionInputs>,
        port: u16,
    ) -> Self {
        let backups = Arc::new(Semaphore::new(1));
        let scrapes = Arc::new(Semaphore::new(1));
        let console = Arc::new(Console::new(port));
        let unread = Unread::default();
        Self {
            control,
            request_log,
            spans,
            series,
            draining,
            region,
            console,
            backups,
            scrapes,
            unread,
        }
    }

    /// Runs work on the control plane that may block on the disk.
    async fn ask<T: Send + 'static>(
        self,
        work: impl FnOnce(&Control) -> Result<T, ControlError> + Send + 'static,
    ) -> Result<T, Problem> {
        Ok(self.run(work).await??)
    }

    async fn run<T: Send + 'static>(
        self,
        work: impl FnOnce(&Control) -> T + Send + 'static,
    ) -> Result<T, Panicked> {
        tokio::task::spawn_blocking(move || work(&self.control))
            .await
            .map_err(|error| {
                tracing::error!(%error, "a request of the admin listener panicked");
                Panicked
            })
    }
}

impl Admin {
    /// How agents and callers reach the gateway.
    async fn gateway_address(&self) -> Result<GatewayAddress, Panicked> {
        let port = self.console.port();
        self.clone()
            .run(move |control| control.gateway_address().on_port(port))
            .await
    }

    /// Runs a read of this node's request log on a blocking thread.
    async fn read_log<T: Send + 'static>(
        &self,
        read: impl FnOnce(&RequestLog) -> Result<T, LogError> + Send + 'static,
    ) -> Result<T, NoResult> {
        let log = Arc::clone(&self.request_log);
        Ok(self
            .clone()
            .run(move |_| read(&log))
            .await?
            .map_err(ControlError::from)?)
    }

    /// Replays a captured request of any node, waits for its end and returns the new request, which
    /// is in the log of this node.
    async fn replay(&self, id: RequestId, edits: ReplayEdits) -> Result<RequestView, NoResult> {
        let kept = self.captured(id).await?.ok_or_else(|| not_logged(id))?;
        let begin = move |control: &Control| replay::start(control, &Actor::Admin, kept, &edits);
        let ended = self.clone().run(begin).await??;
        let new = ended.await.map_err(|_| ControlError::Stopping)?;
        let find = move |log: &RequestLog| {
            log.flush();
            log.show(new)
        };
        Ok(self.read_log(find).await?.ok_or_else(|| not_logged(new))?)
    }
}

fn not_logged(id: RequestId) -> ControlError {
    ControlError::NotFound {
        kind: "request",
        id: format!(
            "{id} in the log: it was not logged, is too old, or was made for an earlier account or \
             service of the same name"
        ),
        remedy: String::new(),
    }
}

/// The administration API, without the check of the Host field. For fuzz targets.
#[cfg(any(test, feature = "fuzz_support"))]
pub(crate) fn api_router(admin: Admin) -> Router {
    api::router(&admin).with_state(admin)
}

/// All paths of the admin listener.
fn router(admin: Admin) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .nest("/api/v1", api::router(&admin))
        .merge(console::router(&admin))
        .layer(from_fn_with_state(admin.clone(), hosts::own_host))
        .with_state(admin)
}

/// Routes for the control planes of other nodes.
pub fn between_nodes(admin: Admin) -> Router {
    nodes::routes().with_state(admin)
}

/// Ready: accepting requests, every worker answers, and the other nodes do not shut this one out.
async fn ready(State(admin): State<Admin>) -> impl IntoResponse {
    if admin.draining.load(Ordering::Relaxed) {
        return (StatusCode::SERVICE_UNAVAILABLE, "draining\n".to_owned());
    }
    let workers = admin.control.workers();
    let several = admin.control.several_primaries();
    let several = several.map_or_else(String::new, |it| format!("; {it}"));
    let asked = tokio::task::spawn_blocking(move || {
        let region = admin.region.as_ref().and_then(RegionInputs::status);
        (
            admin.control.reports().len(),
            region.is_some_and(|region| region.is_shut_out),
        )
    });
    match asked.await.unwrap_or_default() {
        (answered, _) if answered < workers => (
            StatusCode::SERVICE_UNAVAILABLE,
            format!("{answered} of {workers} workers answer\n"),
        ),
        (_, true) => {
            let refused =
                "all other nodes refuse the messages of this one: see gw-gateway region status\n";
            (StatusCode::SERVICE_UNAVAILABLE, refused.to_owned())
        }
        _ => (StatusCode::OK, format!("ready{several}\n")),
    }
}

/// Counters of all workers, or an error: a sum without one worker would drop and rise again, which
/// scrapers interpret as a restart.
async fn metrics(
    State(admin): State<Admin>,
    ConnectInfo(client): ConnectInfo<SocketAddr>,
) -> Response {
    // Never fails: the semaphore is not closed.
    let _alone = admin.scrapes.acquire().await;
    let text = admin.clone().run(move |control| {
        let reports = control.reports_with_services();
        if reports.len() < control.workers() {
            return Err(format!(
                "{} of {} workers answer\n",
                reports.len(),
                control.workers()
            ));
        }
        let inventory = control.inventory(&reports, Timestamp::now());
        let region = admin.region.as_ref().and_then(RegionInputs::status);
        let log = admin.request_log.stats();
        Ok(metrics::render(
            &reports,
            &inventory,
            &log,
            region.as_ref(),
            admin.spans.as_deref(),
        ))
    });
    match text.await {
        Ok(Ok(text)) => {
            let body = admin.unread.body(client.ip(), text.into());
            ([(header::CONTENT_TYPE, exposition::CONTENT_TYPE)], body).into_response()
        }
        Ok(Err(missing)) => (StatusCode::SERVICE_UNAVAILABLE, missing).into_response(),
        Err(Panicked) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}
