//! The bounds of the gateway in one place, with the memory they add up to. Those of the protocols it shares with the
//! agent are in `gw_shared` (`tunnel::settings`, `tunnel::window`, `http::body`, `net::tls`).

use std::num::NonZeroUsize;
use std::time::Duration;

use gw_shared::http::HeadLimits;
use gw_shared::{net, tunnel};

use crate::rate::Rate;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// A caller's request head (decisions: 32 KiB, 100 fields, target 8 KiB).
pub(crate) const REQUEST_HEAD: HeadLimits = HeadLimits { head: 32 * KIB, fields: 100, target: 8 * KIB };

/// Connections that the kernel completes while we are not looking; it caps this at net.core.somaxconn.
pub(crate) const BACKLOG: i32 = 4096;
/// From accepted socket to finished TLS handshake.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(5);
/// From the first byte of a request head (or the handshake) to its last.
pub(crate) const HEAD: Duration = Duration::from_secs(10);
/// Between two requests on one connection.
pub(crate) const IDLE: Duration = Duration::from_secs(75);
/// How long the rest of a refused request is read and thrown away, so that the refusal is not lost to a TCP reset.
pub(crate) const LINGER: Duration = Duration::from_secs(2);
pub(crate) const LINGER_BYTES: usize = MIB;
/// Silence after which the kernel begins to ask whether an idle caller is still there.
pub(crate) const CALLER_KEEP_ALIVE: Duration = Duration::from_secs(60);
/// How often deadlines are looked at: they are kept to within this.
pub(crate) const DEADLINE_TICK: Duration = Duration::from_millis(250);

/// Bytes a caller may send ahead (pipelined requests) while a response is under way, beyond one read.
pub(crate) const READ_AHEAD: usize = 32 * KIB;

/// Requests at a time on one HTTP/2 connection of a caller.
pub(crate) const HTTP2_STREAMS: u32 = 100;
/// Flow-control window for all request bodies of one HTTP/2 connection: what those that stall can hold. Fills
/// 100 Mbit/s over 100 ms with room to spare.
pub(crate) const HTTP2_CONNECTION_WINDOW: u32 = 4 * 1024 * 1024;
/// Bytes of one stream's response that may wait for the caller's window or socket.
pub(crate) const HTTP2_SEND_BUFFER: usize = 32 * KIB;
/// Largest header list of a request (RFC 9113 §6.5.2), and most bytes of its header block. A list beyond [`REQUEST_HEAD`]
/// and below this gets an error response; one beyond this ends the connection.
pub(crate) const HTTP2_HEADER_LIST: u32 = 128 * 1024;
/// Memory of a header list, in multiples of its counted size: its smallest fields count 33 bytes each and take 104 in a
/// `HeaderMap` that is two thirds full and was copied when it grew.
const HTTP2_HEADER_LIST_COST: usize = 6;
/// Streams of one HTTP/2 connection that may have unsent trailers.
pub(crate) const HTTP2_TRAILERS_WAITING: usize = 10 * HTTP2_STREAMS as usize;
/// Requests that one HTTP/2 connection may take back; beyond that it is ended.
pub(crate) const HTTP2_RESETS: Rate = Rate::new(500, 6000).unwrap();
/// Streams of one HTTP/2 connection that the h2 crate resets for what the caller did wrong on them (CVE-2025-8671), and
/// that the caller resets before we have seen their requests (CVE-2023-44487); beyond that it is ended.
pub(crate) const HTTP2_ERROR_RESETS: usize = 512;
pub(crate) const HTTP2_UNSEEN_RESETS: usize = 100;
/// Header blocks that one HTTP/2 connection may send ahead of the requests that they become. More are of streams over
/// [`HTTP2_STREAMS`], or too large to be read, and count as frames that carry nothing.
pub(crate) const HTTP2_HEADERS_AHEAD: u32 = 2 * HTTP2_STREAMS;
/// What the frames of one HTTP/2 connection may cost before others have their turn. Reading a frame costs some 0.7 µs,
/// which is a weight of 1; a request as much as four of them, and one more for each so many bytes of its head.
pub(crate) const HTTP2_WEIGHT_PER_TURN: u32 = 128;
pub(crate) const HTTP2_WEIGHT_OF_HEADERS: u32 = 4;
pub(crate) const HTTP2_HEADER_BYTES_OF_WEIGHT: u32 = 128;
/// Frames that carry nothing (PING, SETTINGS, PRIORITY, RST_STREAM, empty DATA …) that one HTTP/2 connection may send;
/// beyond that it is ended.
pub(crate) const HTTP2_CONTROL_FRAMES: Rate = Rate::new(2000, 12_000).unwrap();
/// Window updates beyond that, that responses can have earned.
pub(crate) const HTTP2_WINDOW_UPDATES: u64 = 100_000;

