//! The request logs and time series of all nodes of the region. Each node keeps its own; the node that is asked by an
//! administrator asks the other nodes.

mod ask;
mod changes;
mod merge;
mod request_log;
mod series;
mod serve;

pub(super) use self::changes::await_other_nodes;
pub(super) use self::request_log::Located;
pub(super) use self::serve::routes;
