//! The stop of the process: the drain, and the state that the next start reads.

pub(crate) mod drain;
pub(crate) mod last_stop;
