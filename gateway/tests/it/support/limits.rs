//! Limits of the gateway that tests wait for or count to.

use std::time::Duration;

/// Bytes that are charged for each direction of a relayed request.
pub(crate) const PIPE_MEMORY: usize = 72 * 1024;
/// Longest time that a request waits for the first tunnel of its service after a loss.
pub(crate) const FIRST_TUNNEL_BACK: Duration = Duration::from_secs(5);
/// Longest time that a request waits for a slot.
pub(crate) const SLOT_WAIT: Duration = Duration::from_secs(1);
/// Requests of one service that wait for a tunnel or a slot.
pub(crate) const WAITING_REQUESTS: usize = 1024;
/// How often a request is sent once more if a node says that it is not the owner.
pub(crate) const NODE_RETRIES: usize = 2;
/// Concurrent streams of a caller's HTTP/2 connection.
pub(crate) const HTTP2_STREAMS: u32 = 100;
/// Time after which a process that was replaced ends idle connections.
pub(crate) const DRAIN_IDLE_SUCCEEDED: Duration = Duration::from_secs(5);
/// Time without a failure of PostgreSQL after which a node declares another one dead.
pub(crate) const ENGINE_GRACE: Duration = Duration::from_secs(10);
