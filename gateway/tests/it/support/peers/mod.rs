//! Callers, backends and other peers of the programs under test.

pub(crate) mod backend;
pub(crate) mod caller;
pub(crate) mod gate;
pub(crate) mod held_backend;
pub(crate) mod http1_peer;
pub(crate) mod http2_backend;
pub(crate) mod http2_caller;
pub(crate) mod http2_frames;
pub(crate) mod node_peer;
pub(crate) mod proxy_protocol;
pub(crate) mod resuming_caller;
pub(crate) mod tinyproxy;

use std::io::{ErrorKind, Read};
use std::net::TcpStream;

use super::SOON;

/// Whether the gateway has not ended a connection. Drops the bytes that it has sent.
pub(crate) fn is_open(mut stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    loop {
        match stream.read(&mut [0; 4096]) {
            Ok(0) => return false,
            Ok(_) => {}
            Err(error) => return error.kind() == ErrorKind::WouldBlock,
        }
    }
}
