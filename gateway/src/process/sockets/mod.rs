//! Listening sockets of the process.

pub(crate) mod listen_advice;
pub(crate) mod listeners;
