//! Memory: of this process, of relayed requests, and of the kernel's socket buffers.

pub(crate) mod process;
pub(crate) mod relay;
pub(crate) mod sockets;
