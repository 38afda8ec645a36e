//! Limits of the store.

/// Last changes that a node of a region knows by their ids. The question whether it uses a change
/// comes within a second.
pub const RECENT_CHANGES: usize = 1024;
/// Own domains of an account, unless its setting `domains_max` says otherwise.
pub const ACCOUNT_DOMAINS: u32 = 100;
/// Largest value of this setting.
pub const ACCOUNT_DOMAINS_MAX: u32 = 10_000;
