//! The web console: server-rendered pages for the administrator's browser, on the same functions of
//! the control plane as the API. Everything works with forms and links; scripts refresh live data,
//! draw charts and copy secrets.

mod pages;
mod web;

use std::sync::{Mutex, PoisonError};

use crate::limits;
use axum::Router;
use axum::middleware::{from_fn, from_fn_with_state, map_request};
use axum::routing::{get, post};
use gw_base::service::rate::Rate;
use gw_interface::rate_limit::{AddressKey, ClientLimits};
use tokio::sync::Semaphore;

use super::Admin;
use super::nodes::await_console_change;
use crate::control::{Control, ControlError};
use crate::http_server::limit_body;
use pages::records::{accounts, agents, caller_secrets, domains, enrollment, services};
use pages::{audit, overview, region, replay, requests, sign_in, traffic, tunnels, usage};
use web::failure::ErrorPage;
use web::own_name::Moves;
use web::session::Sessions;
pub(super) use web::session::{LIFETIME, SessionKey};
use web::{assets, guard, theme};

/// Rate of failed sign-in attempts of one client address.
const SIGN_IN_FAILURES: Rate = Rate::new(10, 10).unwrap();

/// Sessions about which other nodes are asked at the same time.
const SESSION_QUESTIONS: usize = 16;

/// State of the console while the process runs.
pub(super) struct Console {
    sessions: Sessions,
    /// Sessions on their way to names of their own.
    moves: Moves,
    /// Limits the questions to other nodes about sessions that are not known here.
    session_questions: Semaphore,
    failures: Mutex<ClientLimits<AddressKey>>,
    /// Port for callers and agents, for the commands that pages suggest.
    port: u16,
}

impl Console {
    pub(super) fn new(port: u16) -> Self {
        Self {
            sessions: Sessions::default(),
            moves: Moves::default(),
            session_questions: Semaphore::new(SESSION_QUESTIONS),
            failures: Mutex::new(ClientLimits::new(SIGN_IN_FAILURES)),
            port,
        }
    }

    pub(super) fn sessions(&self) -> &Sessions {
        &self.sessions
    }

    pub(super) fn session_questions(&self) -> &Semaphore {
        &self.session_questions
    }

    /// Port for callers and agents.
    pub(super) fn port(&self) -> u16 {
        self.port
    }

    fn failures(&self) -> std::sync::MutexGuard<'_, ClientLimits<AddressKey>> {
        // Consistent even after a panic.
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Admin {
    /// Runs work on the control plane for a page; errors become an error page.
    async fn look<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Control) -> Result<T, ControlError> + Send + 'static,
    ) -> Result<T, ErrorPage> {
        Ok(self.attempt(work).await??)
    }

    /// As [`Self::look`] for a form, which shows most errors itself.
    async fn attempt<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Control) -> Result<T, ControlError> + Send + 'static,
    ) -> Result<Result<T, ControlError>, ErrorPage> {
        self.clone().run(work).await.map_err(ErrorPage::from)
    }
}

/// Routes of all pages. [`guard::signed_in`] protects those that need a session; the rest of
/// `guard` protects all.
pub(super) fn router(admin: &Admin) -> Router<Admin> {
    let replay = Router::new()
        .route(
            "/requests/{id}/replay",
            get(replay::form).post(replay::replay),
        )
        .layer(from_fn_with_state(admin.clone(), guard::signed_in))
        .layer(map_request(limit_body::<{ limits::ADMIN_REPLAY }>));
    let sign_in = Router::new()
        .route("/sign-in", get(sign_in::form).post(sign_in::sign_in))
        .layer(map_request(limit_body::<{ limits::ADMIN_SIGN_IN }>));
    Router::new()
        .route("/", get(overview::show))
        .route("/accounts", get(accounts::list).post(accounts::create))
        .merge(of_accounts())
        .route("/region", get(region::show))
        .route("/tunnels", get(tunnels::show))
        .route("/requests", get(requests::search))
        .route("/requests/{id}", get(requests::show))
        .route("/requests/{id}/body/{side}", get(requests::body))
        .route("/traffic", get(traffic::show))
        .route("/traffic/series", get(traffic::series))
        .route("/usage", get(usage::list))
        .route("/audit-log", get(audit::list))
        .route("/theme", post(theme::set))
        .route("/sign-out", post(sign_in::sign_out))
        .layer(from_fn_with_state(admin.clone(), guard::signed_in))
        .merge(sign_in)
        .route("/sign-in/finish", get(sign_in::finish))
        .layer(from_fn_with_state(admin.clone(), await_console_change))
        // A replay is a request, not a change: other nodes need not know of it.
        .merge(replay)
        .route("/assets/{version}/{name}", get(assets::serve))
        .method_not_allowed_fallback(async || ErrorPage::method_not_allowed())
        .fallback(async || ErrorPage::nothing_here())
        .layer(from_fn(guard::own_origin))
        .layer(from_fn(guard::hardened))
}

/// Routes of the pages of one account.
fn of_accounts() -> Router<Admin> {
    Router::new()
        .route(
            "/accounts/{account}",
            get(services::list).post(services::create),
        )
        .route("/accounts/{account}/new-service", get(services::new))
        .route(
            "/accounts/{account}/services/{service}",
            get(services::show).post(services::change),
        )
        .route(
            "/accounts/{account}/services/{service}/delete",
            post(services::delete),
        )
        .merge(domains::routes())
        .merge(caller_secrets::routes())
        .route("/accounts/{account}/agents", get(agents::list))
        .route(
            "/accounts/{account}/agents/{agent}",
            get(agents::show).post(agents::change),
        )
        .route(
            "/accounts/{account}/agents/{agent}/approve",
            post(agents::approve),
        )
        .route(
            "/accounts/{account}/agents/{agent}/revoke",
            post(agents::revoke),
        )
        .route(
            "/accounts/{account}/agents/{agent}/delete",
            post(agents::delete),
        )
        .route(
            "/accounts/{account}/new-agent",
            get(enrollment::new).post(enrollment::create),
        )
        .route(
            "/accounts/{account}/enrollment-tokens/{id}/delete",
            post(enrollment::delete),
        )
        .route(
            "/accounts/{account}/settings",
            get(accounts::settings).post(accounts::change),
        )
        .route("/accounts/{account}/delete", post(accounts::delete))
}