/// Pieces of a request body below so many bytes that are passed on at once and as they come. More, and the next wait
/// [`TINY_PIECE_WAIT`] for each other: each costs the gateway, the agent and the backend as much as a large one.
pub(crate) const TINY_PIECE: usize = 256;
pub(crate) const TINY_PIECES: Rate = Rate::new(64, 60 * 4000).unwrap();
pub(crate) const TINY_PIECE_WAIT: Duration = Duration::from_millis(1);

/// Connections of one worker: callers, and tunnels until their upgrade (then [`TUNNELS_PER_SERVICE`] bounds them).
pub(crate) const CONNECTIONS_PER_WORKER: usize = 100_000;
/// Connections of one client address on one worker, unless configured: enough for what stands behind one address
/// translation.
pub(crate) const CONNECTIONS_PER_ADDRESS: usize = 16 * KIB;
/// Handshakes of one worker at a time. One more: the oldest is ended.
pub(crate) const HANDSHAKES: usize = 4 * KIB;
/// Requests on one connection that are refused before anybody is authenticated; beyond that it is ended.
pub(crate) const REFUSALS: Rate = Rate::new(1000, 600).unwrap();
/// Records of requests to the apex that did not authenticate, of one worker: 2 a second are some 0.5 GB in 7 days, if
/// each is as large as can be. More are counted, not kept.
pub(crate) const APEX_RECORDS: Rate = Rate::new(1000, 120).unwrap();
/// Services that one worker counts one by one; what others do is counted together.
pub(crate) const SERVICES_COUNTED: usize = 1000;
/// Bytes of bodies that one worker keeps for the log of requests under way; what there is no room for is left out.
/// Buffers that grow hold up to twice that.
pub(crate) const CAPTURE_MEMORY: usize = 64 * MIB;
/// Points of series that wait in memory while their file cannot be written, each some 500 bytes.
pub(crate) const SERIES_PENDING: usize = 16 * KIB;
/// Longest access token that is looked at, in bytes. Ours are some 700.
pub(crate) const TOKEN: usize = 4 * KIB;
/// Access tokens that one worker remembers to have verified, each some 600 bytes.
pub(crate) const VERIFIED_TOKENS: usize = 8 * KIB;
/// Longest lifetime of access tokens that can be configured.
pub(crate) const TOKEN_LIFETIME_MAX: Duration = Duration::from_hours(24);

/// Largest request body that the apex reads, in bytes, and how long it may take.
pub(crate) const PLATFORM_BODY: usize = gw_shared::identity::enrollment::BODY_MAX;
pub(crate) const PLATFORM_BODY_WITHIN: Duration = Duration::from_secs(10);
/// Requests of workers to the control plane that wait. Full: 503.
pub(crate) const CONTROL_JOBS: usize = 256;
/// Certificates that one tunnel may ask for, and that one agent may have in all: it needs one a day, and some more while
/// something is wrong.
pub(crate) const RENEWALS: Rate = Rate::new(6, 6).unwrap();
pub(crate) const CERTIFICATES: Rate = Rate::new(20, 2).unwrap();

/// What may wait for the request log's thread, of all workers: bytes, captured bodies included, and records. Full: the
/// captured bodies of a batch are dropped, or the batch is, and counted. Four seconds of 30,000 requests a second.
pub(crate) const LOG_QUEUE_BYTES: usize = 64 * MIB;
pub(crate) const LOG_QUEUE_RECORDS: usize = 128 * KIB;
/// Batches that may wait, however small.
pub(crate) const LOG_QUEUE_BATCHES: usize = 8 * KIB;

/// Descriptors kept free for everything that is not a connection: listeners, rings, the store, logs.
pub(crate) const RESERVED_DESCRIPTORS: u64 = 128;

