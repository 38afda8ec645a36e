//! `/audit-log`

#![expect(
    unused_qualifications,
    reason = "of the code that utoipa::path writes for a type of its own file"
)]

use axum::Json;
use axum::extract::State;
use gw_base::page::{self, Page};
use gw_store::{AuditHead, AuditQuery, InvalidHead};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::admin::Admin;
use crate::admin::problem::{Problem, Query, ReadProblems};
use crate::control::changes::audit;
use crate::control::{AuditEntryView, AuditVerificationView, ControlError};

pub(crate) fn routes() -> OpenApiRouter<Admin> {
    OpenApiRouter::new()
        .routes(routes!(list_audit_log))
        .routes(routes!(verify_audit_log))
}

/// Which entries.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct AuditLogFilter {
    /// Entries of this account only.
    account: Option<String>,
    /// Most items on the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<usize>,
    /// `next_cursor` of the page before.
    #[param(pattern = "^[0-9]{1,18}$")]
    cursor: Option<String>,
}

impl AuditLogFilter {
    fn check(self) -> Result<AuditQuery, ControlError> {
        let limit = page::checked_limit(self.limit).map_err(ControlError::from)?;
        let before = self.cursor.map(|cursor| cursor.parse()).transpose();
        let before = before
            .map_err(|_| ControlError::invalid("cursor", "must be the next_cursor of a page"))?;
        Ok(AuditQuery {
            account: self.account,
            before,
            limit,
        })
    }
}

/// Show the audit log, the newest entry first.
#[utoipa::path(
    get, path = "/audit-log", tag = "audit-log", params(AuditLogFilter),
    responses((status = 200, description = "A page", body = Page<AuditEntryView>), ReadProblems),
)]
async fn list_audit_log(
    State(admin): State<Admin>,
    Query(query): Query<AuditLogFilter>,
) -> Result<Json<Page<AuditEntryView>>, Problem> {
    let query = query.check()?;
    admin
        .ask(move |control| audit::list(control, &query))
        .await
        .map(Json)
}

/// What to compare the log with.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct NotedHeads {
    /// Heads that were noted before, each as `NUMBER:HASH`, with commas between.
    #[param(pattern = "^([0-9]{1,18}:[0-9a-fA-F]{64}(,[0-9]{1,18}:[0-9a-fA-F]{64})*)?$")]
    heads: Option<String>,
}

impl NotedHeads {
    fn check(self) -> Result<Vec<AuditHead>, ControlError> {
        let heads = self.heads.filter(|heads| !heads.is_empty());
        let heads = heads.iter().flat_map(|heads| heads.split(','));
        heads
            .map(|head| {
                head.parse()
                    .map_err(|error: InvalidHead| ControlError::invalid("heads", error.to_string()))
            })
            .collect()
    }
}

/// Check the chain of the audit log: that no entry was changed, added or removed. Compares it with
/// the heads in the archive, and with given ones. Reads the whole log.
#[utoipa::path(
    get, path = "/audit-log/verification", tag = "audit-log", params(NotedHeads),
    responses(
        (status = 200, description = "What was found", body = AuditVerificationView),
        ReadProblems,
    ),
)]
async fn verify_audit_log(
    State(admin): State<Admin>,
    Query(noted): Query<NotedHeads>,
) -> Result<Json<AuditVerificationView>, Problem> {
    let mut heads = noted.check()?;
    let archived = admin.archived_audit_heads().await?;
    let archive_error = match archived {
        Ok(archived) => {
            heads.extend(archived);
            None
        }
        Err(error) => Some(error),
    };
    let findings = admin
        .ask(move |control| audit::verify(control, heads))
        .await?;
    Ok(Json(AuditVerificationView::new(findings, archive_error)))
}
