//! Cores and scheduling classes of threads.

use std::process::Command;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::failure::{Failure, ensure};
use crate::machine::process;

/// Scheduling class of a thread. All threads share two cores, and an ordinary thread keeps its core
/// for a time slice of some milliseconds, which would dominate the measured latencies.
#[derive(Clone, Copy)]
pub(crate) enum Class {
    /// Callers: run whenever runnable (`SCHED_FIFO`).
    Callers,
    /// Backend: runs when no caller is runnable.
    Backend,
    /// Gateway and agent: run when neither callers nor backend are runnable.
    Product,
    /// Attackers: run when no other thread is runnable (`SCHED_IDLE`).
    Leftovers,
}

/// Puts a thread into a scheduling class.
pub(crate) fn schedule(thread: Pid, class: Class) -> Result<(), Failure> {
    let policy = match class {
        Class::Callers => ["--fifo", "--pid", "3"],
        Class::Backend => ["--fifo", "--pid", "2"],
        Class::Product => ["--fifo", "--pid", "1"],
        Class::Leftovers => ["--idle", "--pid", "0"],
    };
    let chrt = process::find("chrt", "util-linux")?;
    let status = Command::new(chrt)
        .args(policy)
        .arg(thread.as_raw_nonzero().to_string())
        .status()?;
    ensure(status.success(), || {
        format!("chrt ended with {status}: run as root")
    })
}

/// Pins a thread, or the calling one for `None`, to a core. Threads and programs that it starts
/// later inherit this.
pub(crate) fn pin_to(thread: Option<Pid>, core: usize) -> Result<(), Failure> {
    let mut cores = CpuSet::new();
    cores.set(core);
    sched_setaffinity(thread, &cores).map_err(|error| Failure::during("pinning a thread", error))
}
