//! Limits of telemetry: queues, and time to write what they hold at a stop.

use std::time::Duration;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// Services with counters of their own, per worker. All further services share one set of counters.
pub const SERVICES_COUNTED: usize = 1000;
/// Points of time series that wait in memory while their file cannot be written, each some 500
/// bytes.
pub const SERIES_PENDING: usize = 16 * KIB;
/// Bytes that wait for the thread of the request log, including captured bodies, of all workers. If
/// full, the captured bodies of a batch are dropped and counted, then the batch.
pub const LOG_QUEUE_BYTES: usize = 64 * MIB;
/// Records that wait for that thread: four seconds of 30,000 requests a second.
pub const LOG_QUEUE_RECORDS: usize = 128 * KIB;
/// Batches that wait for that thread.
pub const LOG_QUEUE_BATCHES: usize = 8 * KIB;
/// Bytes of records that wait for the thread of the access log. More are dropped and counted.
pub const ACCESS_LOG_QUEUE_BYTES: usize = 32 * MIB;
/// Time at a stop for the last records of the request log.
pub const REQUEST_LOG_END: Duration = Duration::from_secs(30);
/// Time at a stop for the last lines of the access log, whose reader may have stopped.
pub const ACCESS_LOG_END: Duration = Duration::from_secs(2);
