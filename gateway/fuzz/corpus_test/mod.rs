//! Runs targets on their committed corpus, so that findings of the fuzzer stay tested without it.
//! Included by the crates that have targets.

use std::collections::BTreeSet;
use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

/// Limits on the corpus of one target, so that it can be reviewed by hand.
const FILES_MAX: usize = 30;
const BYTES_MAX: usize = 40 * 1024;

/// A target, which gets the bytes of an input.
pub(crate) type Target = fn(&[u8]);

/// Runs the targets in `module`. Panics if one fails, or if wrappers, corpora and targets are not
/// the same.
pub(crate) fn run(module: &str, targets: &[(&str, Target)]) {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz");
    let calls = |name: &str| {
        let wrapper = fs::read_to_string(fuzz.join("fuzz_targets").join(name).with_extension("rs"));
        wrapper
            .unwrap()
            .contains(&format!("{module}::{name}(data)"))
    };
    let wrappers = names_in(&fuzz.join("fuzz_targets"));
    let of_module: BTreeSet<&str> = targets.iter().map(|(name, _)| *name).collect();
    for name in &wrappers {
        assert_eq!(
            calls(name),
            of_module.contains(&name[..]),
            "{module}::{name}"
        );
    }
    assert!(of_module.iter().all(|name| wrappers.contains(*name)));
    assert_eq!(names_in(&fuzz.join("corpus")), wrappers);

    let failures = targets
        .iter()
        .flat_map(|(name, target)| run_target(name, *target, &fuzz.join("corpus").join(name)));
    let failures: Vec<PathBuf> = failures.collect();
    assert!(
        failures.is_empty(),
        "see the panic messages of {failures:?}"
    );
}

fn names_in(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).unwrap();
    let name = |entry: std::io::Result<fs::DirEntry>| {
        let path = entry.unwrap().path();
        path.file_stem().unwrap().to_str().unwrap().to_owned()
    };
    entries.map(name).collect()
}

/// Returns the files on which the target fails.
fn run_target(name: &str, target: fn(&[u8]), corpus: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(corpus)
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
    let fails = |input: &[u8]| catch_unwind(|| target(input)).is_err();
    let failing = inputs.into_iter().filter(|(input, _)| fails(input));
    failing.map(|(_, path)| path).collect()
}
