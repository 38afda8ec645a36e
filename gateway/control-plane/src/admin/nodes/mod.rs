//! The request logs, time series, live tunnels and console sessions of all nodes of the region.
//! Each node keeps its own; the node that is asked by an administrator asks the other nodes.

mod ask;
mod changes;
mod console_sessions;
mod live;
mod merge;
mod request_log;
mod series;
mod serve;

pub(super) use self::changes::{await_api_change, await_console_change};
pub(super) use self::live::{Live, LiveQuery, NodeLive};
pub(super) use self::request_log::Located;
pub(super) use self::serve::routes;
