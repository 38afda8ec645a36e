//! The web console: pages for the administrator's browser, made here, of the same functions of the control plane as the
//! API. Forms and links do everything; scripts refresh what is live, draw charts and copy secrets.

mod pages;
mod web;

use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{get, post};

use super::Admin;
use crate::control::{Control, ControlError};
use crate::limit::AddressLimits;
use crate::rate::Rate;
use crate::telemetry::request_log::RequestLog;
use pages::{
    accounts, agents, audit, caller_secrets, enrollment, overview, replay, requests, services, sign_in, traffic,
    tunnels,
};
use web::failure::Failure;
use web::form::FORM_MAX;
use web::session::Sessions;
use web::{assets, guard, theme};

/// Failed attempts to sign in, of one client address.
const SIGN_IN_FAILURES: Rate = Rate::new(10, 10).unwrap();

/// What the console remembers while the process runs.
pub(super) struct Console {
    sessions: Sessions,
    failures: Mutex<AddressLimits>,
    /// Where callers and agents connect, for the commands that pages propose.
    port: u16,
}

impl Console {
    pub(super) fn new(port: u16) -> Self {
        Self { sessions: Sessions::default(), failures: Mutex::new(AddressLimits::new(SIGN_IN_FAILURES)), port }
    }

    /// Where callers and agents connect.
    pub(super) fn port(&self) -> u16 {
        self.port
    }

    fn failures(&self) -> std::sync::MutexGuard<'_, AddressLimits> {
        // Whole at any time.
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Admin {
    /// Has the control plane do something that may block, for a page.
    async fn look<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Control) -> Result<T, ControlError> + Send + 'static,
    ) -> Result<T, Failure> {
        Ok(self.attempt(work).await??)
    }

    /// The same for a form, which has something to say about most errors.
    async fn attempt<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Control) -> Result<T, ControlError> + Send + 'static,
    ) -> Result<Result<T, ControlError>, Failure> {
        self.clone().run(work).await.map_err(Failure::from)
    }

    /// As [`Self::look`], with the request log at hand.
    async fn look_with_log<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Control, &RequestLog) -> Result<T, ControlError> + Send + 'static,
    ) -> Result<T, Failure> {
        Ok(self.attempt_with_log(work).await??)
    }

    async fn attempt_with_log<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Control, &RequestLog) -> Result<T, ControlError> + Send + 'static,
    ) -> Result<Result<T, ControlError>, Failure> {
        let log = Arc::clone(&self.request_log);
        self.attempt(move |control| work(control, &log)).await
    }
}

/// Every page. What needs a session is behind [`guard::signed_in`], everything behind the rest of `guard`.
pub(super) fn router(admin: &Admin) -> Router<Admin> {
    Router::new()
        .route("/", get(overview::show))
        .route("/accounts", get(accounts::list).post(accounts::create))
        .route("/accounts/{account}", get(services::list).post(services::create))
        .route("/accounts/{account}/new-service", get(services::new))
        .route("/accounts/{account}/services/{service}", get(services::show).post(services::change))
        .route("/accounts/{account}/services/{service}/delete", post(services::delete))
        .merge(caller_secrets::routes())
        .route("/accounts/{account}/agents", get(agents::list))
        .route("/accounts/{account}/agents/{agent}", get(agents::show).post(agents::change))
        .route("/accounts/{account}/agents/{agent}/approve", post(agents::approve))
        .route("/accounts/{account}/agents/{agent}/revoke", post(agents::revoke))
        .route("/accounts/{account}/agents/{agent}/delete", post(agents::delete))
        .route("/accounts/{account}/new-agent", get(enrollment::new).post(enrollment::create))
        .route("/accounts/{account}/enrollment-tokens/{id}/delete", post(enrollment::delete))
        .route("/accounts/{account}/settings", get(accounts::settings).post(accounts::change))
        .route("/accounts/{account}/delete", post(accounts::delete))
        .route("/tunnels", get(tunnels::show))
        .route("/requests", get(requests::search))
        .route("/requests/{id}", get(requests::show))
        .route("/requests/{id}/body/{side}", get(requests::body))
        .route("/requests/{id}/replay", get(replay::form).post(replay::replay))
        .route("/traffic", get(traffic::show))
        .route("/traffic/series", get(traffic::series))
        .route("/audit-log", get(audit::list))
        .route("/theme", post(theme::set))
        .route("/sign-out", post(sign_in::sign_out))
        .layer(from_fn_with_state(admin.clone(), guard::signed_in))
        .route("/sign-in", get(sign_in::form).post(sign_in::sign_in))
        .route("/assets/{version}/{name}", get(assets::serve))
        .method_not_allowed_fallback(async || Failure::method_not_allowed())
        .fallback(async || Failure::nothing_here())
        .layer(DefaultBodyLimit::max(FORM_MAX))
        .layer(from_fn_with_state(admin.clone(), guard::own_host))
        .layer(from_fn(guard::hardened))
}
