//! Limits of the control plane, with assertions on the memory that they add up to.

use std::time::Duration;

use gw_base::service::rate::Rate;

pub(crate) use gw_base::limits::{HANDSHAKE, IDLE, LINGER, REQUEST_HEAD};
pub(crate) use gw_interface::limits::{LEVEL_BYTES, LEVELS, TOKEN_LIFETIME_MAX};
pub(crate) use gw_store::limits::RECENT_CHANGES;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// Certificates of one agent, each of which is a change. An agent needs 2 an hour at most, and one
/// at each start while it cannot write its state folder.
pub const CERTIFICATES: Rate = Rate::new(20, 4).unwrap().hourly();
/// Age at which a key of session tickets is replaced. It opens tickets for as long again.
pub const TICKET_KEY_AGE: Duration = Duration::from_secs(24 * 3600);
/// Lease of the node that orders certificates. Longer than any step of an order.
pub const CERTIFICATE_LEASE: Duration = Duration::from_secs(5 * 60);
/// Longest time between two looks at whether a certificate is due.
pub const CERTIFICATE_LOOK_EVERY: Duration = Duration::from_secs(30);
/// Time after which a step of an order that could not be stored is made again.
pub const CERTIFICATE_STORE_RETRY: Duration = Duration::from_secs(2);
/// Own domains of one service.
pub const DOMAINS_PER_SERVICE: usize = 20;
/// Bytes of the certificate of an own domain: the chain and the key, PEM.
pub const DOMAIN_CERTIFICATE_BYTES: usize = 16 * KIB;
/// Time for which an own domain is served although DNS does not prove it any more.
pub const DOMAIN_GRACE: Duration = Duration::from_secs(7 * 24 * 3600);
/// Own domains that are looked up in DNS at once, without a request to look.
pub const DOMAIN_LOOKUPS: usize = 16;
/// Removed domains whose failed orders are kept.
pub const REMOVED_FAILURES: usize = KIB;
/// Own domains whose certificates are ordered at once. Others wait.
pub const DOMAIN_ORDERS: usize = 16;
/// Time at a stop for the membership and its running statement.
pub const MEMBERSHIP_END: Duration = Duration::from_secs(1);
/// Nodes without a sign of life that a node probes at once. Others wait.
pub const PROBES: usize = 256;
/// Connections of control planes of other nodes. More are closed.
pub const CLUSTER_CONNECTIONS: usize = 4 * KIB;
/// Concurrent handshakes with the control plane. A further one ends the oldest, those from
/// addresses of nodes last.
pub const CLUSTER_HANDSHAKES: usize = 256;
/// Such handshakes of one address that is not that of a node.
pub const CLUSTER_HANDSHAKES_PER_ADDRESS: usize = 64;
/// Bytes of a request head of another control plane.
pub const CLUSTER_HEAD: usize = 16 * KIB;
/// Bytes of such a request's body, unless its route says otherwise.
pub const CLUSTER_BODY: usize = MIB;
/// Bytes of the bodies of other control planes that are not whole, but for [`SMALL_BODY`]. Others
/// wait.
pub const CLUSTER_BODIES: usize = 40 * MIB;
/// Time from the end of a handshake or of a response to the last byte of the next request head.
pub const CLUSTER_IDLE: Duration = Duration::from_secs(30);
/// Time from a request head to the last byte of its body, with the wait for room.
pub const CLUSTER_BODY_WITHIN: Duration = Duration::from_secs(30);
/// Time without an acknowledgement, or without progress of a send, after which a connection ends.
pub const CLUSTER_DEAD_AFTER: Duration = Duration::from_secs(30);
/// Bytes of a response of another control plane.
pub const CLUSTER_RESPONSE: usize = 64 * MIB;
/// Connections to the admin listener. A further one ends the oldest, those with an authenticated
/// request last.
pub const ADMIN_CONNECTIONS: usize = 1024;
/// Connections to it of one client address. A further one ends the oldest of the address without an
/// authenticated request.
pub const ADMIN_CONNECTIONS_PER_ADDRESS: usize = 256;
/// Bytes of a request head to it.
pub const ADMIN_HEAD: usize = 32 * KIB;
/// Bytes of a request body to it, unless its route says otherwise.
pub const ADMIN_BODY: usize = 64 * KIB;
/// Bytes of a replay: a body to send of about 3 MB, in base64.
pub const ADMIN_REPLAY: usize = 4 * MIB;
/// Bytes of the bodies of requests to it that are not whole, but for [`SMALL_BODY`]. Others wait.
pub const ADMIN_BODIES: usize = 24 * MIB;
const _: () = assert!(ADMIN_REPLAY <= ADMIN_BODIES && ADMIN_BODIES + CLUSTER_BODIES <= 64 * MIB);
/// Longest body that never waits for room: a part of the memory of its connection. A revocation has
/// less, and strangers can send no more.
pub const SMALL_BODY: usize = 24 * KIB;
const _: () = assert!(ADMIN_SIGN_IN <= SMALL_BODY);
/// Bytes of the form that signs in: the largest body that is read without authentication.
pub const ADMIN_SIGN_IN: usize = 24 * KIB;
/// Bytes of a form that was sent after its session had ended: the other body that is read without
/// authentication. The sign-in form carries it in an encoding that is up to three times as large.
pub const ADMIN_KEPT_FORM: usize = 6 * KIB;
const _: () = assert!(3 * ADMIN_KEPT_FORM + 4 * KIB <= ADMIN_SIGN_IN);
/// Responses of it with metrics that clients have not read. A further one ends the oldest.
pub const ADMIN_UNREAD: usize = 16;
/// Such responses to one client address.
pub const ADMIN_UNREAD_PER_ADDRESS: usize = 4;
/// Time from a request head to it to the last byte of the body, with the wait for room.
pub const ADMIN_BODY_WITHIN: Duration = Duration::from_secs(60);
/// Time without an acknowledgement, or without progress of a send, after which a connection to it
/// ends.
pub const ADMIN_DEAD_AFTER: Duration = Duration::from_secs(300);
/// Idle connections to the control plane of one node that are kept.
pub const CLUSTER_KEPT: usize = 4;
/// Time for which they are kept: shorter than the other end waits.
pub const CLUSTER_KEPT_FOR: Duration = Duration::from_secs(15);
/// Steps of changes, and one more for each change, that wait to be sent to a predecessor, besides
/// those of the last change. Beyond, the predecessor gets no further changes and accepts no more
/// requests.
pub const UNSENT_STEPS: usize = 64 * KIB;
/// Bytes of the journal of changes in the data folder. A copy of all records is written when it is
/// half full.
pub const JOURNAL: usize = 32 * MIB;
/// Steps of changes, and one more for each change, that wait to be written to it. Beyond, a copy is
/// written.
pub const JOURNAL_STEPS: usize = 64 * KIB;
/// Memory of a connection to the admin listener without authentication, in bytes: a request head as
/// it was received and as it was parsed, the form that signs in, and a TLS session with a record in
/// each direction.
pub const ADMIN_UNAUTHENTICATED_MAX: usize = 2 * ADMIN_HEAD + ADMIN_SIGN_IN + 40 * KIB;

// Memory of clients of the admin listener that have not authenticated.
const _: () = assert!(ADMIN_CONNECTIONS * ADMIN_UNAUTHENTICATED_MAX <= 128 * MIB);
