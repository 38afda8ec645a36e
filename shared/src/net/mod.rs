//! Sockets and TLS on the reactor.

mod raw_fd;
pub mod resolve;
pub mod socket;
pub mod tls;

pub use raw_fd::own;
pub use socket::{Closer, Socket};
pub use tls::TlsStream;
