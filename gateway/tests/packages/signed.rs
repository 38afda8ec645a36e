//! Files that packaging/sign has signed.

use std::path::Path;
use std::process::Command;

use crate::{FOLDER, programs, repository, run};

#[test]
fn a_signed_download_is_verified_by_the_documented_commands_and_by_apt() {
    if !programs::usable(&["dpkg-scanpackages", "openssl", "python3"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    run(Command::new("bash")
        .arg(Path::new(FOLDER).join("signed.sh"))
        .arg(repository())
        .arg(env!("CARGO_BIN_EXE_gw-gateway"))
        .current_dir(&folder));
    assert!(folder.path().join("passed").exists());
}
