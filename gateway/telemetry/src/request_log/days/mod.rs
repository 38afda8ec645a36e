//! Days of the log: their files, readers of them, and their expiry.

pub(crate) mod day;
pub(crate) mod day_file;
pub(crate) mod disk;
pub(crate) mod expiry;
pub(crate) mod readers;
pub(crate) mod shares;
