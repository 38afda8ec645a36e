//! Comparison of the product with alternatives, in turns, with the same load, backend and core.

mod h2load;
mod load;
mod peers;
mod wrk;

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::client::Target;
use crate::demo::{Demo, Options as DemoOptions, UNLIMITED};
use crate::failure::{Failure, ensure};
use crate::process::Process;
use crate::report::{median, say};
use load::{Load, Outcome};
pub(crate) use peers::{LARGE, MEGABYTE, Site};

/// Options of the comparison.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Callers speak HTTP/2, up to 32 of them on one connection.
    #[arg(long)]
    http2: bool,
    /// Callers (keep-alive connections, or concurrent requests with HTTP/2), one table each.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 64, 256],
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    callers: Vec<u32>,
    /// Seconds of each run.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,
    /// Runs of each setup and number of callers; the tables have the medians.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Peers to leave out.
    #[arg(long, value_delimiter = ',')]
    without: Vec<Peer>,
}

/// Alternatives that the product is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Peer {
    Haproxy,
    Nginx,
}

/// Load generator.
enum Generator {
    Wrk(PathBuf),
    H2load(PathBuf),
}

impl Generator {
    fn run(&self, load: &Load<'_>) -> Result<Outcome, Failure> {
        match self {
            Self::Wrk(path) => wrk::run(path, load),
            Self::H2load(path) => h2load::run(path, load),
        }
    }
}

/// Core of the measured setup, and core of backend and load generator.
const MEASURED_CORE: usize = 0;
const LOAD_CORE: usize = 1;
/// Enough slots that the agent never refuses; the peers have no such limit.
const SLOTS: u32 = 1024;
const WARM_UP_SECONDS: u32 = 1;
const WARM_UP_CALLERS: u32 = 16;

pub(crate) fn run(gateway: &Path, options: &Options) -> Result<(), Failure> {
    let cores = available_parallelism().map_or(1, usize::from);
    ensure(cores > LOAD_CORE, || "two cores are needed: one for what is measured, one for the load".to_owned())?;
    let generator = if options.http2 { Generator::H2load(h2load::find()?) } else { Generator::Wrk(wrk::find()?) };
    let left_in = |peer: &Peer| !options.without.contains(peer);
    let peers: Vec<Peer> = Peer::value_variants().iter().copied().filter(left_in).collect();
    let site = Site::prepare(&peers)?;
    let _backend = site.start_backend()?;
    let mut setups = vec![product(gateway, &site)?];
    for peer in peers {
        setups.push(site.start_peer(peer)?);
    }
    for setup in &setups {
        setup.check()?;
        generator.run(&setup.load(WARM_UP_CALLERS, WARM_UP_SECONDS))?;
    }
    say(format_args!(
        "Core {MEASURED_CORE} runs what is measured, core {LOAD_CORE} backend and load; {} rounds of {} s, medians.\n",
        options.rounds, options.seconds
    ));
    let mut all_good = true;
    for &callers in &options.callers {
        let mut runs: Vec<Vec<Run>> = setups.iter().map(|_| Vec::new()).collect();
        for _ in 0..options.rounds {
            for (setup, runs) in setups.iter().zip(&mut runs) {
                runs.push(setup.measure(&generator, callers, options.seconds)?);
            }
        }
        let rows: Vec<Row> = setups.iter().zip(&runs).map(|(setup, runs)| Row::of(setup.name, runs)).collect();
        print_table(callers, &rows);
        all_good &= rows.iter().all(|row| row.refused == 0 && row.socket_errors == 0);
    }
    // Exit codes of the peers are ignored.
    let product = setups.swap_remove(0);
    product.processes.into_iter().try_for_each(Process::stop)?;
    ensure(all_good, || "some requests failed, so the figures of those runs are not comparable".to_owned())
}

fn product(gateway: &Path, site: &Site) -> Result<Setup, Failure> {
    let options = DemoOptions {
        workers: 1,
        rate: Some(UNLIMITED),
        backend: Some(site.backend_url()),
        core: Some(MEASURED_CORE),
        slots: Some(SLOTS),
    };
    let (process, target) = Demo::start(gateway, &options)?.into_parts();
    Ok(Setup { name: "gw", target, processes: vec![process] })
}

