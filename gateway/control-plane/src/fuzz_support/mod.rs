//! Targets of gateway/fuzz/: what the control plane reads from administrators, other nodes and
//! files. Not a public interface. As in `gw_data_plane::support::fuzz`, a target takes any bytes
//! and panics if an invariant does not hold.

#![expect(
    clippy::expect_used,
    reason = "a target fails by panicking, and what it sets up must exist"
)]

mod admin_api;
mod backup_file;
mod node_state;

#[cfg(test)]
#[path = "../../../fuzz/corpus_test/mod.rs"]
mod corpus_test;

use std::path::Path;

use tempfile::TempDir;

#[cfg(test)]
pub(crate) use self::admin_api::NoWorkers;
pub use self::admin_api::admin_api;
pub use self::backup_file::backup_file;
pub use self::node_state::node_state;

/// Targets with the name of their wrapper in fuzz/fuzz_targets/ and of their folder in
/// fuzz/corpus/.
#[expect(clippy::type_complexity, reason = "a table of two columns")]
pub const TARGETS: &[(&str, fn(&[u8]))] = &[
    ("admin_api", admin_api),
    ("backup_file", backup_file),
    ("node_state", node_state),
];

/// A folder in memory if the system has one: the control plane syncs its files.
fn memory_folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() {
        tempfile::tempdir_in(memory)
    } else {
        tempfile::tempdir()
    };
    folder.expect("a folder for temporary files")
}

#[cfg(test)]
#[test]
fn every_target_has_a_wrapper_and_a_corpus_and_passes_it() {
    corpus_test::run("gw_control_plane::fuzz_support", TARGETS);
}
