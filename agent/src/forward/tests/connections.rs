//! Connections to backends: how they are opened, selected and used again.

pub(super) mod alpn;
mod connecting;
mod reuse;
mod server_names;

use super::*;
