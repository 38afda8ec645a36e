//! Sockets, listeners, TLS and name resolution on the reactor.

pub mod acknowledger;
pub mod buffers;
pub mod https;
pub mod listener;
mod raw_fd;
pub mod resolve;
pub mod socket;
pub mod tls;

pub use acknowledger::Acknowledger;
pub use buffers::{BufferUse, Buffers};
pub use listener::Listener;
pub use raw_fd::{TcpInfo, inherited_sockets, own, retransmit_within, service_manager_sockets};
pub use socket::{Closer, Gauge, Socket};
pub use tls::TlsStream;
