//! Limits of the data plane, with assertions on the memory that they add up to. The limits of
//! protocols shared with the agent are in `gw_shared` (`tunnel::frame`, `tunnel::endpoint`,
//! `tunnel::window`, `http::body`, `net::tls`).

use std::num::NonZeroUsize;
use std::time::Duration;

use gw_base::service::rate::Rate;
use gw_shared::http::body::{TRAILER_FIELDS_MAX, TRAILERS_MAX};
use gw_shared::http::head::HeadLimits;
use gw_shared::{net, tunnel};

pub(crate) use gw_base::limits::{
    ADMITTED_TUNNELS, CROSS_CORE_REQUESTS, DEADLINE_TICK, HANDSHAKE, HANDSHAKE_MAX, IDLE, LINGER,
    PROGRAM_DOWNLOADS, REQUEST_HEAD, TUNNEL_BUCKETS,
};
pub(crate) use gw_interface::limits::CONTROL_JOBS;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// Time from the first byte of a request head, or from the end of the handshake, to its last byte.
pub const HEAD: Duration = Duration::from_secs(10);
/// Time for which the rest of a refused request is received and discarded, so that a TCP reset does
/// not destroy the response.
pub const DISCARD_WITHIN: Duration = Duration::from_secs(30);
/// Longest time for which the end of a cut response over HTTP/2 waits for a write of its
/// connection.
pub const CUT_BEHIND_A_WRITE: Duration = Duration::from_secs(1);
/// Longest time for which a backend takes nothing of what a caller sent before it left: after its
/// whole response, or on an upgraded connection.
pub const LAST_BYTES: Duration = Duration::from_secs(30);
/// Longest pause of a caller while the rest of its refused request is received.
pub const DISCARD_PAUSE: Duration = Duration::from_secs(5);
/// Rests of requests that one worker discards at once. A further one ends the oldest.
pub const DISCARDS: usize = 1024;
/// Such rests of one client address. A further one ends the oldest of that address.
pub const DISCARDS_PER_ADDRESS: usize = 64;
/// Bytes of a discarded request body between two turns of other tasks.
pub const DISCARDED_PER_TURN: usize = 64 * KIB;
/// Bytes added to the length of each piece when [`DISCARDED_PER_TURN`] is counted: a small piece
/// costs as much as a large one.
pub const DISCARDED_PART: usize = KIB;
/// Time without data after which the kernel sends keep-alive probes to a caller.
pub const CALLER_KEEP_ALIVE: Duration = Duration::from_secs(60);
/// Bytes of pipelined requests that are read while a response is sent, beyond one read.
pub const READ_AHEAD: usize = 32 * KIB;

