//! The tunnel protocol. A tunnel is a TLS connection from agent to gateway that is upgraded from HTTP/1.1 to HTTP/2
//! with reversed roles: the gateway is the HTTP/2 client.
//!
//! A relayed request is a stream. A request to switch protocols is an extended CONNECT (RFC 8441), whether its client
//! uses HTTP/1.1 or HTTP/2: `:protocol` has the value of `Upgrade`, and [`X_GW_UPGRADE_METHOD`] the method if it is not
//! GET. If the backend switches, the agent answers 200 with [`X_GW_UPGRADE`], and the protocol's bytes follow in both
//! directions until each end closes its half of the stream. Any other response is relayed like that of an ordinary
//! request.
//!
//! The agent adds [`X_GW_TIMING`] to every response head.
//!
//! [`X_GW_TIMING`]: crate::http::fields::X_GW_TIMING
//! [`X_GW_UPGRADE`]: crate::http::fields::X_GW_UPGRADE
//! [`X_GW_UPGRADE_METHOD`]: crate::http::fields::X_GW_UPGRADE_METHOD

pub mod control;
pub mod handshake;
pub mod heartbeat;
pub mod incoming;
pub mod response;
pub mod settings;
pub mod stream;
pub mod text;
pub mod timing;
pub mod unread;
pub mod window;

/// ALPN protocol of the tunnel (RFC 7301). The gateway requests a client certificate only of connections that offer it.
pub const ALPN: &[u8] = b"gw-tunnel/1";
