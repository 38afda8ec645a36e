//! A gateway with many services: cost of a change, start, memory, and CPU time per request.

use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;
use gw_control_plane::control::records::{account, service};
use gw_control_plane::control::{Actor, NewAccount, NewService, ServiceChanges};
use gw_gateway::Gateway;
use gw_interface::config::Config;
use tempfile::TempDir;

use crate::demo::{Demo, Options as DemoOptions};
use crate::failure::{Failure, ensure};
use crate::load;
use crate::machine::procfs;
use crate::report::{mebibytes, median, millis, per_mille, say};

/// Rounds of requests with few and with many services, in turns, so that noise of the machine
/// affects both.
const ROUNDS: usize = 10;
const REQUESTS_PER_ROUND: usize = 20_000;
const CALLERS: usize = 32;
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

/// A data folder with records, and the durations of the last tenth of the changes that made them,
/// sorted.
struct Filled {
    folder: TempDir,
    changes: Vec<Duration>,
}

pub(crate) fn run(gateway: &Path, options: &Options) -> Result<(), Failure> {
    let Options { services, accounts } = *options;
    let began = Instant::now();
    let many = fill(services, accounts)?;
    let [p50, p99] = [500, 990].map(|share| per_mille(&many.changes, share));
    say(format_args!(
        "services: {services} in {accounts} accounts made in {:.0} s; of the last tenth p50 {:.2} \
         ms, p99 {:.2} ms",
        began.elapsed().as_secs_f64(),
        millis(p50),
        millis(p99)
    ));
    let few = start(gateway, fill(FEW, 1)?)?;
    let many = start(gateway, many)?;
    let bytes = many.memory.saturating_sub(few.memory) as f64 / services as f64;
    say(format_args!(
        "services: start {:.2} s with {FEW} services, {:.2} s with {services}; memory {:.0} and \
         {:.0} MiB, {bytes:.0} bytes a service",
        few.took.as_secs_f64(),
        many.took.as_secs_f64(),
        mebibytes(few.memory),
        mebibytes(many.memory)
    ));
    let mut with_few = Vec::new();
    let mut with_many = Vec::new();
    for _ in 0..ROUNDS {
        with_few.push(round(&few.demo)?);
        with_many.push(round(&many.demo)?);
    }
    let with_few = median(with_few);
    let with_many = median(with_many);
    let more = with_many / with_few - 1.0;
    say(format_args!(
        "services: {with_few:.1} µs of CPU per request with {FEW} services, {with_many:.1} with \
         {services} ({:+.1} %); medians of {ROUNDS} rounds",
        more * 100.0
    ));
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

/// Makes records through the control plane, one change after another, as the API does.
fn fill(services: usize, accounts: usize) -> Result<Filled, Failure> {
    let folder = tempfile::Builder::new().prefix("gw-loadtest-").tempdir()?;
    let gateway = start_on(folder.path())?;
    let control = gateway.control();
    let made = |error| Failure::during("a change", error);
    for number in 0..accounts {
        let account = NewAccount {
            id: format!("account{number}"),
            capture_allowed: None,
            domains_max: None,
            managed_by: None,
        };
        account::create(control, &Actor::Admin, &account).map_err(made)?;
    }
    let mut changes = Vec::new();
    for number in 0..services {
        let service = NewService::new(
            format!("service{}", number / accounts),
            ServiceChanges::default(),
        );
        let began = Instant::now();
        service::create(
            control,
            &Actor::Admin,
            &format!("account{}", number % accounts),
            &service,
        )
        .map_err(made)?;
        if number >= services - services / 10 {
            changes.push(began.elapsed());
        }
    }
    gateway.drain();
    changes.sort_unstable();
    Ok(Filled { folder, changes })
}

/// Starts a gateway in this process, whose control plane makes records.
pub(super) fn start_on(folder: &Path) -> Result<Gateway, Failure> {
    let text = format!(
        "region = \"eu1\"\ndomain = \"gw.localhost\"\nlisten = \"127.0.0.1:0\"\n\
         admin_listen = \"127.0.0.1:0\"\nworkers = 1\ndata_dir = {folder:?}\n"
    );
    let config =
        Config::parse(&text, |_| None).map_err(|error| Failure::during("configuration", error))?;
    Gateway::start(&config).map_err(|error| Failure::during("start", error))
}

struct Started {
    demo: Demo,
    took: Duration,
    /// Proportional set size, in bytes.
    memory: u64,
}

/// Starts the product on the records.
fn start(gateway: &Path, filled: Filled) -> Result<Started, Failure> {
    let began = Instant::now();
    let demo = Demo::start_in(filled.folder, gateway, &DemoOptions::default())?;
    let took = began.elapsed();
    let memory = procfs::proportional_memory(demo.pid())?;
    // Warm-up.
    round(&demo)?;
    Ok(Started { demo, took, memory })
}

/// CPU time per request in microseconds.
fn round(demo: &Demo) -> Result<f64, Failure> {
    load::cpu_per_request(
        || demo.cpu_without_echo(),
        &demo.target,
        CALLERS,
        REQUESTS_PER_ROUND,
    )
}
