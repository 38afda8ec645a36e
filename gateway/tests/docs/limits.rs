//! The memory on docs/limits.md is the sum of the limits of the crates.

use gw_base::limits::{HANDSHAKE_MAX, PROGRAM_DOWNLOADS};
use gw_control_plane::limits::{
    ADMIN_BODIES, ADMIN_CONNECTIONS, ADMIN_UNAUTHENTICATED_MAX, CLUSTER_BODIES,
    DOMAIN_CERTIFICATE_BYTES, JOURNAL,
};
use gw_data_plane::limits::{
    APEX_BODY, CAPTURE_MEMORY, DISCARDS, DOMAIN_CERTIFICATES, EMPTY_BODIES, HANDSHAKES,
    HTTP2_WAITING_LISTS, PLAIN_CONNECTION_MAX, PLAIN_CONNECTIONS, PROGRAM_CHUNK,
    UNFINISHED_BLOCK_MAX, UNFINISHED_BLOCKS, UNFINISHED_HEAD_MAX, UNFINISHED_HEADS,
    UNREAD_REFUSAL_MAX, UNREAD_REFUSALS,
};
use gw_interface::limits::{CONTROL_JOBS, VERIFIED_TOKENS};
use gw_telemetry::limits::{ACCESS_LOG_QUEUE_BYTES, LOG_QUEUE_BYTES, SERIES_PENDING};

use crate::read;
use crate::sources::markdown::rows;

/// Bytes of a point of the time series.
const POINT: usize = 500;
/// Bytes of the rest of a refused request: one receive, a TLS record, and trailers.
const DISCARD: usize = 64 * 1024;
/// Bytes of a verified token with its key.
const VERIFIED_TOKEN: usize = 600;

/// The crates, with bytes for each process and for each worker.
const MEMORY: [(&str, usize, usize); 4] = [
    (
        "gw-telemetry",
        LOG_QUEUE_BYTES + ACCESS_LOG_QUEUE_BYTES + SERIES_PENDING * POINT,
        0,
    ),
    ("gw-interface", 0, VERIFIED_TOKENS * VERIFIED_TOKEN),
    (
        "gw-data-plane",
        0,
        // Growing buffers of captured bodies hold up to twice their bytes.
        HANDSHAKES * HANDSHAKE_MAX
            + DOMAIN_CERTIFICATES.get() * DOMAIN_CERTIFICATE_BYTES
            + UNFINISHED_HEADS * UNFINISHED_HEAD_MAX
            + UNFINISHED_BLOCKS * UNFINISHED_BLOCK_MAX
            + EMPTY_BODIES * HTTP2_WAITING_LISTS
            + UNREAD_REFUSALS * UNREAD_REFUSAL_MAX
            + DISCARDS * DISCARD
            + PLAIN_CONNECTIONS * PLAIN_CONNECTION_MAX
            + 2 * CAPTURE_MEMORY
            + PROGRAM_DOWNLOADS * PROGRAM_CHUNK,
    ),
    (
        "gw-control-plane",
        ADMIN_CONNECTIONS * ADMIN_UNAUTHENTICATED_MAX
            + ADMIN_BODIES
            + CLUSTER_BODIES
            + JOURNAL
            + CONTROL_JOBS * APEX_BODY,
        0,
    ),
];

/// Rounded up.
fn mebibytes(bytes: usize) -> usize {
    bytes.div_ceil(1024 * 1024)
}

fn cell(mebibytes: usize) -> String {
    if mebibytes == 0 {
        String::new()
    } else {
        format!("{mebibytes} MiB")
    }
}

#[test]
fn the_memory_on_the_page_is_the_sum_of_the_limits() {
    let page = rows(&read("docs/limits.md"), "crate");
    let found: Vec<_> = page
        .iter()
        .map(|row| {
            (
                row[0].trim_matches('`').to_owned(),
                row[2].clone(),
                row[3].clone(),
            )
        })
        .collect();
    let rounded =
        MEMORY.map(|(name, process, worker)| (name, mebibytes(process), mebibytes(worker)));
    let sums = rounded
        .iter()
        .fold((0, 0), |sum, row| (sum.0 + row.1, sum.1 + row.2));
    let expected: Vec<_> = rounded
        .into_iter()
        .chain([("sum", sums.0, sums.1)])
        .map(|(name, process, worker)| (name.to_owned(), cell(process), cell(worker)))
        .collect();
    assert_eq!(found, expected);
}
