//! Limits of the process, and an assertion on memory that the limits of several crates add up to.

use std::time::Duration;

use gw_base::limits::HANDSHAKE_MAX;

pub(crate) use gw_control_plane::limits::{CLUSTER_HANDSHAKES, CLUSTER_KEPT};
pub(crate) use gw_data_plane::limits::{MAILBOX, NODE_HANDSHAKES};
pub(crate) use gw_interface::limits::{
    CHARGES, CLUSTER_WAITING, CONNECTIONS_PER_WORKER, LEVEL_BYTES, LEVELS,
};

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// Established connections that wait to be accepted. The kernel caps this at net.core.somaxconn.
pub const BACKLOG: i32 = 4096;
/// Time at a stop for running requests and jobs of the control plane.
pub const CONTROL_PLANE_END: Duration = Duration::from_secs(10);
/// Time limit for the workers to stop. Their requests have ended or are cut by then.
pub const WORKERS_END: Duration = Duration::from_secs(10);
/// Time at a stop for the last point of the time series.
pub const SERIES_END: Duration = Duration::from_secs(5);
/// Time at a stop for the feed, which may wait for PostgreSQL, and for helpers that keep nothing.
pub const HELPERS_END: Duration = Duration::from_secs(5);
/// Descriptors reserved for listeners, rings, the store and logs.
pub const RESERVED_DESCRIPTORS: u64 = 128;

/// Panics of workers within [`WORKER_PANICS_WITHIN`] that end the process. A worker starts again
/// after each earlier one.
pub const WORKER_PANICS: usize = 3;
/// Time in which [`WORKER_PANICS`] are counted.
pub const WORKER_PANICS_WITHIN: Duration = Duration::from_secs(60);
/// Time for running requests when the process ends because of [`WORKER_PANICS`].
pub const FAILED_DRAIN: Duration = Duration::from_secs(5);
/// Time for agents to end their tunnels after the last request.
pub const TUNNELS_END: Duration = Duration::from_secs(2);
/// Time to export the last spans after all other threads have ended.
pub const SPANS_END: Duration = Duration::from_secs(5);
/// Services with tunnels that are expected back after a stop and a start.
pub const EXPECTED_SERVICES: usize = 100_000;
/// Bytes of one of them as text.
pub const EXPECTED_SERVICE_BYTES: usize = 96;
/// Time for the successor to answer. If exceeded, the predecessor assumes that it has failed.
pub const CHARGED_WITHIN: Duration = Duration::from_secs(2);
/// Time for each step of a takeover.
pub const TAKEOVER_STEP: Duration = Duration::from_secs(15);
/// Time for workers to report levels of rate limits at a takeover or a stop. Below
/// [`TAKEOVER_STEP`], after which the successor gives up.
pub const LEVELS_WITHIN: Duration = Duration::from_secs(10);
const _: () = assert!(LEVELS_WITHIN.as_secs() < TAKEOVER_STEP.as_secs());

// Memory of a flood of handshakes at the listener for other nodes.
const _: () = assert!(
    (NODE_HANDSHAKES + CLUSTER_HANDSHAKES + 2 * CLUSTER_WAITING) * HANDSHAKE_MAX <= 72 * MIB
);
