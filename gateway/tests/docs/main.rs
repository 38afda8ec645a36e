//! The documentation and the examples agree with the programs, and the commands in them work.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod commands;
mod configuration;
mod figures;
mod files;
mod golden;
mod limits;
mod links;
mod names;
mod openapi;
mod paths;
mod scripts;
mod sources;
#[allow(dead_code, reason = "shared with other tests")]
#[path = "../it/support/mod.rs"]
mod support;
mod usage;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use support::programs;

/// The folder of the repository.
fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_owned()
}

/// The text of a file, by its path in the repository.
fn read(path: &str) -> String {
    fs::read_to_string(repository().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Asserts that a page has all of `expected` and nothing else of the kind.
fn assert_same(page: &str, found: impl IntoIterator<Item = String>, expected: &BTreeSet<String>) {
    let found: BTreeSet<String> = found.into_iter().collect();
    let missing: Vec<_> = expected.difference(&found).collect();
    let unknown: Vec<_> = found.difference(expected).collect();
    assert!(
        missing.is_empty() && unknown.is_empty(),
        "{page} lacks {missing:?} and must not have {unknown:?}"
    );
}

/// As `wc -w` counts them. What is longer belongs into docs/.
#[test]
fn the_readme_has_at_most_900_words() {
    let words = read("README.md").split_whitespace().count();
    assert!(words <= 900, "README.md has {words} words");
}
