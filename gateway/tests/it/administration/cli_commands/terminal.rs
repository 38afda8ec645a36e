//! What a command prints on a terminal.

use std::process::Command;

use serde_json::json;

use super::{FakeApi, gw_gateway};
use crate::administration::hostile_text::assert_harmless;
use crate::support::programs;

const ID: &str = "019aa5c2-7e30-7c3b-8f11-2d5a4c9e1b07";

#[test]
fn captured_bodies_are_escaped_on_a_terminal_only() {
    // JSON leaves these characters as they are.
    let body = json!("\u{9b}2J\u{202e}\u{7f}\u{2028}");
    let line = format!("request body {ID} response");
    let piped_api = FakeApi::new(vec![(200, body.clone())]);
    let mut piped = gw_gateway(&line);
    let piped = piped
        .env("GW_ADMIN_URL", &piped_api.url)
        .env("GW_ADMIN_TOKEN", "t0ken")
        .output()
        .unwrap();
    assert_eq!(piped.stdout, body.to_string().into_bytes());

    if !programs::usable(&["script"]) {
        return;
    }
    let api = FakeApi::new(vec![(200, body)]);
    let mut script = Command::new("script");
    script.args([
        "-qec",
        &format!("{} {line}", env!("CARGO_BIN_EXE_gw-gateway")),
        "/dev/null",
    ]);
    let shown = script
        .env("GW_ADMIN_URL", &api.url)
        .env("GW_ADMIN_TOKEN", "t0ken")
        .output()
        .unwrap()
        .stdout;
    assert_harmless(&line, &shown);
    assert_eq!(
        String::from_utf8(shown).unwrap(),
        r#""\u{9b}2J\u{202e}\u{7f}\u{2028}""#
    );
}
