//! Gateways, agents and database servers as processes.

pub(crate) mod kept_connection;
pub(crate) mod machine;
pub(crate) mod nodes;
pub(crate) mod postgres;
pub(crate) mod prepared;
pub(crate) mod process;
pub(crate) mod region;
pub(crate) mod successor;
