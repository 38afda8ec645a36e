//! Callers: their connections, limits and refusals.

// On each driver:
mod caller_abuse;
mod connection_failures;
mod http2_violations;
mod idle_connections;
mod plain_http;
mod proxy_protocol;
mod rate_limit;
mod refusals;
mod refused_uploads;
mod session_tickets;
mod transport_security;
mod worker_hand_over;

// On each driver, slow:
mod http2_callers;
