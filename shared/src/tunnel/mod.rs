//! The tunnel protocol: a TLS connection from agent to gateway, upgraded from HTTP/1.1, on which HTTP/2 then runs with
//! the roles turned round: the gateway is the HTTP/2 client.
//!
//! A relayed request is a stream. One that asks for another protocol is an extended CONNECT (RFC 8441), whether its
//! caller speaks HTTP/1.1 or HTTP/2: `:protocol` is what `Upgrade` said, [`X_GW_UPGRADE_METHOD`] the method where that
//! was not GET. If the backend switches, the agent answers 200 with [`X_GW_UPGRADE`], and the bytes of the protocol
//! follow both ways until each side ends its stream. Any other response is an ordinary one.
//!
//! Every response head says in [`X_GW_TIMING`] where the time went at the agent.
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

/// ALPN protocol of the tunnel (RFC 7301). Only connections that offer it are asked for a client certificate.
pub const ALPN: &[u8] = b"gw-tunnel/1";
