//! What gw-loadtest answers before it loads anything. The documentation tests of the gateway also
//! run the program; an integration test makes `cargo test --workspace` build it.

#![allow(clippy::unwrap_used, reason = "tests panic on unexpected errors")]

use std::process::{Command, Output};

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gw-loadtest"))
        .args(arguments)
        .output()
        .unwrap()
}

#[test]
fn the_help_names_the_scenarios() {
    let output = run(&["--help"]);
    let help = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{help}");
    for scenario in ["compare", "bulk", "region"] {
        let is_listed = help
            .lines()
            .any(|line| line.trim_start().starts_with(scenario));
        assert!(is_listed, "{scenario} is missing:\n{help}");
    }
}

#[test]
fn a_missing_gateway_is_an_error_that_names_its_path() {
    let output = run(&["--gateway", "/missing/gw-gateway", "bulk"]);
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("/missing/gw-gateway"), "{message}");
}