/// Concurrent requests on one HTTP/2 connection of a caller.
pub const HTTP2_STREAMS: u32 = 100;
/// Flow-control window for all request bodies of one HTTP/2 connection: most bytes that stalled
/// requests can hold. Enough for more than 100 Mbit/s at a round trip of 100 ms.
pub const HTTP2_CONNECTION_WINDOW: u32 = 4 * 1024 * 1024;
/// Bytes of the response of one stream that wait for the caller's window or socket.
pub const HTTP2_SEND_BUFFER: usize = 32 * KIB;
/// Largest header list of a request (RFC 9113 §6.5.2), and most bytes of its header block. SETTINGS
/// announce [`REQUEST_HEAD`]; a list beyond it and below this gets an error response. A longer
/// block ends the connection; a longer list in a shorter block gets a 431 of h2, which carries no
/// request id.
pub const HTTP2_HEADER_LIST: u32 = 128 * 1024;
/// Memory of a header list, in multiples of its counted size: its smallest fields count 33 bytes
/// each and take 104 in a `HeaderMap` that is two thirds full and was copied when it grew.
const HTTP2_HEADER_LIST_COST: usize = 6;
/// Memory of a field, beside its bytes, in a head or in trailers that wait.
const HTTP2_FIELD_COST: usize = 128;
/// Requests that the caller may reset on one HTTP/2 connection (rapid reset, CVE-2023-44487). More
/// end the connection.
pub const HTTP2_RESETS: Rate = Rate::new(500, 6000).unwrap();
/// Streams of one HTTP/2 connection that the h2 crate resets because of errors of the caller
/// (CVE-2025-8671). More end the connection.
pub const HTTP2_ERROR_RESETS: usize = 512;
/// Streams that the caller resets before the gateway has read their requests (CVE-2023-44487). More
/// end the connection.
pub const HTTP2_UNSEEN_RESETS: usize = 100;
/// Header blocks that one HTTP/2 connection may send before they become requests. More belong to
/// streams over [`HTTP2_STREAMS`] or are too large, and count as [`HTTP2_CONTROL_FRAMES`].
pub const HTTP2_HEADERS_AHEAD: u32 = 2 * HTTP2_STREAMS;
/// Weight of the frames of one HTTP/2 connection that are read before other tasks run. Reading a
/// frame takes some 0.7 µs, which is a weight of 1.
pub const HTTP2_WEIGHT_PER_TURN: u32 = 128;
/// Weight of a HEADERS frame, without its bytes.
pub const HTTP2_WEIGHT_OF_HEADERS: u32 = 4;
/// Bytes of a header block with a weight of 1.
pub const HTTP2_HEADER_BYTES_OF_WEIGHT: u32 = 128;
/// Frames without content (PING, SETTINGS, PRIORITY, RST_STREAM, empty DATA …) on one HTTP/2
/// connection. More end the connection.
pub const HTTP2_CONTROL_FRAMES: Rate = Rate::new(2000, 12_000).unwrap();
/// Window updates that requests and responses can earn in addition.
pub const HTTP2_WINDOW_UPDATES: u64 = 100_000;

/// Size below which a piece of a request body is tiny. A tiny piece costs the gateway, the agent
/// and the backend as much as a large one.
pub const TINY_PIECE: usize = 256;
/// Tiny pieces that are forwarded at once. Later ones are collected for [`TINY_PIECE_WAIT`].
pub const TINY_PIECES: Rate = Rate::new(64, 60 * 4000).unwrap();
/// Longest time for which a tiny piece waits for further ones.
pub const TINY_PIECE_WAIT: Duration = Duration::from_millis(1);

/// Concurrent handshakes of one worker. A further one ends the oldest.
pub const HANDSHAKES: usize = 4 * KIB;
/// Such handshakes of one client address. A further one ends the oldest of that address.
pub const HANDSHAKES_PER_ADDRESS: usize = KIB;
/// Time of a worker for handshakes of one account's own domains, in microseconds: 50 ms at once,
/// then a quarter of all. Further steps wait.
pub const DOMAIN_TIME: Rate = Rate::new(50_000, 60 * 250_000).unwrap();
/// Additional wait of first steps, so that later ones go first. The bucket takes longer to fill.
pub const DOMAIN_TIME_PAUSE: Duration = Duration::from_millis(100);
/// Own domains of one worker whose certificates stay ready for handshakes. Beyond, that of the
/// domain without a handshake for the longest time is read again with its next one.
pub const DOMAIN_CERTIFICATES: NonZeroUsize = NonZeroUsize::new(1024).unwrap();
/// Connections in plain HTTP of one worker whose request has not arrived. A further one ends the
/// oldest.
pub const PLAIN_CONNECTIONS: usize = 256;
/// Such connections of one client address. A further one ends the oldest of that address.
pub const PLAIN_CONNECTIONS_PER_ADDRESS: usize = 64;
/// Head of a request in plain HTTP.
pub const PLAIN_HEAD: HeadLimits = HeadLimits {
    head: 16 * KIB,
    fields: REQUEST_HEAD.fields,
    target: REQUEST_HEAD.target,
};
/// Memory of such a connection: a head with one more receive, and its answer, in which a byte of
/// the target may take three.
pub const PLAIN_CONNECTION_MAX: usize =
    PLAIN_HEAD.head + 64 * KIB + 3 * PLAIN_HEAD.target + 8 * KIB;
