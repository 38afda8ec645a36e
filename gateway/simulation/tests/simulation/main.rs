//! The simulation itself: what it repeats, what it shrinks, what its program prints; and the
//! scenarios that failed once.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests stop at the first surprise"
)]

mod determinism;
mod program;
mod regressions;
mod shrinking;

use std::path::Path;
use std::process::{Command, Output};

/// The folder of this crate, which other machines have elsewhere.
fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Runs the program.
fn gw_simulation(arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_gw-simulation");
    Command::new(program).args(arguments).output().unwrap()
}

/// What the program has printed.
fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}
