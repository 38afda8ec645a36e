//! Machines with clocks of their own: programs run with libfaketime, which reads their time from a
//! file.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use super::process;
use super::region::Region;

/// The clock of a machine: a file with its difference from the right time.
pub(crate) struct Machine {
    file: PathBuf,
    _folder: tempfile::TempDir,
}

impl Machine {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let machine = Self {
            file: folder.path().join("time"),
            _folder: folder,
        };
        machine.set("+0");
        machine
    }

    /// Sets the clock of the machine. Its programs see it at once.
    pub(crate) fn set(&self, difference: &str) {
        // A reader must not find an empty file.
        let new = self.file.with_extension("new");
        fs::write(&new, format!("{difference}\n")).unwrap();
        fs::rename(new, &self.file).unwrap();
    }

    /// Runs a command on the machine. Its monotonic clock is the right one.
    pub(crate) fn run<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command
            .env("LD_PRELOAD", "/usr/$LIB/faketime/libfaketimeMT.so.1")
            .env("FAKETIME_TIMESTAMP_FILE", &self.file)
            .env("FAKETIME_NO_CACHE", "1")
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            .env("NO_FAKE_STAT", "1")
    }

    /// Starts a node of the region, which has ended, on this machine.
    pub(crate) fn restart(&self, region: &mut Region, node: usize) {
        let command = &mut process::serve_command(&region.config(node));
        region.nodes[node] = Some(process::serve(self.run(command)));
    }
}
