//! Changes of the records on their way: planned, committed, kept in the journal, followed from
//! other nodes, handed to a successor.

pub mod audit;
pub(crate) mod change;
pub(crate) mod feed;
pub(crate) mod journal;
pub(crate) mod takeover;
