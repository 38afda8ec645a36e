//! Limits that several crates of the gateway use.

use std::ops::RangeInclusive;
use std::time::Duration;

use gw_shared::http::HeadLimits;
use gw_shared::net;
use gw_shared::tunnel;

use crate::service::rate::Rate;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// Free space of a file system below which request log and an access log in a file are not
/// written. The rest is for changes, above all those that revoke access.
pub const DISK_FLOOR: u64 = 256 * MIB as u64;
/// Divisor of the size of a small file system, whose floor is that part of it.
pub const DISK_FLOOR_PART: u64 = 8;
/// Bytes of the reserve for changes that take access away, and most of them: it is as large as the
/// records.
pub(crate) const RESERVE: RangeInclusive<u64> = 16 * MIB as u64..=512 * MIB as u64;
/// Divisor of the size of a small file system, whose reserve is at most that part of it.
pub(crate) const RESERVE_PART: u64 = 2 * DISK_FLOOR_PART;
/// Bytes that a change takes from it when the disk is full; twice as many at each further attempt.
/// Other changes are refused when fewer are free beside it.
pub(crate) const RESERVE_TAKEN: u64 = 64 * KIB as u64;

/// Size of a request head of a caller.
pub const REQUEST_HEAD: HeadLimits = HeadLimits {
    head: 32 * KIB,
    fields: 100,
    target: 8 * KIB,
};

/// Time from the accepted socket to the end of the TLS handshake.
pub const HANDSHAKE: Duration = Duration::from_secs(5);
/// Time between two requests on one connection.
pub const IDLE: Duration = Duration::from_secs(75);
/// Time for the last bytes of a connection to be sent, and for the peer to end its own direction.
pub const LINGER: Duration = Duration::from_secs(2);
/// Interval between checks of deadlines.
pub const DEADLINE_TICK: Duration = Duration::from_millis(250);
/// Pause of a worker from which its process counts as frozen.
pub(crate) const FREEZE: Duration = Duration::from_secs(1);
/// Time for which requests wait after a freeze until the records were read.
pub(crate) const FREEZE_WAIT: Duration = Duration::from_millis(1500);
/// Requests and tunnel handshakes of one worker that wait so. More are refused (503).
pub(crate) const FREEZE_WAITING: usize = CROSS_CORE_REQUESTS;

/// Messages that a worker handles before other tasks run.
pub(crate) const MAILBOX_BATCH: usize = 128;

/// Concurrent requests from other workers that one owner relays. More are refused (503).
pub const CROSS_CORE_REQUESTS: usize = 8 * KIB;
const _: () = assert!(4 * DEADLINE_TICK.as_millis() <= FREEZE.as_millis());
/// Entries in each table of rates of new tunnels on one worker. Without a free entry, tunnels are
/// refused (503).
pub const TUNNEL_BUCKETS: usize = 16 * KIB;
/// Tunnels of all services that one worker admits, in a region of several nodes. The TLS handshakes
/// of the agents of a node that was lost then take a fifth of the time of its heirs. More are
/// refused (503), and their agents try again.
pub const ADMITTED_TUNNELS: Rate = Rate::new(400, 60 * 200).unwrap();
/// Programs that one worker sends to agents at once. A further one ends one of the account that has
/// most, or is refused (503) if its own account would then have more. The agents try again.
pub const PROGRAM_DOWNLOADS: usize = 32;
// The largest request head fits in a frame, with a second copy of its host and the other fields
// that the gateway adds.
const _: () = assert!(
    2 * REQUEST_HEAD.head + 1024 <= tunnel::frame::REQUEST_HEAD.head
        && REQUEST_HEAD.fields + 16 <= tunnel::frame::REQUEST_HEAD.fields
        && REQUEST_HEAD.target <= tunnel::frame::REQUEST_HEAD.target
);
/// Memory of a connection before its handshake is complete, in bytes: a ClientHello in the receive
/// buffer and in the session, and the rest of the session.
pub const HANDSHAKE_MAX: usize = 2 * net::tls::CLIENT_HELLO_MAX + 16 * KIB;
