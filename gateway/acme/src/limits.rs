//! Bounds of everything that an authority, a DNS server or a hook can make this crate wait for or
//! keep.

use std::time::Duration;

/// Longest time until a connection to the authority is open.
pub const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// Longest time of one HTTP request to the authority, with its answer.
pub const REQUEST_WITHIN: Duration = Duration::from_secs(45);
/// Largest answer of the authority, in bytes: a chain of certificates is the largest one.
pub const ANSWER_BYTES_MAX: u64 = 256 * 1024;
/// Attempts of one signed request whose nonce the authority refuses.
pub const NONCES_MAX: usize = 6;

/// Time between two questions about the state of an order, if the authority asks for no other.
pub const POLL_EVERY: Duration = Duration::from_secs(1);
/// Longest time between two questions about the state of an order.
pub const POLL_EVERY_MAX: Duration = Duration::from_secs(30);
/// Age of an order at which it is given up.
pub const ORDER_WITHIN: Duration = Duration::from_secs(60 * 60);
/// Time after which a published proof has to be visible.
pub const VISIBLE_WITHIN: Duration = Duration::from_secs(10 * 60);
/// Proofs that could not be withdrawn and are kept, to be withdrawn with those of the next order.
pub const LEFTOVERS_MAX: usize = 16;
/// Shortest time between two questions for renewal information of a certificate.
pub const ASK_AGAIN_MIN: Duration = Duration::from_secs(60);
/// Orders of one account that begin within [`ORDERS_WITHIN`].
pub const ORDERS_PER_ACCOUNT: usize = 100;
/// Orders of all accounts that begin within [`ORDERS_WITHIN`]. Let's Encrypt accepts 300 in that
/// time: the rest is for the region.
pub const ORDERS_SHARED: usize = 280;
/// Time within which orders are counted.
pub const ORDERS_WITHIN: Duration = Duration::from_secs(3 * 60 * 60);
/// Longest `Retry-After` that is followed.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Longest time for one answer of a DNS server over UDP.
pub const DNS_ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// Questions over UDP before TCP is tried.
pub const DNS_ATTEMPTS: usize = 2;
/// Longest time of one exchange with a DNS server over TCP.
pub const DNS_TCP_WITHIN: Duration = Duration::from_secs(5);
/// Longest time of all exchanges with DNS servers about one name.
pub const DNS_WITHIN: Duration = Duration::from_secs(12);
/// Longest chain of CNAME records that is followed.
pub const CNAMES_MAX: usize = 8;
/// Validity of a published TXT record, in seconds.
pub const TXT_TTL_SECONDS: u32 = 60;
/// TXT records that the message about a domain without a proof shows.
pub const FOUND_TEXTS_MAX: usize = 3;
/// Bytes of a TXT record that such a message shows.
pub const FOUND_TEXT_BYTES_MAX: usize = 80;
/// Largest file with a key of DNS updates, in bytes.
pub const KEY_FILE_BYTES_MAX: u64 = 64 * 1024;

/// Longest run of the hook program.
pub const HOOK_WITHIN: Duration = Duration::from_secs(120);
/// Output of the hook program that is kept for an error, in bytes.
pub const HOOK_OUTPUT_BYTES_MAX: usize = 4096;

/// Longest error text that is kept and shown, in bytes.
pub const ERROR_BYTES_MAX: usize = 2048;
