//! Check of the access log.

use std::path::Path;

use gw_base::process::disk::DiskSpace;
use gw_shared::doctor::Examination;
use rustix::fs::Access;

/// Checks that the access log can be appended to, without creating it.
pub(super) fn examine(out: &mut Examination, path: &Path) {
    let (object, need) = if path.exists() {
        (path, Access::WRITE_OK)
    } else {
        (
            path.parent().unwrap_or(path),
            Access::WRITE_OK | Access::EXEC_OK,
        )
    };
    let has_room = || DiskSpace::of(object).and_then(|space| space.check(0));
    match rustix::fs::access(object, need).map(|()| has_room()) {
        Ok(Ok(())) => out.ok("access_log", path.display().to_string()),
        Ok(Err(error)) => out.failed(
            "access_log",
            format!("{}: no lines are written: {error}", path.display()),
            "free some space, or name a file on another disk",
        ),
        Err(error) => out.failed(
            "access_log",
            format!(
                "{}: cannot write to {}: {error}",
                path.display(),
                object.display()
            ),
            "name a file in an existing folder that the user of the gateway may write to, or \
             \"stdout\"",
        ),
    }
}
