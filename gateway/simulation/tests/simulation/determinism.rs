//! Same seed, same trace: alone and among others, in another process, and on another machine.
//!
//! The program gives each scenario a process of its own. Scenarios that run one after another in a
//! process do not repeat to the last wake: tokio counts the threads that have used its random
//! numbers.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use crate::{gw_simulation, stdout};

/// The fingerprint of a seed.
fn fingerprint(seed: u64, with_trace: bool) -> String {
    let seed = seed.to_string();
    let mut arguments = vec!["--seed", &seed];
    arguments.extend(with_trace.then_some("--trace"));
    let printed = stdout(&gw_simulation(&arguments));
    let (_, fingerprint) = printed.rsplit_once("fingerprint ").unwrap();
    fingerprint.lines().next().unwrap().to_owned()
}

#[test]
fn a_trace_changes_nothing() {
    for seed in 0..4 {
        let (without, with) = (fingerprint(seed, false), fingerprint(seed, true));
        assert_eq!(without, with, "seed {seed}");
    }
}

/// Another process has other addresses, hash seeds and clocks; this one also has no environment,
/// another folder, and instructions for cryptography switched off.
#[test]
fn another_process_gives_the_same_trace() {
    let here = gw_simulation(&["--seed", "3", "--trace"]);
    let elsewhere = Command::new(env!("CARGO_BIN_EXE_gw-simulation"))
        .args(["--seed", "3", "--trace"])
        .env_clear()
        .env("OPENSSL_ia32cap", "0")
        .env("GW_DRIVER", "epoll")
        .current_dir("/")
        .output()
        .unwrap();
    assert!(stdout(&here).contains("request 0 begins"));
    assert_eq!(stdout(&here), stdout(&elsewhere));
}

#[test]
fn threads_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let state = |jobs: &str| {
        let file = folder.path().join(jobs);
        let path = file.display().to_string();
        gw_simulation(&[
            "--seeds", "20", "--jobs", jobs, "--shrink", "0", "--state", &path,
        ]);
        let text = fs::read_to_string(file).unwrap();
        let lines = text.lines().filter(|line| !line.starts_with("cpu_seconds"));
        lines.map(ToOwned::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(state("1"), state("4"));
}

#[test]
fn seeds_differ() {
    let fingerprints: BTreeSet<String> = (0..10).map(|seed| fingerprint(seed, false)).collect();
    assert_eq!(fingerprints.len(), 10);
}
