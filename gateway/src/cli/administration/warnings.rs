//! The warnings of a running gateway, for `doctor`.

use std::path::Path;

use gw_control_plane::control::WarningsView;
use gw_shared::doctor::{Examination, Verdict};
use http::Method;

use crate::cli::client::connection::AdminConnection;

/// Asks the gateway with this configuration file, if it runs, which of its services need attention.
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
    match api
        .request(Method::GET, "/warnings")
        .and_then(|reply| reply.parse::<WarningsView>())
    {
        Err(error) if error.is_connection_refused() => {
            out.ok(CHECK, not_checked("the gateway does not run"));
        }
        Err(error) => out.ok(CHECK, not_checked(&error.to_string())),
        Ok(WarningsView { items, .. }) if items.is_empty() => {
            out.ok(
                CHECK,
                "no service with several agents depends on one of them, no tunnel was full, and no own domain needs attention",
            );
        }
        Ok(WarningsView { items, .. }) => {
            for warning in items {
                let check = format!("service {}/{}", warning.account, warning.service);
                out.warning(check, warning.found, warning.remedy);
            }
        }
    }
}