/// Heads of HTTP/1.1 of one worker that are incomplete. A further one ends the connection with the
/// oldest.
pub const UNFINISHED_HEADS: usize = KIB;
/// Such heads of one client address.
pub const UNFINISHED_HEADS_PER_ADDRESS: usize = 256;
/// Memory of such a head: its bytes with one more receive, in a buffer that has grown.
pub const UNFINISHED_HEAD_MAX: usize = 2 * (REQUEST_HEAD.head + 32 * KIB);
/// Header blocks of HTTP/2 of one worker that are incomplete. A further one ends the connection
/// with the oldest.
pub const UNFINISHED_BLOCKS: usize = 160;
/// Such blocks of one client address.
pub const UNFINISHED_BLOCKS_PER_ADDRESS: usize = 40;
/// Memory of such a block, whose fields are decoded as they arrive.
pub const UNFINISHED_BLOCK_MAX: usize = HTTP2_HEADER_LIST as usize * HTTP2_HEADER_LIST_COST;
/// Requests of HTTP/2 of one worker that announced an empty body and have not ended. A further one
/// resets the oldest.
pub const EMPTY_BODIES: usize = KIB;
/// Such requests of one client address.
pub const EMPTY_BODIES_PER_ADDRESS: usize = 256;
/// Responses of the gateway, on one worker, for which their callers of HTTP/2 have no window. A
/// further one resets the oldest.
pub const UNREAD_REFUSALS: usize = 256;
/// Such responses to one client address: those of one connection.
pub const UNREAD_REFUSALS_PER_ADDRESS: usize = HTTP2_STREAMS as usize;
/// Memory of such a response: bodies of its connection, head and trailers of its request.
pub const UNREAD_REFUSAL_MAX: usize = HTTP2_CONNECTION_WINDOW as usize + HTTP2_WAITING_LISTS;
/// Requests of one connection that are refused before authentication. More end the connection.
pub const REFUSALS: Rate = Rate::new(1000, 600).unwrap();
/// Time between two refusals of one account on one worker, once [`REFUSALS_AT_ONCE`] have left: in
/// all, 2,000 leave in a second.
pub const REFUSAL_INTERVAL: Duration = Duration::from_micros(530);
/// Refusals of one account that leave without a wait.
pub const REFUSALS_AT_ONCE: u32 = 100;
/// Longest wait of a refusal. Beyond, refusals leave as fast as requests arrive.
pub const REFUSAL_WAIT: Duration = Duration::from_secs(1);
/// Memory of a refusal that waits, for which its account is charged. Without room, it leaves at
/// once.
pub const WAITING_REFUSAL: usize = 12 * KIB;
/// Records of unauthenticated requests on one worker: some 3 GB in 7 days, as each takes 1 KiB at
/// most. More requests are counted and not recorded.
pub const UNAUTHENTICATED_RECORDS: Rate = Rate::new(1000, 60 * 5).unwrap();
/// Such records of one service, or of the apex.
pub const UNAUTHENTICATED_RECORDS_PER_SERVICE: Rate = Rate::new(400, 60 * 2).unwrap();
/// Bytes of captured bodies of running requests, per worker. Bodies without room are not captured.
/// Growing buffers hold up to twice that.
pub const CAPTURE_MEMORY: usize = 64 * MIB;
/// Largest request body that the apex reads, in bytes.
pub const APEX_BODY: usize = gw_shared::identity::enrollment::BODY_MAX;
/// Time for that body to arrive.
pub const APEX_BODY_WITHIN: Duration = Duration::from_secs(10);
/// Requests to `/enroll/status` and `/csr` of one agent that has proved its enrollment. An
/// unmodified agent sends one every five seconds at first, and fewer the longer it waits for its
/// approval.
pub const ENROLLED_REQUESTS: Rate = Rate::new(60, 60).unwrap();
/// Certificates that an agent may request on one tunnel. An agent needs one a day, and asks about
/// once a minute while it gets none.
pub const RENEWALS: Rate = Rate::new(6, 1).unwrap();
/// Replaced keys of agents that one worker still has to forget, some 150 bytes each. After a
/// restart all agents connect at once; further keys are forgotten at the next tunnel.
pub const REPLACED_KEYS: usize = 8 * KIB;

