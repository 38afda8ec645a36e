//! Integration tests over real sockets: TLS callers, gateway, tunnel, agent and backends.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

#[path = "../../../shared/tests/collector/mod.rs"]
mod collector;
mod support;

// The modules of each folder are in groups, whose names `./test` reads:
//
// - Once: what does not depend on the driver of the reactor. `./test` runs it on io_uring, and not
//   again on epoll.
// - On each driver: the data path.
// - Once, slow, and On each driver, slow: the same. `./test --quick` leaves these out, and `./test`
//   those on epoll.
mod administration;
mod agents;
mod callers;
mod identity;
mod process;
mod region;
mod region_losses;
mod region_records;
mod relaying;
mod request_log;
