//! The admin listener: health, readiness and metrics of this process.

mod metrics;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;

use crate::control::Control;

/// What the handlers see.
#[derive(Clone)]
pub(crate) struct Admin {
    pub(crate) control: Arc<Control>,
    /// Set when the gateway stops taking requests.
    pub(crate) draining: Arc<AtomicBool>,
}

/// Serves the admin listener until the process ends.
pub(crate) async fn serve(listener: std::net::TcpListener, admin: Admin) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let router = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(admin);
    axum::serve(tokio::net::TcpListener::from_std(listener)?, router).await
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