/// Least limit on unsent bytes in the kernel for one caller (`TCP_NOTSENT_LOWAT`), when its account
/// has many connections. A socket can hold twice its limit, and also the bytes that are sent and
/// not acknowledged.
pub const UNSENT_LEAST: u32 = 8 * 1024;
/// Largest such limit, when the account has few connections.
pub const UNSENT_MOST: u32 = 128 * 1024;
/// Least size of the kernel buffers of one connection of a caller, in bytes.
pub const SOCKET_BUFFER_LEAST: usize = 64 * KIB;
/// Time for which the kernel keeps unacknowledged bytes of a closed connection if the peer reads
/// none.
pub const CLOSED_DELIVERY: Duration = Duration::from_secs(20);

/// Bytes of a header of the PROXY protocol, version 2, after its first 16 (proxy-protocol.txt
/// §2.2): addresses and extensions, among them client certificates, and identifiers of cloud
/// balancers.
pub const PROXY_HEADER: usize = 4096;
/// Bytes of a header of the PROXY protocol, version 1: one line of text with its end
/// (proxy-protocol.txt §2.1).
pub const PROXY_LINE: usize = 107;
/// Connections without a required header of the PROXY protocol, or with one that is too long, that
/// one worker logs as warnings.
pub const UNANNOUNCED_LINES: Rate = Rate::new(60, 60).unwrap();

/// Time to connect to another node of the region.
pub const NODE_CONNECT: Duration = Duration::from_secs(2);
/// Time that a request waits for a connection to the node of its service, and for another node
/// after a failure.
pub const NODE_WAIT: Duration = Duration::from_secs(5);
/// Times that a request is sent again after a node with a later placement has answered that it is
/// not the owner.
pub const NODE_RETRIES: usize = 2;
/// First pause before a request is sent to the same node again, if that node may not know the
/// current placement yet. Doubles up to eight times this, so that a request is sent ten times at
/// most within [`NODE_WAIT`].
pub const NODE_IS_LATE: Duration = Duration::from_millis(100);
/// Longest pause before such a retry, if this node may not know the current placement yet. It ends
/// with the next placement.
pub const PLACEMENT_IS_LATE: Duration = Duration::from_secs(1);
/// Longest time until unacknowledged bytes between nodes are sent again.
pub const NODE_RETRANSMISSION: Duration = Duration::from_secs(1);
/// Interval of PINGs on a link while it is used, and between two attempts to open one.
pub const LINK_PING: Duration = Duration::from_millis(500);
/// Time since the first unanswered PING after which requests end that wait on a link for the first
/// part of their answer. A node that is frozen for four seconds answers before; a cut is noticed
/// within [`LINK_PING`] more.
pub const LINK_SILENT: Duration = Duration::from_millis(4_750);
/// Time since the first unanswered PING after which the tunnels that one node splices to another
/// end at both. A cut of eight seconds ends none: the PING that was lost first is sent again within
/// [`NODE_RETRANSMISSION`] after it.
pub const SPLICE_SILENT: Duration = Duration::from_secs(9);
/// Time without requests after which a link to another node ends.
pub const LINK_IDLE: Duration = Duration::from_secs(60);
/// Concurrent requests of one worker on a link to another node. More are refused (503).
pub const LINK_REQUESTS: usize = CROSS_CORE_REQUESTS;
/// Interval at which a request that waits for the lease of this node looks again.
pub const LEASE_CHECK: Duration = Duration::from_millis(20);
/// Bytes of bodies that one end of a link holds if no reader reads, beyond the least window of each
/// request.
pub const LINK_BUDGET: usize = 16 * MIB;
/// Links of other nodes to one worker. More are closed.
pub const LINKS_SERVED: usize = 4 * KIB;
/// Connections to the listener for other nodes, of one worker, that have not proved that a node
/// sends them. A further one ends the oldest, those from addresses of nodes last.
pub const NODE_HANDSHAKES: usize = KIB;
/// Such connections of one address that is not that of a node.
pub const NODE_HANDSHAKES_PER_ADDRESS: usize = 256;
/// Questions of the apex to other nodes that wait to be sent. Further ones are not sent.
pub const NODE_CHARGES: usize = 1024;
/// Bytes of one receive from a spliced tunnel, and most bytes of one direction that wait for a peer
/// that is slow to read.
pub const SPLICE_BUFFER: usize = 64 * KIB;
/// Time for the second direction of a spliced tunnel to end after the first.
pub const SPLICE_END: Duration = Duration::from_secs(5);

