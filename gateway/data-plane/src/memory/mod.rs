//! Memory limits: of the process, of relayed requests, and of socket buffers in the kernel.

pub mod relay;
pub mod sockets;
