//! Checks of the archive: the secret, the region key, and the bucket.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use gw_interface::config::Config;
use gw_shared::doctor::Examination;
use gw_telemetry::request_log::archive::{self, ArchiveSettings, CheckStep};

const ARCHIVE: &str = "archive";

/// Checks whether this configuration can write, list, read and delete an object.
pub(super) fn examine(out: &mut Examination, config: &Config, settings: &ArchiveSettings) {
    secret_key_file(out, settings);
    let keys = match config.region_keys() {
        Ok(Some(keys)) => keys,
        Ok(None) => return,
        Err(error) => {
            let advice = "the archive is encrypted with a key derived from it; docs/request-log.md \
                          says how to make one";
            return out.failed(ARCHIVE, error.to_string(), advice);
        }
    };
    match archive::check(settings, &keys, config.region.apex()) {
        Ok(place) => out.ok(
            ARCHIVE,
            format!("{place}: an object was written, listed, read and deleted"),
        ),
        Err((step, error)) => {
            let advice = match step {
                CheckStep::Write => {
                    "check archive.url, archive.endpoint, archive.region and the access key; it \
                     needs s3:PutObject"
                }
                CheckStep::List => {
                    "allow the access key s3:ListBucket on the bucket: the archive cannot be read \
                     without"
                }
                CheckStep::Read => "allow the access key s3:GetObject below the prefix",
                CheckStep::Delete => {
                    "allow the access key s3:DeleteObject below the prefix: expired records are \
                     not removed without"
                }
            };
            out.failed(ARCHIVE, format!("{}: {error}", settings.place()), advice);
        }
    }
}

/// The secret must be readable by this user alone.
fn secret_key_file(out: &mut Examination, settings: &ArchiveSettings) {
    const CHECK: &str = "archive.secret_key_file";
    let Some(path) = &settings.secret_key_file else {
        return;
    };
    let name = path.display();
    match fs::metadata(path).map(|metadata| metadata.permissions().mode() & 0o777) {
        // A group may read it: service managers pass secrets on that way.
        Ok(mode) if mode & 0o027 != 0 => out.failed(
            CHECK,
            format!("{name}: other users can read it (mode {mode:03o})"),
            format!("it holds a secret: chmod 600 {name}"),
        ),
        Ok(_) => out.ok(CHECK, format!("{name}: not readable by other users")),
        Err(error) => out.failed(
            CHECK,
            format!("{name}: {error}"),
            "give it to the user of the gateway",
        ),
    }
}
