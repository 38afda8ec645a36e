//! Integration tests over real sockets: TLS callers, gateway, tunnel, agent and backends.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

#[path = "../../../shared/tests/collector/mod.rs"]
mod collector;
mod support;

// `./test` reads the names of the groups.

// Once: what does not depend on the driver of the reactor. `./test` runs it on io_uring, and not again on epoll.
mod access_log;
mod access_tokens;
mod admin;
mod admin_abuse;
mod admin_tls;
mod agent_versions;
mod backups;
mod certificates;
mod cli_commands;
mod console;
mod doctor;
mod enrollment;
mod enrollment_tokens;
mod error_messages;
mod hostile_text;
mod init;
mod input_validation;
mod metrics;
mod region_control;
mod replaced_keys;
mod replicas;
mod request_captures;
mod request_records;
mod request_replay;
mod sealed_secrets;
mod secrets;
mod traces;

// Once, slow: the same, and `./test --quick` leaves it out.
mod agent_ca;
mod agent_updates;
mod core_dumps;
mod demo_nodes;
mod durability;
mod region_acknowledgment;
mod region_clocks;
mod region_commands;
mod region_console;
mod region_forgery;
mod region_logs;
mod region_members;
mod region_partitions;
mod region_pending;
mod region_records;
mod region_refusals;
mod region_rekey;
mod region_store;
mod region_suspended;
mod request_log_durability;

// On each driver: the data path.
mod agent_abuse;
mod agent_downloads;
mod agent_errors;
mod agent_http;
mod agent_processes;
mod agent_proxy;
mod agent_responses;
mod backend_transports;
mod caller_abuse;
mod connection_failures;
mod framing;
mod header_lists;
mod interim_responses;
mod intermediary;
mod process_lifecycle;
mod proxy_protocol;
mod rate_limit;
mod refusals;
mod refused_uploads;
mod region_apex;
mod region_strangers;
mod relaying;
mod request_targets;
mod shutdown;
mod smuggling;
mod tiny_frames;
mod tunnel_violations;
mod tunnels;
mod upgrades;
mod worker_hand_over;

// On each driver, slow: the same, and `./test --quick` leaves it out.
mod early_responses;
mod flow_control;
mod http2_callers;
mod region_failover;
mod region_freezes;
mod region_isolation;
mod region_load;
mod region_lost_nodes;
mod region_requests;
mod region_tunnels;
mod relay_memory;
mod several_agents;
mod several_agents_attempts;
mod several_agents_limits;
mod several_agents_lost;
mod takeover;
mod takeover_state;