/// Bytes that may wait in the kernel to be sent to one caller (`TCP_NOTSENT_LOWAT`): from many connections of an account
/// down to few. Each can hold twice as much. Bytes that are sent and not acknowledged come on top and follow the path.
pub(crate) const UNSENT_LEAST: u32 = 8 * 1024;
pub(crate) const UNSENT_MOST: u32 = 128 * 1024;
/// Kernel buffers of one caller's connection are not made smaller than this, in bytes.
pub(crate) const SOCKET_BUFFER_LEAST: usize = 64 * KIB;
/// How long the kernel keeps the unacknowledged bytes of a closed connection if its peer takes none.
pub(crate) const CLOSED_DELIVERY: Duration = Duration::from_secs(20);

/// Most bytes of a PROXY protocol header behind its first 16 (proxy-protocol.txt §2.2): the largest addresses, those of
/// Unix sockets, and 320 for extensions.
pub(crate) const PROXY_HEADER: usize = 536;

/// Client addresses that one table of limits remembers; beyond that it forgets who has been silent for longest. Seven
/// sixteenths of a power of two: a hash table of that many places (see `limit::addresses`) never grows beyond them.
pub(crate) const ADDRESSES: NonZeroUsize = NonZeroUsize::new(14 * KIB).unwrap();

/// Messages waiting in one worker's mailbox. Full: requests are answered 503, connections stay where they are, wakes
/// take the slower way.
pub(crate) const MAILBOX: usize = 16 * KIB;
/// Messages handled before other tasks of the worker get their turn.
pub(crate) const MAILBOX_BATCH: usize = 128;

/// Requests of other workers' callers that one owner relays at a time. Full: 503.
pub(crate) const CROSSING_RELAYS: usize = 8 * KIB;
/// Frames and bytes in flight in one pipe between workers. Full: the sender waits.
pub(crate) const PIPE_FRAMES: usize = 16;
pub(crate) const PIPE_BYTES: usize = 64 * KIB;
/// Frames that one receiver takes before other tasks of the worker get their turn.
pub(crate) const PIPE_FRAMES_PER_TURN: usize = 32;

/// A worker this much busier than another (share of its time, in per mille) is not handed that one's connections.
pub(crate) const HAND_OVER_BUSY_MARGIN: u32 = 250;
/// How often a worker publishes how busy it is.
pub(crate) const BUSY_INTERVAL: Duration = Duration::from_millis(250);

/// How long a drain waits for running requests before it ends them.
pub(crate) const DRAIN: Duration = Duration::from_secs(30);
/// How long an idle connection may stay in a drain: its caller may have a request on its way, which is served and told
/// that the connection ends. With a successor there is reason to wait for a caller's next request: then none fails.
pub(crate) const DRAIN_IDLE: Duration = Duration::from_secs(1);
pub(crate) const DRAIN_IDLE_SUCCEEDED: Duration = Duration::from_secs(5);
/// Without a successor, and once no request runs in the whole process, a connection stays only for a request that was
/// sent before the drain began: so long beyond one round trip, which is twice the way.
pub(crate) const DRAIN_QUIET: Duration = Duration::from_millis(20);
/// How long agents may take to end their tunnels once no request is on them.
pub(crate) const TUNNELS_END: Duration = Duration::from_secs(2);
/// How long requests that a drain cuts off may take to tell their callers, and then to be gone.
pub(crate) const LAST_WORDS: Duration = Duration::from_millis(250);
/// How long the last spans may take to be exported when everything else has ended.
pub(crate) const SPANS_END: Duration = Duration::from_secs(5);
/// Levels of services' buckets that are handed to the next process, the emptiest first, and what each may take as text.
pub(crate) const LEVELS: usize = 100_000;
pub(crate) const LEVEL_BYTES: usize = 192;
/// Requests of a predecessor that wait for its successor to admit them, and for how long. More: 503; longer: the
/// successor counts as gone.
pub(crate) const CHARGES: usize = 16 * KIB;
pub(crate) const CHARGED_WITHIN: Duration = Duration::from_secs(2);
/// How long a successor may take for each step of a takeover.
pub(crate) const TAKEOVER_STEP: Duration = Duration::from_secs(15);
/// How long workers may take to tell the levels of rate limits at a takeover or a stop. Below [`TAKEOVER_STEP`], after
/// which the successor gives up.
pub(crate) const LEVELS_WITHIN: Duration = Duration::from_secs(10);
const _: () = assert!(LEVELS_WITHIN.as_secs() < TAKEOVER_STEP.as_secs());
/// How long a successor's callers wait for the tunnels that its predecessor had: for the first of a service, and for
/// all of them.
pub(crate) const FIRST_TUNNEL_BACK: Duration = Duration::from_secs(5);
pub(crate) const ALL_TUNNELS_BACK: Duration = Duration::from_secs(2);

