//! Relayed requests and responses.

// On each driver:
mod backend_transports;
mod framing;
mod header_lists;
mod http1;
mod interim_responses;
mod intermediary;
mod request_targets;
mod smuggling;
mod tiny_frames;
mod upgrades;

// On each driver, slow:
mod early_responses;
mod flow_control;
mod relay_memory;