/// Messages in the mailbox of one worker. If full, requests are refused (503), connections are not
/// handed over, and wakes take a slower path.
pub const MAILBOX: usize = 16 * KIB;
/// Frames in one pipe between workers. If full, the sender waits.
pub const PIPE_FRAMES: usize = 16;
/// Bytes in one pipe between workers. If full, the sender waits.
pub const PIPE_BYTES: usize = 64 * KIB;
/// Memory that is charged for one pipe: one frame may be larger than [`PIPE_BYTES`] if it is alone.
/// What a head with hundreds of fields takes beyond it is charged when the head leaves the pipe.
pub const PIPE_MEMORY: usize = 72 * KIB;
/// Frames that one receiver takes before other tasks of the worker run.
pub const PIPE_FRAMES_PER_TURN: usize = 32;

/// Difference in load (per mille of time) from which a worker gets no connections handed over from
/// a less busy one.
pub const HAND_OVER_BUSY_MARGIN: u32 = 250;
/// Interval at which a worker publishes its load.
pub const BUSY_INTERVAL: Duration = Duration::from_millis(250);

/// Time for which an idle connection stays open in a drain. A request that is already on its way is
/// served, and its response announces the end of the connection.
pub const DRAIN_IDLE: Duration = Duration::from_secs(1);
/// [`DRAIN_IDLE`] with a successor. Longer, because the next request then moves the caller to the
/// successor without an error.
pub const DRAIN_IDLE_SUCCEEDED: Duration = Duration::from_secs(5);
/// Time beyond one round trip for which an idle connection stays open in a drain without a
/// successor, once no request runs in the process. Covers requests that were sent before the drain
/// began.
pub const DRAIN_QUIET: Duration = Duration::from_millis(20);
/// Time for aborted requests to send a last response at the end of a drain.
pub const LAST_WORDS: Duration = Duration::from_millis(250);
/// Time that requests wait for the first tunnel of a service: after a restart, a move of the
/// service, or the end of the last tunnel.
pub const FIRST_TUNNEL_BACK: Duration = Duration::from_secs(5);
/// Time that a request waits at all owners of its service together, if the service moves meanwhile.
/// Also time that requests wait for the first tunnel after the loss of the owner: a node that froze
/// tells its agents to connect again only once it goes on.
pub const WAIT_IN_ALL: Duration = Duration::from_secs(10);
/// Time that requests wait for a free slot of the tunnels in order while another tunnel of the
/// service is not.
pub const SLOT_WAIT: Duration = Duration::from_secs(1);
/// Requests of one service that wait for a tunnel or a slot. Further ones are refused (504).
pub const WAITING_REQUESTS: usize = KIB;
/// Time after a restart in which requests wait for a free slot while some tunnels of the service
/// are missing.
pub const ALL_TUNNELS_BACK: Duration = Duration::from_secs(2);

/// Least memory for relayed requests of one worker, whatever the configuration.
pub const RELAY_MEMORY_LEAST: usize = 64 * tunnel::window::LEAST as usize;

