//! Parts that the commands of the administration API share: the client, and output for people or
//! scripts.

pub(super) mod api;
pub(super) mod connection;
pub(super) mod output;
pub(super) mod pending_nodes;
pub(super) mod table;
