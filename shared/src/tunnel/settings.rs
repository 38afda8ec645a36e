//! HTTP/2 settings of the tunnel, both ends in one place because they must agree.

use std::time::Duration;

use super::window;

/// Most streams of one tunnel, whatever its agent allows: for more, no connection window is large enough.
pub const STREAMS_MAX: usize = (LARGEST_WINDOW - 2 * window::TUNNEL_BUDGET) / window::LEAST as usize;
const LARGEST_WINDOW: usize = (1 << 31) - 1;

/// Open streams that the connection window of a new tunnel is for.
pub const FIRST_STREAMS: usize = 2 * STREAMS_BEYOND_SLOTS as usize;

/// Flow-control window of a connection with at most so many streams, in bytes: what all of them can ever hold. Never
/// what a stream waits for, or stalled streams would stop all others: they hold at most the budget and the least window
/// each (see [`window`]), and the budget once more is for what arrives while the peer has yet to hear of smaller ones.
pub fn connection_window(streams: usize) -> u32 {
    let bytes = 2 * window::TUNNEL_BUDGET + streams.min(STREAMS_MAX) * window::LEAST as usize;
    u32::try_from(bytes).unwrap_or(LARGEST_WINDOW as u32)
}

/// Bytes that one stream may have queued for sending. Needs no room for a long path: what was sent and not acknowledged
/// waits in the kernel, whose buffers grow with it.
pub const STREAM_SEND_BUFFER: usize = 128 * 1024;

/// Bytes that the kernel takes of a tunnel ahead of what the network takes.
pub const UNSENT: u32 = 128 * 1024;

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

/// Streams that one tunnel's gateway may reset in all because of frames that are wrong or too late: each waits for the
/// agent to take the reset. Far beyond what the genuine agent causes; the connection then ends.
const ERROR_RESETS: usize = 64 * 1024;

/// What small DATA frames may take in h2 of one connection, in bytes: each counts 256 less its payload. Both ends take
/// frames out of h2 while the next hop does not take them (see [`incoming`](super::incoming)), so this bounds what arrives
/// between two turns: on io_uring a connection reads at most 1 MiB in one turn, some 105,000 frames of one byte. On epoll
/// a turn has no such bound. The default is half of the connection window, far more memory than the frames count.
const DATA_FRAME_BUDGET: usize = 32 * 1024 * 1024;

/// The gateway's side. The connection window is to grow with the streams that are open.
pub fn client() -> h2::client::Builder {
    let mut builder = h2::client::Builder::new();
    builder
        .initial_window_size(window::FIRST)
        .initial_connection_window_size(connection_window(FIRST_STREAMS))
        .max_frame_size(FRAME_SIZE)
        .max_header_list_size(HEADER_LIST)
        .max_send_buffer_size(STREAM_SEND_BUFFER)
        .max_concurrent_reset_streams(RESET_STREAMS)
        .reset_stream_duration(RESET_MEMORY)
        .max_local_error_reset_streams(Some(ERROR_RESETS))
        .data_frame_budget(DATA_FRAME_BUDGET)
        .enable_push(false);
    builder
}

/// The agent's side, with `slots` concurrent requests.
pub fn server(slots: u32) -> h2::server::Builder {
    let streams = slots.saturating_add(STREAMS_BEYOND_SLOTS);
    let mut builder = h2::server::Builder::new();
    builder
        .initial_window_size(window::FIRST)
        .initial_connection_window_size(connection_window(streams as usize))
        .max_frame_size(FRAME_SIZE)
        .max_header_list_size(HEADER_LIST)
        .max_send_buffer_size(STREAM_SEND_BUFFER)
        .max_concurrent_streams(streams)
        .max_concurrent_reset_streams(RESET_STREAMS)
        .max_pending_accept_reset_streams(RESET_STREAMS)
        .reset_stream_duration(RESET_MEMORY)
        .max_local_error_reset_streams(None)
        .data_frame_budget(DATA_FRAME_BUDGET)
        .enable_connect_protocol();
    builder
}
