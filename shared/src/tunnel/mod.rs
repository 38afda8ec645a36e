//! The tunnel protocol, version `gw-tunnel/2`. A tunnel is a TLS connection from agent to gateway
//! that is upgraded from HTTP/1.1 to frames of its own ([`frame`]); `docs/tunnel.md` specifies it.
//!
//! A relayed request is a stream, which the gateway opens. Its heads are HTTP/1.1 heads ([`head`]),
//! and its bodies DATA frames. A request to switch protocols asks for it as in HTTP/1.1; if the
//! backend switches, the agent answers 101, and the protocol's bytes follow in both directions
//! until each end closes its half of the stream.
//!
//! [`endpoint`] is the state machine of one end, [`connection`] runs it on a connection.

pub mod body;
pub mod connection;
pub mod control;
pub mod cut_reason;
pub mod endpoint;
pub mod frame;
pub mod handshake;
pub mod head;
pub mod heartbeat;
pub mod ledger;
pub mod response;
pub mod timing;
pub mod transport;
pub mod window;

/// ALPN protocol of the tunnel (RFC 7301). The gateway requests a client certificate only of
/// connections that offer it.
pub const ALPN: &[u8] = b"gw-tunnel/2";
