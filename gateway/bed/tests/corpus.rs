//! Runs the targets of gateway/fuzz/src/ on their corpus, and checks its signed files.
#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a target fails by panicking; it is public in its package"
)]

#[path = "../../fuzz/corpus_test/mod.rs"]
mod corpus_test;
#[path = "../../fuzz/src/lib.rs"]
mod targets;

use std::fs;
use std::path::Path;

use self::targets::{TARGETS, access_tokens, agent_programs, announcements};

#[test]
fn every_target_has_a_wrapper_and_a_corpus_and_passes_it() {
    corpus_test::run("gw_gateway_fuzz", TARGETS);
}

/// With other tokens, the fuzzer's mutations would all fail at the signature.
#[test]
fn the_corpus_has_the_tokens_that_the_target_signs() {
    for (name, value) in access_tokens() {
        assert_in_corpus("access_token", name, value.as_bytes());
    }
}

/// The statements name the architecture of this machine.
#[cfg(target_arch = "x86_64")]
#[test]
fn the_corpus_has_the_statements_that_the_target_signs() {
    for (name, statement) in agent_programs() {
        let json = serde_json::to_vec(&statement).unwrap();
        assert_in_corpus("agent_program", name, &json);
    }
}

#[test]
fn the_corpus_has_the_announcements_that_the_target_signs() {
    for (name, header, _) in announcements() {
        assert_in_corpus("announcement", name, &header);
    }
}

/// With `GW_TEST_UPDATE_GOLDEN`, writes the file.
fn assert_in_corpus(target: &str, name: &str, value: &[u8]) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus");
    let file = corpus.join(target).join(name);
    if std::env::var_os("GW_TEST_UPDATE_GOLDEN").is_some() {
        fs::write(&file, value).unwrap();
    }
    let found = fs::read(&file).unwrap_or_default();
    assert!(
        found == value,
        "{} differs from what the target signs; write it with GW_TEST_UPDATE_GOLDEN=1",
        file.display()
    );
}
