//! Runs every target on its committed corpus, so that findings of the fuzzer stay tested without it.

use std::collections::BTreeSet;
use std::fs;
use std::panic::catch_unwind;
use std::path::Path;

use super::{TARGETS, access_tokens};

/// Limits on the corpus of one target, so that it can be reviewed by hand.
const FILES_MAX: usize = 30;
const BYTES_MAX: usize = 40 * 1024;

#[test]
fn every_target_has_a_wrapper_and_a_corpus_and_passes_it() {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz");
    let names_in = |folder: &str| -> BTreeSet<String> {
        let entries = fs::read_dir(fuzz.join(folder)).unwrap();
        entries
            .map(|entry| {
                entry
                    .unwrap()
                    .path()
                    .file_stem()
                    .unwrap()
                    .to_str()
                    .unwrap()
                    .to_owned()
            })
            .collect()
    };
    let targets: BTreeSet<String> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(names_in("corpus"), targets);
    assert_eq!(names_in("fuzz_targets"), targets);

    for (name, target) in TARGETS {
        let files = fs::read_dir(fuzz.join("corpus").join(name))
            .unwrap()
            .map(|entry| entry.unwrap().path());
        let inputs: Vec<_> = files.map(|path| (fs::read(&path).unwrap(), path)).collect();
        assert!(
            (1..=FILES_MAX).contains(&inputs.len()),
            "{name}: {} files",
            inputs.len()
        );
        let bytes: usize = inputs.iter().map(|(input, _)| input.len()).sum();
        assert!(bytes <= BYTES_MAX, "{name}: {bytes} bytes");
        for (input, path) in &inputs {
            assert!(
                catch_unwind(|| target(input)).is_ok(),
                "{} (reason: see the panic message)",
                path.display()
            );
        }
    }
}

/// With other tokens, the fuzzer's mutations would all fail at the signature.
#[test]
fn the_corpus_has_the_tokens_that_the_target_signs() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/access_token");
    for (name, value) in access_tokens() {
        assert_eq!(
            fs::read_to_string(corpus.join(name)).unwrap(),
            value,
            "{name}"
        );
    }
}
