//! Targets for what parses bytes from outside and is public in its crate.
//! gateway/bed/tests/corpus.rs includes this file, and runs the targets on their corpus.
//!
//! A target takes any bytes, does what the gateway would do with them, and panics if an invariant
//! does not hold. The parts of an input are on separate lines, so that the corpus can be read and
//! written by hand.

mod addresses;
mod agent_program;
mod announcement;
mod caller_h2;
mod credentials;
mod csr;
mod fields;
mod http;
mod telemetry;
mod tunnel;
mod tunnel_frames;

use aws_lc_rs::signature::Ed25519KeyPair;
use gw_base::clock::Timestamp;
use gw_base::service::hostname::Region;
use gw_shared::id::AccountId;

pub use self::addresses::{client_address, hostname};
pub use self::agent_program::{agent_program, agent_programs};
pub use self::announcement::{announcement, announcements};
pub use self::caller_h2::caller_h2;
pub use self::credentials::{access_token, access_tokens, service_key};
pub use self::csr::csr;
pub use self::fields::header_rules;
pub use self::http::{body, request_head, response_head};
pub use self::telemetry::{log_block, trace_context};
pub use self::tunnel::{control_message, handshake};
pub use self::tunnel_frames::tunnel_frames;

/// Targets with the name of their wrapper in fuzz_targets/ and of their folder in corpus/.
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
    ("request_head", request_head),
    ("response_head", response_head),
    ("service_key", service_key),
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
