//! Integration tests use what users see: the inside of the product is for the files of
//! `inside.toml`.

use std::collections::BTreeMap;
use std::fs;

use super::{first_name, rust_files, workspace};

/// Crates whose items a test can name although no user sees them.
const INSIDE: [&str; 10] = [
    "gw_acme",
    "gw_agent",
    "gw_base",
    "gw_control_plane",
    "gw_data_plane",
    "gw_gateway",
    "gw_interface",
    "gw_region",
    "gw_store",
    "gw_telemetry",
];

/// Most files that may use the inside.
const MOST: usize = 12;

#[test]
fn integration_tests_use_the_public_surface() {
    let list = fs::read_to_string(workspace().join("gateway/tests/tidy/inside.toml")).unwrap();
    let list: BTreeMap<String, String> = toml::from_str(&list).unwrap();
    assert!(list.len() <= MOST, "{} files in inside.toml", list.len());
    let without_reason = list.iter().find(|(_, reason)| reason.len() < 20);
    assert_eq!(without_reason, None, "a file of inside.toml has no reason");
    let mut users: Vec<String> = rust_files(&workspace().join("gateway/tests/it"))
        .into_iter()
        .filter(|(_, text)| uses_the_inside(text))
        .map(|(path, _)| path.display().to_string())
        .collect();
    users.sort();
    let listed: Vec<String> = list.into_keys().collect();
    assert_eq!(users, listed, "files that use the inside, and inside.toml");
}

/// Whether code mentions one of the crates. Names in strings and comments, such as that of a
/// program, are no use.
fn uses_the_inside(text: &str) -> bool {
    text.lines().any(|line| {
        let code = line.split("//").next().unwrap_or_default();
        code.match_indices("gw_").any(|(at, _)| {
            let name = first_name(&code[at..]);
            let is_whole = !code[..at].ends_with(|char: char| char.is_alphanumeric());
            let is_path = code[at + name.len()..].starts_with("::");
            is_whole && is_path && INSIDE.contains(&name.as_str())
        })
    })
}

#[test]
fn uses_of_the_inside_are_found() {
    for text in [
        "use gw_store::Store;",
        "let rate = gw_base::service::rate::Rate::new(1, 1);",
        "fn start() -> gw_gateway::Gateway {",
    ] {
        assert!(uses_the_inside(text), "{text}");
    }
    for text in [
        "use gw_shared::id::AgentId;",
        "// As gw_store::Store does.",
        "assert_eq!(metric(\"gw_store_revision\"), 1);",
        "let process = gw_gateway();",
    ] {
        assert!(!uses_the_inside(text), "{text}");
    }
}
