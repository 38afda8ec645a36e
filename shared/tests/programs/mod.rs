//! External programs that tests start. A test whose program is missing is skipped and says so, or
//! fails if every program is required: if `CI` or `GW_REQUIRE_ALL` is set, as `./test` does.

use std::io::{self, Write};
use std::process::{Command, Stdio};

/// One program in a line: its name, the Debian packages that contain it, a shell command that tries
/// it.
const LIST: &str = concat!(include_str!("list.txt"), include_str!("packages.txt"));

/// Returns whether all `programs` of the list can be used here. If not, the calling test must
/// return.
pub(crate) fn usable(programs: &[&str]) -> bool {
    let unusable: Vec<String> = programs
        .iter()
        .filter_map(|program| reason_against(program))
        .collect();
    if unusable.is_empty() {
        return true;
    }
    let reasons = unusable.join("; ");
    let is_set = |name: &&str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    if let Some(name) = ["CI", "GW_REQUIRE_ALL"].into_iter().find(is_set) {
        panic!("{reasons}; no test may be skipped, because {name} is set");
    }
    skipped(&reasons);
    false
}

/// Says that the calling test, or a part of it, is skipped. `./test` lists these lines at its end.
pub(crate) fn skipped(reason: &str) {
    let thread = std::thread::current();
    let line = format!("{}: skipped: {reason}\n", thread.name().unwrap_or("a test"));
    // Not `eprintln!`: the test harness hides its output of tests that pass.
    io::stderr().write_all(line.as_bytes()).unwrap();
}

/// Returns whether this process runs as root. If not, the calling test must return.
#[allow(dead_code, reason = "some programs of tests need no root")]
pub(crate) fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        skipped("needs root");
    }
    is_root
}

/// `None` if `program` can be used.
fn reason_against(program: &str) -> Option<String> {
    let lines = LIST.lines().filter(|line| !line.starts_with('#'));
    let mut entries = lines.filter_map(|line| {
        let mut columns = line.splitn(3, '|').map(str::trim);
        Some((columns.next()?, columns.next()?, columns.next()?))
    });
    let entry = entries.find(|(name, ..)| *name == program);
    let (_, packages, trial) = entry.unwrap_or_else(|| panic!("{program} is in no list"));
    let output = Command::new("sh")
        .args(["-c", trial])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    if output.status.success() {
        return None;
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let said = stderr.lines().next().unwrap_or("it says nothing");
    // A package with a hyphen behind its name is one that shall not be installed.
    let packages: Vec<&str> = packages
        .split(' ')
        .filter(|package| !package.ends_with('-'))
        .collect();
    Some(format!(
        "{program} (of Debian's {}) cannot be used: {said}",
        packages.join(", ")
    ))
}
