//! Limits that both planes know: of the configuration, of jobs, and of connections between nodes.

use std::num::NonZeroUsize;
use std::time::Duration;

const KIB: usize = 1024;

/// Connections of one worker: callers, and agents until their upgrade. The data plane
/// bounds tunnels per service.
pub const CONNECTIONS_PER_WORKER: usize = 100_000;
/// Connections of one client address on one worker, unless configured. Enough for many clients
/// behind one address translation.
pub const CONNECTIONS_PER_ADDRESS: usize = 16 * KIB;
/// Longest accepted access token, in bytes. Issued tokens have some 700.
pub const TOKEN: usize = 4 * KIB;
/// Verified access tokens that one worker caches, each some 600 bytes.
pub const VERIFIED_TOKENS: usize = 8 * KIB;
/// Longest lifetime of access tokens that the configuration allows.
pub const TOKEN_LIFETIME_MAX: Duration = Duration::from_hours(24);

/// Waiting requests of workers to the control plane. More are refused (503).
pub const CONTROL_JOBS: usize = 256;
/// Clients in one table of limits. A further one replaces the least recently used. Seven sixteenths
/// of a power of two, so that the hash table never grows (see `rate_limit::addresses`).
pub const ADDRESSES: NonZeroUsize = NonZeroUsize::new(14 * KIB).unwrap();

/// Time without contact to PostgreSQL and peers after which an isolated node refuses requests, if
/// it is to.
pub const STALENESS: Duration = Duration::from_secs(60);
/// Connections that wait for the control plane: from addresses of nodes, and as many from other
/// addresses. More are closed.
pub const CLUSTER_WAITING: usize = 64;
/// Time that a drain waits for running requests, unless configured.
pub const DRAIN: Duration = Duration::from_secs(30);
/// Levels of buckets that are handed to the next process, the emptiest first.
pub const LEVELS: usize = 100_000;
/// Bytes of one level as text.
pub const LEVEL_BYTES: usize = 192;
/// Requests of a predecessor that wait for admission by its successor. More are refused (503).
pub const CHARGES: usize = 16 * KIB;
