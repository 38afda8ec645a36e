//! Check of the disk space of the request log.

use gw_interface::config::Config;
use gw_shared::doctor::Examination;
use gw_telemetry::request_log::LogDisk;

/// Checks that the request log has room for all days that it keeps.
pub(super) fn examine(out: &mut Examination, config: &Config) {
    const CHECK: &str = "request log";
    let folder = config.data_dir.join("requests");
    // Without one, the gateway has not run yet, or the check of `data_dir` has failed.
    let Ok(disk) = LogDisk::measure(&folder, config.request_log_max_bytes) else {
        return;
    };
    let [used, most] = [disk.used >> 20, disk.most >> 20];
    let found = format!("{}: {used} of {most} MiB", folder.display());
    if let Err(error) = disk.space.check(0) {
        let found = format!("{found}; no records are written");
        out.failed(CHECK, found, error.to_string());
    } else if let Some(day) = disk.removed {
        let found = format!("{found}; the days until {day} were removed before their time");
        out.warning(CHECK, found, "raise request_log_max_bytes");
    } else {
        out.ok(CHECK, found);
    }
}