/// Of one worker, whatever the configuration says.
pub(crate) const RELAY_MEMORY_LEAST: usize = 64 * tunnel::window::LEAST as usize;

/// Tunnels of one service: several agents share it.
pub(crate) const TUNNELS_PER_SERVICE: usize = 64;
/// Tunnels that one agent opens of one service. The genuine agent waits half a second on average before its first
/// further attempt, and up to two minutes before later ones.
pub(crate) const TUNNELS_BY_AGENT: Rate = Rate::new(10, 60).unwrap();
/// Tunnels that all agents of one service open: after a restart of the gateway all of them come at once, and not all
/// succeed at the first attempt.
pub(crate) const TUNNELS_BY_SERVICE: Rate = Rate::new(2 * TUNNELS_PER_SERVICE as u32, 600).unwrap();
/// Buckets for the tunnels of agents and services on one worker. More that are not full: 503.
pub(crate) const TUNNEL_BUCKETS: usize = 16 * KIB;
/// Tunnels of one agent and service that have begun and are not registered. One more: the oldest is ended.
pub(crate) const OPENINGS_PER_TUNNEL: usize = 2;
/// Connections of one agent that have not become a tunnel of a service, beyond [`OPENINGS_PER_TUNNEL`] of each service.
pub(crate) const OPENINGS_PER_AGENT: usize = 8;
/// Refused tunnels that are worth a warning in the log.
pub(crate) const TUNNEL_REFUSAL_LINES: Rate = Rate::new(60, 60).unwrap();

/// Frames of a tunnel that belong to no request (PING, SETTINGS, window updates that nothing earned …), and those of
/// requests that are over; beyond that the tunnel is cut. The genuine agent sends some 40 a second when its windows
/// change all the time.
pub(crate) const TUNNEL_CONTROL_FRAMES: Rate = Rate::new(2000, 12_000).unwrap();
/// Frames of answers that one request earns: head, trailers, their continuations, the end, a reset. And what an interim
/// response earns when it is taken: a further head with its continuations.
pub(crate) const TUNNEL_FRAMES_PER_REQUEST: u32 = 8;
pub(crate) const TUNNEL_FRAMES_PER_HEAD: u32 = 3;
/// Frames of answers beyond those: answers that were under way when their callers left.
pub(crate) const TUNNEL_FRAMES_AHEAD: u32 = 4096;
/// As [`HTTP2_WEIGHT_PER_TURN`]: a tunnel carries many callers. Bounds the heads that wait in h2 between two turns.
pub(crate) const TUNNEL_WEIGHT_PER_TURN: u32 = 1024;

/// Messages that an agent sends on its control stream; beyond that the tunnel is cut. The genuine agent sends one a
/// second, and an answer to each of the gateway's.
pub(crate) const CONTROL_MESSAGES: Rate = Rate::new(100, 60 * 50).unwrap();
/// Bytes that wait for an agent to take them from its control stream, and how long the first of them waits; beyond that
/// the tunnel is cut.
pub(crate) const CONTROL_QUEUE: usize = 4 * tunnel::control::MESSAGE_MAX;
pub(crate) const CONTROL_TAKEN_WITHIN: Duration = tunnel::heartbeat::DEAD_AFTER;
/// How long an agent may take to answer a change of its windows. Its answer can wait behind a frame of each download, on
/// a slow link too.
pub(crate) const WINDOW_ANSWERED_WITHIN: Duration = Duration::from_mins(5);
/// How long it may take where it has not acknowledged the change either and streams hold more than their windows: until
/// it does, what they hold is not bounded by the smaller windows.
pub(crate) const WINDOW_ACKNOWLEDGED_WITHIN: Duration = Duration::from_mins(1);
/// Longest text of an agent's error, in bytes, and how long the rest of it is waited for.
pub(crate) const AGENT_MESSAGE: usize = 1024;
pub(crate) const AGENT_MESSAGE_WITHIN: Duration = Duration::from_secs(2);

