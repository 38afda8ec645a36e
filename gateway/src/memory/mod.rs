//! Memory limits: of the process, of relayed requests, and of socket buffers in the kernel.

pub(crate) mod relay;
pub(crate) mod sockets;
