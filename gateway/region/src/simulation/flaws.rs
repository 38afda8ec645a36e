//! Faults of earlier code that the models can have, so that tests show that the checks find them.

/// Which faults the hosts have. Usually none.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Flaws {
    /// Connections are kept for the other node alone, also with the certificate of an earlier
    /// session and after a refusal.
    pub(super) keeps_connections: bool,
    /// A node that admits again after a gap starts with a full bucket.
    pub(super) forgets_levels: bool,
    /// Certificates begin by the clock of the node that makes them.
    pub(super) certifies_by_own_clock: bool,
    /// A node goes live whatever its clock says.
    pub(super) ignores_clock: bool,
    /// A node says that it has a change when its own history is as long.
    pub(super) compares_numbers: bool,
    /// A node says that it has a change before the change is on disk.
    pub(super) forgets_journal: bool,
    /// Answers to changes do not name dead nodes.
    pub(super) omits_dead: bool,
    /// The answer to a change waits until all nodes have it.
    pub(super) waits_for_all: bool,
    /// A node uses the first primary of its list, also when it knows a newer one.
    pub(super) uses_first_primary: bool,
    /// Nodes do not tell each other of the newest primary.
    pub(super) tells_no_primary: bool,
    /// Epochs go on at a new primary as at the one before.
    pub(super) keeps_epochs: bool,
    /// Requests that queued in a freeze are authenticated by the records in memory.
    pub(super) trusts_memory: bool,
}
