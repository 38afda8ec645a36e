//! The agent's program as a user meets it.

#![allow(clippy::unwrap_used, reason = "tests stop at the first surprise")]

use std::process::Command;

fn gw_agent(arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_gw-agent")).args(arguments).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn an_agent_that_is_not_enrolled_exits_with_2_and_says_so() {
    let state = tempfile::tempdir().unwrap();
    let (code, message) = gw_agent(&["run", "--state-dir", state.path().to_str().unwrap()]);
    assert_eq!(code, Some(2));
    assert!(message.starts_with("gw-agent: not enrolled: ") && message.contains("agent.json"), "{message}");
}

#[test]
fn bad_usage_exits_with_2() {
    assert_eq!(gw_agent(&["walk"]).0, Some(2));
}
