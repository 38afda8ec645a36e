//! Processes and cores of this machine.

pub(super) mod process;
pub(super) mod procfs;
pub(super) mod scheduling;
