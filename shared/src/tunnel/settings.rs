//! HTTP/2 settings of both ends of a tunnel, which must agree.

use std::time::Duration;

use super::window;

/// Most streams of a tunnel, regardless of its agent's slots: no connection window is large enough for more.
pub const STREAMS_MAX: usize = (LARGEST_WINDOW - 2 * window::TUNNEL_BUDGET) / window::LEAST as usize;
const LARGEST_WINDOW: usize = (1 << 31) - 1;

/// Open streams that the connection window of a new tunnel has room for.
pub const FIRST_STREAMS: usize = 2 * STREAMS_BEYOND_SLOTS as usize;

/// Flow-control window of a connection with at most `streams` streams, in bytes.
///
/// Large enough for all unread bytes, since otherwise stalled streams would block the others: the streams have at most
/// the budget and a smallest window each (see [`window`]). A second budget is for bytes that arrive before the peer
/// knows of a smaller window.
pub fn connection_window(streams: usize) -> u32 {
    let bytes = 2 * window::TUNNEL_BUDGET + streams.min(STREAMS_MAX) * window::LEAST as usize;
    u32::try_from(bytes).unwrap_or(LARGEST_WINDOW as u32)
}

/// Most bytes queued for sending on one stream. Independent of the path: unacknowledged bytes wait in the kernel, whose
/// buffers grow.
pub const STREAM_SEND_BUFFER: usize = 128 * 1024;

/// Most unsent bytes of a tunnel in the kernel.
pub const UNSENT: u32 = 128 * 1024;

/// Largest frame payload, in bytes. Bounds the wait of a small response behind one frame of a large one.
pub const FRAME_SIZE: u32 = 32 * 1024;

/// Largest header list, in bytes: the largest head that clients may send, added fields, and HPACK's 32 bytes per field.
pub const HEADER_LIST: u32 = 64 * 1024;

/// Streams that an agent accepts beyond its slots: the control stream, and requests that it refuses for lack of a slot.
pub const STREAMS_BEYOND_SLOTS: u32 = 128;

/// Reset streams that each end remembers, to recognise frames that are still in flight for them. Generous, since both
/// ends are authenticated and many clients may disconnect at once.
const RESET_STREAMS: usize = 8192;
const RESET_MEMORY: Duration = Duration::from_secs(10);

/// Streams of one tunnel that the gateway may reset because of invalid or late frames before it ends the connection. An
/// unmodified agent causes far fewer.
const ERROR_RESETS: usize = 64 * 1024;

/// Budget for the overhead of small DATA frames in h2 on one connection, in bytes: each frame counts 256 less its
/// payload. Both ends take frames out of h2 while the next hop is slow (see [`incoming`](super::incoming)), so this
/// bounds frames that arrive in one turn: on io_uring a connection reads at most 1 MiB in a turn, about 105,000 frames
/// of one byte. On epoll a turn has no such bound. The default, half of the connection window, would allow far more
/// memory.
const DATA_FRAME_BUDGET: usize = 32 * 1024 * 1024;

/// Settings of the gateway's end. The connection window must grow with the number of open streams.
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

/// Settings of the agent's end, with `slots` concurrent requests.
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
