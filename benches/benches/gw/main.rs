//! Benchmarks of the stages of the request path. `cargo bench -p gw-benches -- NAME` runs those
//! whose names contain NAME.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a bench stops on any failure"
)]

mod admission;
mod handshake;
mod head;
mod mailbox;
mod tls;

use std::time::Duration;

use criterion::{Criterion, criterion_main};
use gw_shared::process::allocator::Allocator;

/// The product's allocator.
#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn all() {
    let mut criterion = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(2))
        .sample_size(20)
        .configure_from_args();
    head::benches(&mut criterion);
    admission::benches(&mut criterion);
    mailbox::benches(&mut criterion);
    tls::benches(&mut criterion);
    handshake::benches(&mut criterion);
    criterion.final_summary();
}

criterion_main!(all);
