//! A gateway with many services: cost of a change, start, memory, and CPU time per request.

use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;
use gw_control_plane::control::records::service;
use gw_control_plane::control::{Actor, NewService, ServiceChanges};
use tempfile::TempDir;

use super::many::{Started, create_account, start_on};
use crate::failure::{Failure, ensure};
use crate::load;
use crate::report::{millis, per_mille, say};

/// Rounds of requests with few and with many services, in turns, so that noise of the machine
/// affects both.
const ROUNDS: usize = 10;
const REQUESTS_PER_ROUND: usize = 20_000;
const CALLERS: u32 = 32;
/// Services of the gateway for comparison.
const FEW: usize = 10;
const CHANGE_MAX: Duration = Duration::from_millis(10);
const START_MAX: Duration = Duration::from_secs(15);
const BYTES_MAX: f64 = 1024.0;
/// Largest allowed difference of the CPU time per request.
const MORE_MAX: f64 = 0.05;

#[derive(Args)]
pub(crate) struct Options {
    #[arg(long, default_value_t = 1_000_000)]
    services: usize,
    #[arg(long, default_value_t = 10_000)]
    accounts: usize,
}

pub(crate) fn run(gateway: &Path, options: &Options) -> Result<(), Failure> {
    let Options { services, accounts } = *options;
    let began = Instant::now();
    let (folder, changes) = fill(services, accounts)?;
    let [p50, p99] = [500, 990].map(|share| per_mille(&changes, share));
    say(format_args!(
        "services: {services} in {accounts} accounts made in {:.0} s; of the last tenth p50 {:.2} \
         ms, p99 {:.2} ms",
        began.elapsed().as_secs_f64(),
        millis(p50),
        millis(p99)
    ));
    let few = Started::new(fill(FEW, 1)?.0, gateway, FEW)?;
    let many = Started::new(folder, gateway, services)?;
    let more = many.compare(&few, "services", ROUNDS, |demo| {
        let spent = || demo.cpu_without_echo();
        load::cpu_per_request(spent, &demo.target, CALLERS, REQUESTS_PER_ROUND)
    })?;
    let bytes = many.bytes_each(&few);
    few.demo.stop()?;
    many.demo.stop()?;
    ensure(p99 <= CHANGE_MAX, || {
        format!("p99 of a change is above {CHANGE_MAX:?}")
    })?;
    ensure(many.took <= START_MAX, || {
        format!("a start takes more than {START_MAX:?}")
    })?;
    ensure(bytes <= BYTES_MAX, || {
        format!("a service takes more than {BYTES_MAX} bytes")
    })?;
    ensure(more <= MORE_MAX, || {
        format!("a request costs more than {} % more", MORE_MAX * 100.0)
    })
}

/// Makes records through the control plane, one change after another, as the API does. Returns also
/// the durations of the last tenth of the changes, sorted.
fn fill(services: usize, accounts: usize) -> Result<(TempDir, Vec<Duration>), Failure> {
    let folder = tempfile::Builder::new().prefix("gw-loadtest-").tempdir()?;
    let gateway = start_on(folder.path())?;
    for number in 0..accounts {
        create_account(&gateway, format!("account{number}"))?;
    }
    let mut changes = Vec::new();
    for number in 0..services {
        let service = NewService::new(
            format!("service{}", number / accounts),
            ServiceChanges::default(),
        );
        let began = Instant::now();
        let account = format!("account{}", number % accounts);
        service::create(gateway.control(), &Actor::Admin, &account, &service)
            .map_err(|error| Failure::during("a change", error))?;
        if number >= services - services / 10 {
            changes.push(began.elapsed());
        }
    }
    gateway.drain();
    changes.sort_unstable();
    Ok((folder, changes))
}
