//! The tunnel protocol: a TLS connection from agent to gateway, upgraded from HTTP/1.1, on which HTTP/2 then runs with
//! the roles turned round: the gateway is the HTTP/2 client.

pub mod control;
pub mod handshake;
pub mod heartbeat;
pub mod settings;
pub mod stream;

/// ALPN protocol of the tunnel (RFC 7301). Only connections that offer it are asked for a client certificate.
pub const ALPN: &[u8] = b"gw-tunnel/1";
