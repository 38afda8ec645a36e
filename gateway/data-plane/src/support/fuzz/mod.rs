//! Targets of gateway/fuzz/ for functions inside the data plane. Not a public interface.
//!
//! A target takes any bytes, does what the gateway would do with them, and panics if an invariant
//! does not hold. The parts of an input are on separate lines, so that the corpus can be read and
//! written by hand. The other targets are in gateway/fuzz/src/.

#![expect(
    clippy::expect_used,
    reason = "a target fails by panicking, and what it sets up must exist"
)]

#[cfg(test)]
#[path = "../../../../fuzz/corpus_test/mod.rs"]
mod corpus_test;
mod node_link;
mod proxy_header;
mod token_endpoint;

pub use self::node_link::node_link;
pub use self::proxy_header::proxy_header;
pub use self::token_endpoint::{scope, token_body};

/// Targets with the name of their wrapper in fuzz/fuzz_targets/ and of their folder in
/// fuzz/corpus/.
#[expect(clippy::type_complexity, reason = "a table of two columns")]
pub const TARGETS: &[(&str, fn(&[u8]))] = &[
    ("node_link", node_link),
    ("proxy_header", proxy_header),
    ("scope", scope),
    ("token_body", token_body),
];

#[cfg(test)]
#[test]
fn every_target_has_a_wrapper_and_a_corpus_and_passes_it() {
    corpus_test::run("gw_data_plane::support::fuzz", TARGETS);
}
