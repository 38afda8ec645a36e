//! The program: exit codes, what it prints, and the file of a campaign.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use gw_simulation::scenario::Scenario;
use gw_simulation::scenario_file;
use toml::Table;

use crate::{gw_simulation, stdout};

/// The state of a campaign, without the time that it took.
fn state(path: &Path) -> Table {
    let mut state: Table = fs::read_to_string(path).unwrap().parse().unwrap();
    assert!(state.remove("cpu_seconds").is_some());
    state
}

#[test]
fn a_campaign_resumes() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let run = |seeds, name| {
        let file = path(name).display().to_string();
        let output = gw_simulation(&[
            "--from", "20", "--seeds", seeds, "--shrink", "0", "--state", &file,
        ]);
        assert_ne!(output.status.code(), Some(2), "{output:?}");
    };
    run("3", "parts");
    assert_eq!(state(&path("parts"))["next"].as_integer(), Some(23));
    run("6", "parts");
    run("6", "whole");
    assert_eq!(state(&path("parts")), state(&path("whole")));
    assert!(state(&path("whole"))["requests"].as_integer().unwrap() > 6);
}

#[test]
fn a_campaign_that_began_elsewhere_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state").display().to_string();
    gw_simulation(&["--seeds", "1", "--state", &file]);
    let output = gw_simulation(&["--from", "7", "--seeds", "1", "--state", &file]);
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("began at seed 0, not 7"), "{error}");
}

#[test]
fn sigterm_ends_a_campaign_and_leaves_its_state() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let mut campaign = Command::new(env!("CARGO_BIN_EXE_gw-simulation"))
        .args(["--hours", "1", "--shrink", "0", "--state"])
        .arg(&path)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let began = Instant::now();
    while !path.exists() {
        assert!(began.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(10));
    }
    let pid = campaign.id().to_string();
    let killed = Command::new("kill").args(["-TERM", &pid]).status().unwrap();
    assert!(killed.success());
    let code = campaign.wait().unwrap().code();
    assert!(matches!(code, Some(130 | 1)), "{code:?}");
    assert_eq!(state(&path)["from"].as_integer(), Some(0));
}

/// A scenario that the world cannot run: its caller's service does not exist.
fn impossible() -> String {
    let mut scenario = Scenario::new(0);
    scenario.callers[0].service = 9;
    scenario_file::to_text(&scenario).unwrap()
}

#[test]
fn a_failure_is_printed_with_what_is_left_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("impossible.toml");
    fs::write(&file, impossible()).unwrap();
    let (file, kept) = (file.display().to_string(), folder.path().join("kept"));
    let output = gw_simulation(&["--scenario", &file, "--keep", kept.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let printed = stdout(&output);
    assert!(
        printed.contains("nothing panics: index out of bounds"),
        "{printed}"
    );
    // The panic is a line of the trace.
    let trace = fs::read_to_string(kept.join("seed-0.trace")).unwrap();
    assert!(printed.contains(&trace));
    assert!(
        trace.contains("panicked at") && trace.contains("index out of bounds"),
        "{trace}"
    );
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    let left = fs::read_to_string(kept.join("seed-0.toml")).unwrap();
    assert!(printed.contains(&left));
    let left = scenario_file::parse(&left).unwrap();
    assert_eq!(
        (left.callers.len(), left.requests(), left.faults.len()),
        (1, 0, 0),
        "{left}"
    );
}

#[test]
fn mistakes_are_told_from_failures() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("no.toml").display().to_string();
    for arguments in [
        &["--scenario", &file][..],
        &["--seed", "1", "--seeds", "2"],
        &["--seeds", "many"],
    ] {
        let output = gw_simulation(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(!output.stderr.is_empty());
    }
}
