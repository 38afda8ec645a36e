//! Exit codes and error messages of the agent program.

#![allow(clippy::unwrap_used, reason = "tests panic on unexpected errors")]

use std::net::{Ipv4Addr, SocketAddrV4};
use std::process::Command;

use rustix::net::{AddressFamily, SocketType};

fn gw_agent(arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gw-agent"));
    let output = command.args(arguments).env_remove("GW_ENROLLMENT_TOKEN").env_remove("GW_STATE_DIR").output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn run_without_enrollment_exits_with_2() {
    let state = tempfile::tempdir().unwrap();
    let (code, message) = gw_agent(&["run", "--state-dir", state.path().to_str().unwrap()]);
    assert_eq!(code, Some(2));
    assert!(message.starts_with("gw-agent: not enrolled: ") && message.contains("agent.json"), "{message}");
}

#[test]
fn enroll_with_missing_options_exits_with_2_and_names_them() {
    let state = tempfile::tempdir().unwrap();
    let (code, message) = gw_agent(&["enroll", "--state-dir", state.path().to_str().unwrap(), "--ca-file", "/none"]);
    assert_eq!(code, Some(2));
    for option in ["--gateway: ", "--token: ", "--ca-file: /none: "] {
        assert!(message.contains(option), "{option}: {message}");
    }
}

#[test]
fn enroll_at_an_unreachable_gateway_exits_with_1() {
    let state = tempfile::tempdir().unwrap();
    // Bound but not listening: connections are refused and the port stays reserved.
    let closed = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&closed, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
    let gateway = format!("https://{}", SocketAddrV4::try_from(rustix::net::getsockname(&closed).unwrap()).unwrap());
    let (folder, token) = (state.path().to_str().unwrap(), "gw_et_0123456789abcdef.secret");
    let (code, message) = gw_agent(&["enroll", "--state-dir", folder, "--gateway", &gateway, "--token", token]);
    assert_eq!(code, Some(1));
    assert!(message.contains("cannot be reached") && !message.contains(token), "{message}");
}

#[test]
fn invalid_arguments_exit_with_2() {
    assert_eq!(gw_agent(&["walk"]).0, Some(2));
}

#[test]
fn http_checks_its_backend_before_the_token_is_used() {
    let state = tempfile::tempdir().unwrap();
    let folder = state.path().to_str().unwrap();
    let (code, message) = gw_agent(&["http", "65536", "--state-dir", folder, "--gateway", "https://eu1.gw.localhost"]);
    assert_eq!(code, Some(2));
    assert!(message.contains("1 to 65535"), "{message}");
    let (code, message) = gw_agent(&["http", "3000", "--state-dir", folder]);
    assert_eq!(code, Some(2));
    assert!(message.contains("--gateway: missing") && message.contains("--token: missing"), "{message}");
}
