//! Version of this build. Gateway and agent must have the same: the tunnel handshake compares the strings.

/// Version of this build, as sent in `X-Gw-Version`.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
