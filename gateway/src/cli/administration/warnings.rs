//! The warnings and the audit log of a running gateway, for `doctor`.

use std::path::Path;

use gw_control_plane::control::{AuditVerificationView, WarningsView};
use gw_shared::doctor::{Examination, Verdict};
use http::Method;

use crate::cli::client::api::Api;
use crate::cli::client::connection::AdminConnection;

/// Asks the gateway with this configuration file, if it runs, which of its services need attention,
/// and whether its audit log is as it was written.
pub(crate) fn examine(out: &mut Examination, config: &Path) {
    const CHECK: &str = "services";
    let is_valid = |check: &str, verdict| check == "configuration" && verdict == Verdict::Ok;
    if !out
        .checks()
        .iter()
        .any(|finding| is_valid(&finding.check, finding.verdict))
    {
        return;
    }
    let not_checked = |reason: &str| format!("not checked: {reason}");
    let api = match AdminConnection::of(config).open_api() {
        Ok(api) => api,
        Err(failure) => return out.ok(CHECK, not_checked(failure.message())),
    };
    let reply = api.request(Method::GET, "/warnings");
    let reply = reply.and_then(|reply| reply.parse::<WarningsView>());
    if let Some(found) = reply.iter().find_map(|it| it.store.clone()) {
        let advice = "see docs/region-operation.md, Two primaries";
        out.failed("store: in use", found, advice);
    }
    match reply {
        Err(error) if error.is_connection_refused() => {
            return out.ok(CHECK, not_checked("the gateway does not run"));
        }
        Err(error) => {
            let advice = "see the log of the gateway; `GET /api/v1/warnings` asks the same";
            return out.warning(CHECK, not_checked(&error.to_string()), advice);
        }
        Ok(WarningsView { items, .. }) if items.is_empty() => {
            out.ok(
                CHECK,
                "no service with several agents depends on one of them, no tunnel was full, and no \
                 own domain needs attention",
            );
        }
        Ok(WarningsView { items, .. }) => {
            for warning in items {
                let check = format!("service {}/{}", warning.account, warning.service);
                out.warning(check, warning.found, warning.remedy);
            }
        }
    }
    audit_log(out, &api);
}

fn audit_log(out: &mut Examination, api: &Api) {
    const CHECK: &str = "audit log";
    let reply = api.request(Method::GET, "/audit-log/verification");
    match reply.and_then(|reply| reply.parse::<AuditVerificationView>()) {
        Err(error) => {
            let advice = "see the log of the gateway; `gw-gateway audit verify` does the same";
            out.warning(CHECK, format!("not checked: {error}"), advice);
        }
        Ok(found) if found.valid => out.ok(CHECK, format!("{} entries, as written", found.entries)),
        Ok(found) => out.warning(
            CHECK,
            format!(
                "{} problems: entries are not as written",
                found.problem_count
            ),
            "`gw-gateway audit verify` names the entries; end the access to the database that is \
             not a gateway's",
        ),
    }
}
