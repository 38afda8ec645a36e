//! Gateway and agent must run the same version; the tunnel handshake compares this string for equality.

/// The version of this build, as sent in `X-Gw-Version`.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
