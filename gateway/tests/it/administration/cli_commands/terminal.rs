//! Output of commands on a terminal.

use std::process::Command;

use serde_json::json;

use super::{FakeApi, REQUEST_ID};
use crate::administration::hostile_text::assert_harmless;
use crate::support::programs;

#[test]
fn captured_bodies_are_escaped_on_a_terminal_only() {
    // JSON leaves these characters as they are.
    let body = json!("\u{9b}2J\u{202e}\u{7f}\u{2028}");
    let line = format!("request body {REQUEST_ID} response");
    let api = FakeApi::new(vec![(200, body.clone())]);
    let piped = api.command(&line).output().unwrap();
    assert_eq!(piped.stdout, body.to_string().into_bytes());

    if !programs::usable(&["script"]) {
        return;
    }
    let api = FakeApi::new(vec![(200, body)]);
    let command = format!("{} {line}", env!("CARGO_BIN_EXE_gw-gateway"));
    let shown = Command::new("script")
        .args(["-qec", &command, "/dev/null"])
        .env("GW_ADMIN_URL", &api.url)
        .env("GW_ADMIN_TOKEN", "t0ken")
        .output()
        .unwrap()
        .stdout;
    assert_harmless(&line, &shown);
    let shown = String::from_utf8(shown).unwrap();
    assert_eq!(shown, r#""\u{9b}2J\u{202e}\u{7f}\u{2028}""#);
}