/// A running path from callers to the backend.
struct Setup {
    name: &'static str,
    target: Target,
    /// Processes whose CPU time is counted.
    processes: Vec<Process>,
}

/// Measurements of one run of one setup.
struct Run {
    cpu_us_per_request: f64,
    outcome: Outcome,
}

impl Setup {
    /// Checks that the setup gives the backend's answer.
    fn check(&self) -> Result<(), Failure> {
        let answer = self.target.connect()?.ask("/")?;
        let good = answer.head.status == 200 && answer.body == peers::ANSWER.as_bytes();
        ensure(good, || format!("{}: status {}, {} bytes", self.name, answer.head.status, answer.body.len()))
    }

    fn load(&self, callers: u32, seconds: u32) -> Load<'_> {
        Load { target: &self.target, core: LOAD_CORE, callers, seconds }
    }

    fn measure(&self, generator: &Generator, callers: u32, seconds: u32) -> Result<Run, Failure> {
        let before = self.cpu();
        let outcome = generator.run(&self.load(callers, seconds))?;
        let spent = self.cpu().saturating_sub(before);
        Ok(Run { cpu_us_per_request: spent.as_secs_f64() * 1e6 / outcome.requests as f64, outcome })
    }

    fn cpu(&self) -> Duration {
        self.processes.iter().map(Process::cpu).sum()
    }
}

/// Medians of the runs of a setup, and the sum of their failures.
struct Row {
    name: &'static str,
    cpu_us: f64,
    per_second: f64,
    /// Median and 99th percentile, if known.
    latency_ms: Option<(f64, f64)>,
    refused: u64,
    socket_errors: u64,
}

impl Row {
    fn of(name: &'static str, runs: &[Run]) -> Self {
        let median_of = |value: fn(&Run) -> f64| median(runs.iter().map(value));
        Self {
            name,
            cpu_us: median_of(|run| run.cpu_us_per_request),
            per_second: median_of(|run| run.outcome.per_second),
            latency_ms: runs.iter().all(|run| run.outcome.latency_ms.is_some()).then(|| {
                let latency = |run: &Run| run.outcome.latency_ms.unwrap_or_default();
                (median(runs.iter().map(|run| latency(run).0)), median(runs.iter().map(|run| latency(run).1)))
            }),
            refused: runs.iter().map(|run| run.outcome.refused).sum(),
            socket_errors: runs.iter().map(|run| run.outcome.socket_errors).sum(),
        }
    }
}

fn print_table(callers: u32, rows: &[Row]) {
    say(format_args!("### {callers} callers\n"));
    say(format_args!("| setup | CPU µs/request | requests/s | p50 ms | p99 ms | non-2xx | socket errors |"));
    say(format_args!("|---|---:|---:|---:|---:|---:|---:|"));
    for Row { name, cpu_us, per_second, latency_ms, refused, socket_errors } in rows {
        let (p50, p99) = latency_ms
            .map_or(("–".to_owned(), "–".to_owned()), |(p50, p99)| (format!("{p50:.2}"), format!("{p99:.2}")));
        say(format_args!("| {name} | {cpu_us:.1} | {per_second:.0} | {p50} | {p99} | {refused} | {socket_errors} |"));
    }
    if let [product, peers @ ..] = rows {
        let ratios: Vec<String> =
            peers.iter().map(|peer| format!("gw/{} {:.2}", peer.name, product.cpu_us / peer.cpu_us)).collect();
        say(format_args!("\nCPU per request: {}\n", ratios.join(", ")));
    }
}

/// Unused ports.
fn free_ports<const COUNT: usize>() -> Result<[u16; COUNT], Failure> {
    let mut ports = [0; COUNT];
    // Holds all ports until all are chosen, so that they differ.
    let mut held = Vec::with_capacity(COUNT);
    for port in &mut ports {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        *port = listener.local_addr()?.port();
        held.push(listener);
    }
    Ok(ports)
}
