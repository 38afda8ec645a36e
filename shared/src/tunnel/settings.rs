//! HTTP/2 settings of the tunnel, both ends in one place because they must agree.

use std::time::Duration;

/// Flow-control window of one stream, in bytes: what a caller that stopped reading can hold at the gateway, and a
/// backend that stopped reading at the agent.
pub const STREAM_WINDOW: u32 = 512 * 1024;

/// Flow-control window of the connection: the largest there is (RFC 9113 §6.9.1), so that it is never what a stream
/// waits for. Otherwise stalled streams would use it up and stop all others.
pub const CONNECTION_WINDOW: u32 = (1 << 31) - 1;

/// Bytes that one stream may have queued for sending.
pub const STREAM_SEND_BUFFER: usize = 128 * 1024;

/// Largest frame payload. Bounds how long a small response waits behind one frame of a large one.
pub const FRAME_SIZE: u32 = 32 * 1024;

/// Largest header list: the largest head that callers may send, what we add, and HPACK's 32 bytes per field.
pub const HEADER_LIST: u32 = 64 * 1024;

/// Streams an agent takes beyond its slots: the control stream, and requests that are to be told that there is no slot.
pub const STREAMS_BEYOND_SLOTS: u32 = 128;

/// Streams that may be remembered after a reset, so that frames still under way for them are recognized. Both ends
/// are authenticated, and a burst of callers that hang up must not look like an attack.
const RESET_STREAMS: usize = 8192;
const RESET_MEMORY: Duration = Duration::from_secs(10);

/// The gateway's side.
pub fn client() -> h2::client::Builder {
    let mut builder = h2::client::Builder::new();
    builder
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME_SIZE)
        .max_header_list_size(HEADER_LIST)
        .max_send_buffer_size(STREAM_SEND_BUFFER)
        .max_concurrent_reset_streams(RESET_STREAMS)
        .reset_stream_duration(RESET_MEMORY)
        .max_local_error_reset_streams(None)
        .enable_push(false);
    builder
}

/// The agent's side, with `slots` concurrent requests.
pub fn server(slots: u32) -> h2::server::Builder {
    let mut builder = h2::server::Builder::new();
    builder
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME_SIZE)
        .max_header_list_size(HEADER_LIST)
        .max_send_buffer_size(STREAM_SEND_BUFFER)
        .max_concurrent_streams(slots.saturating_add(STREAMS_BEYOND_SLOTS))
        .max_concurrent_reset_streams(RESET_STREAMS)
        .max_pending_accept_reset_streams(RESET_STREAMS)
        .reset_stream_duration(RESET_MEMORY)
        .max_local_error_reset_streams(None)
        .enable_connect_protocol();
    builder
}