/// What one caller connection can hold while its request runs: one receive with what was read ahead, the head being
/// read, and what waits to be sent.
const CALLER_CONNECTION_MAX: usize = READ_AHEAD + 64 * KIB + REQUEST_HEAD.head + net::tls::SEND_BUFFER;
/// Further memory of one HTTP/2 connection if neither its caller nor its backends read: request bodies, responses, a
/// header list being read, streams with unsent trailers.
const HTTP2_CONNECTION_MAX: usize = HTTP2_CONNECTION_WINDOW as usize
    + HTTP2_STREAMS as usize * HTTP2_SEND_BUFFER
    + HTTP2_HEADER_LIST as usize * HTTP2_HEADER_LIST_COST
    + HTTP2_TRAILERS_WAITING * size_of::<u32>();
/// Interim responses on top of that, which no window holds back: of backends that send as many as they may.
const HTTP2_INTERIM_MAX: usize = HTTP2_STREAMS as usize * tunnel::response::INTERIM_BYTES;
/// What one relayed request can hold at the gateway beyond its caller's connection: its tunnel stream, both ways.
/// The window depends on the path and on how many streams there are (see `gw_shared::tunnel::window`); this is that of
/// most. The sum of all is bounded by the memory for relayed requests.
const RELAY_MAX: usize = tunnel::window::FIRST as usize + tunnel::settings::STREAM_SEND_BUFFER;
/// The longest path and few streams.
const LONG_RELAY_MAX: usize = tunnel::window::MOST as usize + tunnel::settings::STREAM_SEND_BUFFER;
/// What the two pipes of a request that crosses can hold on top.
const CROSSING_MAX: usize = 2 * (PIPE_BYTES + tunnel::settings::FRAME_SIZE as usize);

/// What a connection can hold before its handshake is done: a ClientHello, received and as the session has it, and the
/// session with its keys and its answer.
const HANDSHAKE_MAX: usize = 2 * net::tls::CLIENT_HELLO_MAX + 16 * KIB;

// Bounds the memory of a flood of handshakes.
const _: () = assert!(HANDSHAKES * HANDSHAKE_MAX <= 192 * MIB);
// A stalled caller with a large download, on the wrong worker, holds this much and no more.
const _: () = assert!(CALLER_CONNECTION_MAX + RELAY_MAX + CROSSING_MAX <= MIB + MIB / 8);
const _: () = assert!(CALLER_CONNECTION_MAX + LONG_RELAY_MAX + CROSSING_MAX <= 9 * MIB);
// What waits for the control plane can each have a whole body.
const _: () = assert!(CONTROL_JOBS * PLATFORM_BODY <= 16 * MIB);
// An idle pair of pipes costs its queue only; full ones hold their credit.
const _: () = assert!(CROSSING_RELAYS * 2 * PIPE_FRAMES * 64 <= 16 * MIB);
// Every relay that crosses can have a wake in each direction of both pipes waiting, and the mailbox still has room.
const _: () = assert!(MAILBOX >= CROSSING_RELAYS + CROSSING_RELAYS / 2);
// A caller of HTTP/2 that stalls all its streams holds this much and no more, its relays aside.
const _: () = assert!(HTTP2_CONNECTION_MAX <= 8 * MIB && HTTP2_INTERIM_MAX <= 8 * MIB);
// A message fits the control stream's queue, and that is small beside what a tunnel's streams hold.
const _: () = assert!(CONTROL_QUEUE >= tunnel::control::MESSAGE_MAX && CONTROL_QUEUE <= MIB / 4);
// A response with all that it may have fits the tunnel's header list, with room for what the agent adds.
const _: () = assert!(
    tunnel::response::HEAD.head + 32 * (tunnel::response::HEAD.fields + 4) <= tunnel::settings::HEADER_LIST as usize
);
// One stream's window must take a frame, or nothing ever moves.
const _: () = assert!(tunnel::window::LEAST > tunnel::settings::FRAME_SIZE);
// As many streams as an agent has slots by default keep the first window, as many as fit have the largest.
const _: () = assert!(tunnel::window::TUNNEL_BUDGET >= 128 * tunnel::window::FIRST as usize);
const _: () = assert!(tunnel::window::TUNNEL_BUDGET >= 8 * tunnel::window::MOST as usize);
// Windows are halved and doubled between these.
const _: () = assert!(
    tunnel::window::LEAST.is_power_of_two()
        && tunnel::window::FIRST.is_power_of_two()
        && tunnel::window::MOST.is_power_of_two()
);
// A request head must fit the tunnel's header list with room for what we add.
const _: () = assert!(REQUEST_HEAD.head + 32 * (REQUEST_HEAD.fields + 16) < tunnel::settings::HEADER_LIST as usize);