/// Replaced tunnels of one agent and service that may finish their requests. An agent replaces its
/// process up to four times while the first one has requests, and once more if a replacement fails.
pub const REPLACED_TUNNELS: usize = 6;
/// Longest request body of which a copy is kept, to send it to another agent. It fits into the
/// first credit of a stream.
pub const KEPT_BODY: usize = tunnel::window::LEAST as usize;
/// Callers' connections of one service that are bound to an agent. For a further one, the longest
/// idle one is forgotten.
pub const BOUND_CALLERS: usize = KIB;
/// Interval of PINGs on the tunnels of a service that has several.
pub const PING_EVERY: Duration = Duration::from_secs(1);
/// Time after which an unanswered PING makes a tunnel suspect.
pub const PING_UNANSWERED: Duration = Duration::from_secs(2);
/// Interval of the check for such PINGs.
pub const PING_CHECK: Duration = Duration::from_millis(100);
/// Time between two such checks after which this worker counts as late.
pub const PING_CHECK_LATE: Duration = Duration::from_millis(500);
/// Tunnels of one service, of all its agents.
pub const TUNNELS_PER_SERVICE: usize = 64;
/// Tunnels that one agent opens for one service. An unmodified agent waits half a second on average
/// before its first retry, and up to two minutes before later ones.
pub const TUNNELS_BY_AGENT: Rate = Rate::new(10, 60).unwrap();
/// Tunnels that all agents open for one service. After a restart of the gateway all agents
/// reconnect at once, and some retry.
pub const TUNNELS_BY_SERVICE: Rate = Rate::new(2 * TUNNELS_PER_SERVICE as u32, 600).unwrap();
/// Tunnels of one agent and service that are being opened. A further one ends the oldest.
pub const OPENINGS_PER_TUNNEL: usize = 2;
/// Bytes of a program that are written at once.
pub const PROGRAM_CHUNK: usize = 64 * KIB;
/// Time to write [`PROGRAM_CHUNK`].
pub const PROGRAM_CHUNK_WITHIN: Duration = Duration::from_secs(20);
/// Time for a whole program, and in proportion for each part of it: agents give up after it.
pub const PROGRAM_WITHIN: Duration = gw_shared::identity::program::DOWNLOAD_WITHIN;
/// Connections of one agent that are not yet tunnels, beyond [`OPENINGS_PER_TUNNEL`] for each
/// service.
pub const OPENINGS_PER_AGENT: usize = 8;
/// Latest events (refusals of a version, ends of tunnels) that one worker keeps for administrators,
/// one for each agent and service, of each kind.
pub const LATEST_EVENTS: usize = 1000;
/// Time for which a worker keeps such an event.
pub const LATEST_EVENT_KEPT: Duration = Duration::from_secs(24 * 60 * 60);
/// Refused tunnels that are logged as warnings.
pub const TUNNEL_REFUSAL_LINES: Rate = Rate::new(60, 60).unwrap();

/// Frames of a tunnel that carry nothing of a request or response (PING, small CREDIT, RESET and
/// CREDIT of closed streams). More cut the tunnel. An unmodified agent sends far fewer.
pub const TUNNEL_CONTROL_FRAMES: Rate = Rate::new(2000, 12_000).unwrap();

/// Control messages of an agent. More cut the tunnel. An unmodified agent sends one a second.
pub const CONTROL_MESSAGES: Rate = Rate::new(100, 60 * 50).unwrap();
/// Bytes of control messages that wait to be sent on one tunnel. More cut it.
pub const CONTROL_QUEUE: usize = 4 * tunnel::control::MESSAGE_MAX;
/// Longest error message of an agent, in bytes.
pub const AGENT_MESSAGE: usize = tunnel::frame::MESSAGE_TEXT_MAX;

/// Memory of one connection of a caller while its request runs: one receive with read-ahead bytes,
/// the head being read, and the send buffer.
const CALLER_CONNECTION_MAX: usize =
    READ_AHEAD + 64 * KIB + REQUEST_HEAD.head + net::tls::SEND_BUFFER;
/// A head that waits for the end of its body, and trailers that wait for the reader of theirs.
pub const HTTP2_WAITING_LISTS: usize = REQUEST_HEAD.head
    + REQUEST_HEAD.fields * HTTP2_FIELD_COST
    + TRAILERS_MAX
    + TRAILER_FIELDS_MAX * HTTP2_FIELD_COST;
/// Additional memory of one HTTP/2 connection if neither the caller nor the backends read: request
/// bodies, responses, heads and trailers of requests, a header list being read.
const HTTP2_CONNECTION_MAX: usize = HTTP2_CONNECTION_WINDOW as usize
    + HTTP2_STREAMS as usize * (HTTP2_SEND_BUFFER + HTTP2_WAITING_LISTS)
    + HTTP2_HEADER_LIST as usize * HTTP2_HEADER_LIST_COST;
