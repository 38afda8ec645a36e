//! New connections: accept, PROXY protocol, ClientHello, hand-over to the owning worker, TLS.

pub(crate) mod accept;
pub(crate) mod proxy_protocol;
