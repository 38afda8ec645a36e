//! The audit log.

use askama::Template;
use axum::extract::{Query, State};
use axum::response::Response;
use gw_base::page::Page;
use gw_store::AuditQuery;
use serde::Deserialize;

use crate::admin::Admin;
use crate::admin::console::web::failure::ErrorPage;
use crate::admin::console::web::format;
use crate::admin::console::web::page::{Chrome, Section, Visit, render};
use crate::control::AuditEntryView;
use crate::control::changes::audit;

const ENTRIES: usize = 50;

#[derive(Template)]
#[template(path = "audit.html")]
struct AuditPage {
    chrome: Chrome,
    entries: Vec<AuditEntryView>,
    account: String,
    /// Cursor of the older entries.
    before: Option<String>,
}

#[derive(Deserialize)]
pub(crate) struct AuditFilter {
    account: Option<String>,
    before: Option<i64>,
}

pub(crate) async fn list(
    State(admin): State<Admin>,
    visit: Visit,
    Query(filter): Query<AuditFilter>,
) -> Result<Response, ErrorPage> {
    let account = filter
        .account
        .map(|account| account.trim().to_owned())
        .filter(|account| !account.is_empty());
    let query = AuditQuery {
        account: account.clone(),
        before: filter.before,
        limit: ENTRIES,
    };
    let Page {
        items: entries,
        next_cursor: before,
    } = admin
        .look(move |control| audit::list(control, &query))
        .await?;
    let chrome = visit.chrome(Section::AuditLog, "Audit log");
    render(&AuditPage {
        chrome,
        entries,
        account: account.unwrap_or_default(),
        before,
    })
}
