//! Sockets and TLS on the reactor.

mod raw_fd;
pub mod resolve;
pub mod socket;
pub mod tls;

pub use raw_fd::{TcpInfo, own};
pub use socket::{Closer, Gauge, Socket};
pub use tls::TlsStream;
