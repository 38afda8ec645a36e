//! `perf`: system calls of running programs, counted by the kernel's tracepoint. Needs root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Signal, geteuid};
use tempfile::NamedTempFile;

use crate::failure::{Failure, ensure};
use crate::machine::process::{self, Process};
use crate::machine::procfs;
use crate::scenarios::compare::LOAD_CORE;

/// Time for attaching to all threads.
const BEGINS_WITHIN: Duration = Duration::from_secs(10);
const ENDS_WITHIN: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(10);

pub(crate) fn find() -> Result<PathBuf, Failure> {
    ensure(geteuid().is_root(), || {
        "system calls are counted as root only".to_owned()
    })?;
    process::find("perf", "linux-perf")
}

/// A running count of the system calls of some processes.
pub(crate) struct Count {
    perf: Process,
    report: NamedTempFile,
}

impl Count {
    /// Counts from now on.
    pub(crate) fn begin(perf: &Path, pids: &[u32]) -> Result<Self, Failure> {
        let report = NamedTempFile::new()?;
        let list: Vec<String> = pids.iter().map(u32::to_string).collect();
        let mut command = process::command(perf, &[LOAD_CORE])?;
        command
            .args(["stat", "-x,", "-e", "raw_syscalls:sys_enter", "-p"])
            .args([&list.join(","), "-o"])
            .arg(report.path())
            .stdin(Stdio::null())
            .stderr(Stdio::null());
        let mut count = Self {
            perf: Process::spawn("perf", &mut command)?,
            report,
        };
        let mut threads = 0;
        for pid in pids {
            threads += procfs::threads(*pid)?.len();
        }
        let began = Instant::now();
        while procfs::perf_events(count.perf.pid()) < threads {
            let ended = count.perf.wait(LOOK_EVERY)?;
            ensure(ended.is_none() && began.elapsed() < BEGINS_WITHIN, || {
                format!(
                    "perf does not count system calls ({ended:?}): it needs tracefs at \
                     /sys/kernel/tracing"
                )
            })?;
        }
        Ok(count)
    }

    /// System calls since the begin.
    pub(crate) fn end(mut self) -> Result<u64, Failure> {
        self.perf.send_all(Signal::INT);
        self.perf.wait(ENDS_WITHIN)?;
        let text = fs::read_to_string(self.report.path())?;
        parse(&text).ok_or_else(|| Failure::new(format!("perf reports no number: {text:?}")))
    }
}

/// The number in a report with separators.
fn parse(report: &str) -> Option<u64> {
    let line = report
        .lines()
        .find(|line| line.contains("raw_syscalls:sys_enter"))?;
    line.split(',').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_a_report_is_read() {
        let report = "# started on Fri Nov 27 13:58:01 2026\n\n\
                      1234567,,raw_syscalls:sys_enter,2000112233,100.00,,\n";
        assert_eq!(parse(report), Some(1_234_567));
        let none = "<not supported>,,raw_syscalls:sys_enter,0,100.00,,\n";
        assert_eq!((parse(none), parse("")), (None, None));
    }
}
