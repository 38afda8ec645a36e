//! Tests that must notice the [chosen](super::chosen) faults: the groups of each folder.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use super::Failure;
use super::copy::VARIABLE;

/// Seconds after which a group that has not ended has noticed the fault.
const LONGEST: &str = "400";

/// In place of the name of a test: the program crashed, or took too long.
const NO_SUMMARY: &str = "the program, which has ended without a summary";

/// Tests of one program.
pub(crate) struct Group {
    /// Name of the target of cargo.
    program: &'static str,
    /// Beginnings of the names of tests; all if there are none.
    tests: &'static [&'static str],
}

const fn group(program: &'static str, tests: &'static [&'static str]) -> Group {
    Group { program, tests }
}

/// Each folder with its groups, in the order in which they run.
const OF_FOLDERS: &[(&str, &[Group])] = &[
    (
        "gateway/control-plane/src/control/records",
        &[
            group("gw_control_plane", &[]),
            group("it", &["administration::"]),
            group("it", &["identity::"]),
            group("it", &["region_records::", "region::", "data::"]),
        ],
    ),
    (
        "gateway/control-plane/src/admin/console",
        &[
            group("gw_control_plane", &[]),
            group("it", &["administration::console"]),
            group("it", &["administration::", "region::console"]),
        ],
    ),
    (
        "agent/src/backend",
        &[
            group("gw_agent", &[]),
            group("it", &["relaying::backend"]),
            group("it", &["relaying::", "agents::"]),
        ],
    ),
    (
        "gateway/data-plane/src/relay",
        &[
            group("gw_data_plane", &[]),
            group("it", &["relaying::"]),
            group("it", &["callers::", "agents::"]),
            group("it", &["region::", "request_log::", "process::"]),
        ],
    ),
];

/// A program of tests, and the folder in which it runs.
pub(crate) struct Program {
    path: PathBuf,
    folder: PathBuf,
}

/// The groups of the folder with this file.
pub(crate) fn of(file: &str) -> Result<&'static [Group], Failure> {
    let mut folders = OF_FOLDERS.iter();
    let found = folders.find(|(folder, _)| file.starts_with(folder));
    found
        .map(|(_, groups)| *groups)
        .ok_or_else(|| format!("{file} is in no folder with groups").into())
}

/// Builds the tests of the workspace in this folder.
pub(crate) fn build(workspace: &Path) -> Result<HashMap<String, Program>, Failure> {
    let built = Command::new(env!("CARGO"))
        .args(["test", "--workspace", "--locked", "--no-run"])
        .args(["--message-format", "json-render-diagnostics"])
        .current_dir(workspace)
        .env("CARGO_TARGET_DIR", workspace.join("target"))
        .stderr(Stdio::inherit())
        .output()?;
    if !built.status.success() {
        return Err("the tests of the copy cannot be built".into());
    }
    let mut programs = HashMap::new();
    for line in built.stdout.lines() {
        let message: Value = serde_json::from_str(&line?)?;
        let is_library = message["target"]["kind"][0] != "bin";
        let texts = (
            message["target"]["name"].as_str(),
            message["executable"].as_str(),
            message["manifest_path"].as_str(),
        );
        if let (Some(name), Some(path), Some(manifest)) = texts
            && is_library
        {
            let folder = Path::new(manifest).parent().unwrap_or(workspace);
            let program = Program {
                path: path.into(),
                folder: folder.to_owned(),
            };
            programs.insert(name.to_owned(), program);
        }
    }
    Ok(programs)
}

impl Group {
    /// Runs the tests with this mutant until one fails that also fails alone, and returns its name.
    pub(crate) fn first_failure(
        &self,
        programs: &HashMap<String, Program>,
        mutant: &str,
    ) -> Result<Option<String>, Failure> {
        let program = programs
            .get(self.program)
            .ok_or_else(|| format!("no program {}", self.program))?;
        let mut passing_alone: Vec<String> = Vec::new();
        loop {
            let skipped = passing_alone.iter().flat_map(|name| ["--skip", name]);
            let arguments = self.tests.iter().copied().chain(skipped);
            let Some(failed) = program.run(arguments, mutant)? else {
                return Ok(None);
            };
            let alone = ["--exact", &failed].into_iter();
            let fails_alone = program.run(alone, mutant)?.is_some();
            if failed == NO_SUMMARY || fails_alone {
                return Ok(Some(failed));
            }
            writeln!(io::stdout(), "{mutant}: {failed} fails, but not alone")?;
            passing_alone.push(failed);
        }
    }
}

impl Program {
    /// Runs tests with this mutant until one fails, and returns its name.
    fn run<'a>(
        &self,
        arguments: impl Iterator<Item = &'a str>,
        mutant: &str,
    ) -> Result<Option<String>, Failure> {
        let mut running = Command::new("timeout")
            .args(["--signal", "KILL", LONGEST])
            .arg(&self.path)
            .args(arguments)
            .args(["--test-threads", "4"])
            .current_dir(&self.folder)
            .env(VARIABLE, mutant)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        let failed = read_to_failure(&mut running);
        // Also what the tests have started.
        let group = format!("-{}", running.id());
        let _ = Command::new("kill").args(["-9", "--", &group]).status();
        running.wait()?;
        Ok(failed?)
    }
}

/// The first test that fails, or how the program has ended in place of a summary.
fn read_to_failure(running: &mut Child) -> io::Result<Option<String>> {
    let stdout = running.stdout.take().into_iter();
    for line in stdout.flat_map(|stdout| BufReader::new(stdout).split(b'\n')) {
        let line = line?;
        let line = String::from_utf8_lossy(&line);
        if let Some(name) = line
            .strip_prefix("test ")
            .and_then(|line| line.strip_suffix(" ... FAILED"))
        {
            return Ok(Some(name.to_owned()));
        }
        if line.starts_with("test result: ok") {
            return Ok(None);
        }
    }
    Ok(Some(NO_SUMMARY.to_owned()))
}
