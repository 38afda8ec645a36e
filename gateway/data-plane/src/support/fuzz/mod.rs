//! Targets of gateway/fuzz/: everything that parses bytes from outside. Not a public interface.
//!
//! A target takes any bytes, does what the gateway would do with them, and panics if an invariant
//! does not hold. The parts of an input are on separate lines, so that the corpus can be read and
//! written by hand.

#![expect(
    clippy::expect_used,
    reason = "a target fails by panicking, and what it sets up must exist"
)]

mod addresses;
mod agent_program;
mod caller_h2;
mod credentials;
mod csr;
mod http;
mod node_link;
mod telemetry;
#[cfg(test)]
mod tests;
mod token_endpoint;
mod tunnel;
mod tunnel_frames;

use aws_lc_rs::signature::Ed25519KeyPair;
use gw_base::clock::Timestamp;
use gw_base::service::hostname::Region;
use gw_shared::id::AccountId;

pub use self::addresses::{client_address, hostname, proxy_header};
pub use self::agent_program::{agent_program, agent_programs};
pub use self::caller_h2::caller_h2;
pub use self::credentials::{access_token, access_tokens, service_key};
pub use self::csr::csr;
pub use self::http::{body, header_rules, request_head, response_head};
pub use self::node_link::{announcement, announcements, node_link};
pub use self::telemetry::{log_block, trace_context};
pub use self::token_endpoint::{scope, token_body};
pub use self::tunnel::{control_message, handshake};
pub use self::tunnel_frames::tunnel_frames;

/// Targets with the name of their wrapper in fuzz/fuzz_targets/ and of their folder in
/// fuzz/corpus/.
#[expect(clippy::type_complexity, reason = "a table of two columns")]
pub const TARGETS: &[(&str, fn(&[u8]))] = &[
    ("access_token", access_token),
    ("agent_program", agent_program),
    ("announcement", announcement),
    ("body", body),
    ("caller_h2", caller_h2),
    ("client_address", client_address),
    ("control_message", control_message),
    ("csr", csr),
    ("handshake", handshake),
    ("header_rules", header_rules),
    ("hostname", hostname),
    ("log_block", log_block),
    ("node_link", node_link),
    ("proxy_header", proxy_header),
    ("request_head", request_head),
    ("response_head", response_head),
    ("scope", scope),
    ("service_key", service_key),
    ("token_body", token_body),
    ("trace_context", trace_context),
    ("tunnel_frames", tunnel_frames),
];

const NOW: Timestamp = Timestamp(1_800_000_000);

fn key_pair(seed: u8) -> Ed25519KeyPair {
    Ed25519KeyPair::from_seed_unchecked(&[seed; 32]).expect("any seed is a key")
}

fn account() -> AccountId {
    AccountId::new("acme").expect("an account's id")
}

fn region() -> Region {
    Region::new("eu1", "example.com")
}
