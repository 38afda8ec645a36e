//! Programs of others that the comparison starts.

pub(super) mod h2load;
pub(super) mod perf;
pub(super) mod rathole;
pub(super) mod wrk;
