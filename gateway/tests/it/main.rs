//! Integration tests over real sockets: TLS callers, gateway, tunnel, agent and backends.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod access_tokens;
mod admin;
mod agent_abuse;
mod agent_responses;
mod backend_transports;
mod caller_abuse;
mod certificates;
mod cli_commands;
#[path = "../../../shared/tests/collector/mod.rs"]
mod collector;
mod connection_failures;
mod console;
mod doctor;
mod durability;
mod enrollment;
mod flow_control;
mod framing;
mod header_lists;
mod http2_callers;
mod input_validation;
mod interim_responses;
mod intermediary;
mod metrics;
mod process_lifecycle;
mod proxy_protocol;
mod rate_limit;
mod refusals;
mod region_commands;
mod region_control;
mod region_failover;
mod region_logs;
mod region_records;
mod region_requests;
mod region_store;
mod region_tunnels;
mod relaying;
mod request_captures;
mod request_log_durability;
mod request_records;
mod request_replay;
mod request_targets;
mod secrets;
mod shutdown;
mod support;
mod takeover;
mod takeover_state;
mod tiny_frames;
mod traces;
mod tunnel_violations;
mod tunnels;
mod upgrades;
mod worker_hand_over;