/// Additional memory for interim responses, which credit does not limit.
const HTTP2_INTERIM_MAX: usize = HTTP2_STREAMS as usize * tunnel::response::INTERIM_BYTES;
/// Memory of one relayed request beyond the connection of its caller: its tunnel stream in both
/// directions, with the first window. The window depends on the path and the number of streams (see
/// `gw_shared::tunnel::window`). The memory for relayed requests bounds the sum.
const RELAY_MAX: usize = tunnel::window::FIRST as usize + tunnel::endpoint::STREAM_SEND_BUFFER;
/// [`RELAY_MAX`] with the largest window, for a long path and few streams.
const LONG_RELAY_MAX: usize = tunnel::window::MOST as usize + tunnel::endpoint::STREAM_SEND_BUFFER;
/// Additional memory of the two pipes of a request that crosses workers.
const CROSS_CORE_MAX: usize = 2 * PIPE_MEMORY;

// Memory of a flood of handshakes.
const _: () = assert!(HANDSHAKES * HANDSHAKE_MAX <= 192 * MIB);
// Memory of a flood of incomplete requests, and of one of refusals that are not read.
const _: () = assert!(
    UNFINISHED_HEADS * UNFINISHED_HEAD_MAX
        + UNFINISHED_BLOCKS * UNFINISHED_BLOCK_MAX
        + EMPTY_BODIES * HTTP2_WAITING_LISTS
        <= 320 * MIB
);
const _: () = assert!(UNREAD_REFUSALS * UNREAD_REFUSAL_MAX <= 1100 * MIB);
// Memory of a flood of connections in plain HTTP.
const _: () = assert!(PLAIN_CONNECTIONS * PLAIN_CONNECTION_MAX <= 28 * MIB);
// Memory of a stalled caller with a large response, for a request that crosses workers.
const _: () = assert!(CALLER_CONNECTION_MAX + RELAY_MAX + CROSS_CORE_MAX <= MIB + MIB / 8);
const _: () = assert!(CALLER_CONNECTION_MAX + LONG_RELAY_MAX + CROSS_CORE_MAX <= 9 * MIB);
// Each request that waits for the control plane can hold a whole body.
const _: () = assert!(CONTROL_JOBS * APEX_BODY <= 16 * MIB);
// A stalled request to another node holds no more here than one that crosses workers.
const _: () =
    assert!(tunnel::window::LEAST as usize + tunnel::endpoint::STREAM_SEND_BUFFER <= RELAY_MAX);
// The budget of a link has room for streams with the first window.
const _: () = assert!(
    LINK_BUDGET >= 32 * tunnel::window::FIRST as usize
        && LINK_REQUESTS <= tunnel::endpoint::STREAMS_MAX
);
// A pipe has room for any head with at most 128 fields, each in an entry of 72 bytes.
const _: () =
    assert!(PIPE_MEMORY >= PIPE_BYTES && PIPE_MEMORY >= tunnel::response::HEAD.head + 128 * 72);
// Queues of all pairs of pipes.
const _: () = assert!(CROSS_CORE_REQUESTS * 2 * PIPE_FRAMES * 64 <= 16 * MIB);
// The mailbox has room for the wakes of all requests that cross cores, and for other messages.
const _: () = assert!(MAILBOX >= CROSS_CORE_REQUESTS + CROSS_CORE_REQUESTS / 2);
// Memory of an HTTP/2 caller that stalls all its streams, without its relays.
const _: () = assert!(HTTP2_CONNECTION_MAX <= 15 * MIB && HTTP2_INTERIM_MAX <= 8 * MIB);
// A message fits in the queue of control messages, and the queue is small compared to the memory of
// a tunnel's streams.
const _: () = assert!(CONTROL_QUEUE >= tunnel::control::MESSAGE_MAX && CONTROL_QUEUE <= MIB / 4);
// The least window has room for four frames: a peer is granted the next bytes before it has used up
// all.
const _: () = assert!(tunnel::window::LEAST as usize >= 4 * tunnel::frame::DATA_MAX);
// As many streams as an agent has slots by default can have the first window, and 8 streams the
// largest.
const _: () = assert!(tunnel::window::TUNNEL_BUDGET >= 128 * tunnel::window::FIRST as usize);
const _: () = assert!(tunnel::window::TUNNEL_BUDGET >= 8 * tunnel::window::MOST as usize);
// Windows are halved and doubled between these.
const _: () = assert!(
    tunnel::window::LEAST.is_power_of_two()
        && tunnel::window::FIRST.is_power_of_two()
        && tunnel::window::MOST.is_power_of_two()
);
