//! Limits of the store.

/// Last changes that a node of a region knows by their ids. The question whether it uses a change comes within a second.
pub const RECENT_CHANGES: usize = 1024;
