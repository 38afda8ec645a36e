//! The admin listener: the administration API, and health, readiness and metrics of this process.

mod api;
mod metrics;
mod problem;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;

use crate::control::{Control, ControlError};
use problem::Problem;

/// What the handlers see.
#[derive(Clone)]
pub(crate) struct Admin {
    pub(crate) control: Arc<Control>,
    /// Set when the gateway stops taking requests.
    pub(crate) draining: Arc<AtomicBool>,
}

impl Admin {
    /// Has the control plane do something that may block: it waits for the disk.
    async fn ask<T: Send + 'static>(
        self,
        work: impl FnOnce(&Control) -> Result<T, ControlError> + Send + 'static,
    ) -> Result<T, Problem> {
        match tokio::task::spawn_blocking(move || work(&self.control)).await {
            Ok(done) => done.map_err(Problem::from),
            Err(error) => {
                tracing::error!(%error, "an administration request panicked");
                Err(Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "see the gateway's log"))
            }
        }
    }
}

/// Serves the admin listener until `stopped` resolves, then what is under way.
pub(crate) async fn serve(
    listener: std::net::TcpListener,
    admin: Admin,
    stopped: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let router = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .nest("/api/v1", api::router(&admin))
        .with_state(admin);
    axum::serve(tokio::net::TcpListener::from_std(listener)?, router).with_graceful_shutdown(stopped).await
}

/// Ready: taking requests, every worker answering.
async fn ready(State(admin): State<Admin>) -> impl IntoResponse {
    if admin.draining.load(Ordering::Relaxed) {
        return (StatusCode::SERVICE_UNAVAILABLE, "draining\n".to_owned());
    }
    let workers = admin.control.workers();
    let answered = tokio::task::spawn_blocking(move || admin.control.reports().len()).await.unwrap_or(0);
    if answered == workers {
        (StatusCode::OK, "ready\n".to_owned())
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, format!("{answered} of {workers} workers answer\n"))
    }
}

async fn metrics(State(admin): State<Admin>) -> impl IntoResponse {
    let reports = tokio::task::spawn_blocking(move || admin.control.reports()).await.unwrap_or_default();
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], metrics::render(&reports))
}
