//! `/audit-log`

#![expect(unused_qualifications, reason = "of the code that utoipa::path writes for a type of its own file")]

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::admin::Admin;
use crate::admin::problem::{Problem, Query, ReadProblems};
use crate::control::ControlError;
use crate::page::{self, Page};
use crate::store::{AuditQuery, NumberedEntry};

pub(super) fn routes() -> OpenApiRouter<Admin> {
    OpenApiRouter::new().routes(routes!(list_audit_log))
}

/// Who changed what, when.
#[derive(Serialize, ToSchema)]
#[schema(as = AuditEntry)]
struct AuditEntryView {
    number: i64,
    #[schema(format = DateTime)]
    at: String,
    /// `admin`, `gateway`, `agent …` or `enrollment-token …`
    actor: String,
    /// For example `service.create`.
    action: String,
    account: Option<String>,
    target: String,
    /// What was asked for.
    detail: serde_json::Value,
}

impl From<NumberedEntry> for AuditEntryView {
    fn from(entry: NumberedEntry) -> Self {
        let NumberedEntry { number, at, actor, action, account, target, detail } = entry;
        Self { number, at: at.to_string(), actor, action, account, target, detail }
    }
}

/// Which entries.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Filter {
    /// Of this account only.
    account: Option<String>,
    /// Most items on the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<usize>,
    /// `next_cursor` of the page before.
    #[param(pattern = "^[0-9]{1,18}$")]
    cursor: Option<String>,
}

impl Filter {
    /// One entry more than the page has, to see whether it is the last.
    fn check(self) -> Result<(AuditQuery, usize), ControlError> {
        let limit = page::checked_limit(self.limit).map_err(ControlError::from)?;
        let before = self.cursor.map(|cursor| cursor.parse()).transpose();
        let before = before.map_err(|_| ControlError::invalid("cursor", "the next_cursor of a page"))?;
        Ok((AuditQuery { account: self.account, before, limit: limit + 1 }, limit))
    }
}

/// Show the audit log, the newest entry first.
#[utoipa::path(
    get, path = "/audit-log", tag = "audit-log", params(Filter),
    responses((status = 200, description = "A page", body = Page<AuditEntryView>), ReadProblems),
)]
async fn list_audit_log(
    State(admin): State<Admin>,
    Query(query): Query<Filter>,
) -> Result<Json<Page<AuditEntryView>>, Problem> {
    let (query, limit) = query.check()?;
    let mut entries = admin.ask(move |control| control.audit_log(&query)).await?;
    let more = entries.len() > limit;
    entries.truncate(limit);
    let next_cursor = entries.last().filter(|_| more).map(|entry| entry.number.to_string());
    Ok(Json(Page { items: entries.into_iter().map(AuditEntryView::from).collect(), next_cursor }))
}
