//! Comparison of the product with alternatives, in turns, with the same load, backend and core.

mod beside;
mod calls;
mod figures;
mod handshakes;
mod idle;
mod latency;
mod load;
mod open_loop;
mod output;
mod peers;
mod programs;
mod requests;
mod setups;
mod transfer;
mod tunnels;

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;
use std::time::Instant;

use clap::{Args, ValueEnum};

use self::figures::{Case, Row, Sample};
use self::programs::rathole::Rathole;
use self::programs::{Versions, version};
use self::setups::{Entrant, Kind, Setup};
use crate::failure::{Failure, ensure};
use crate::machine::process;
use crate::machine::procfs;
use crate::machine::scheduling::pin_to;
use crate::report::say;
pub(crate) use peers::{LARGE, MEGABYTE, Site};

/// Options of the comparison.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Sections to run; all by default.
    #[arg(long, value_delimiter = ',')]
    only: Vec<Section>,
    /// Setups to leave out.
    #[arg(long, value_delimiter = ',')]
    without: Vec<Kind>,
    /// Runs of each setup and load, in turns; the figures are medians.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Seconds of each run.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,
    /// Callers of `http1` (keep-alive connections) and of `http2` (concurrent streams, without the
    /// case of one).
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 64, 256],
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    callers: Vec<u32>,
    /// Size of each body of `bulk`, in megabytes.
    #[arg(
        long,
        default_value_t = 1000,
        value_parser = clap::value_parser!(u64).range(1..=1_000_000),
    )]
    megabytes: u64,
    /// Requests per second of `latency`; by default 70 % of each setup's own peak.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    rate: Option<u64>,
    /// Idle tunnels of `tunnels`.
    #[arg(
        long,
        default_value_t = 10_000,
        value_parser = clap::value_parser!(u32).range(1..=15_000),
    )]
    tunnels: u32,
    /// Path of HAProxy, instead of the one on the search path. Each of several is a setup with the
    /// name of its version.
    #[arg(long)]
    haproxy: Vec<PathBuf>,
    /// Path of rathole, if it is not on the search path.
    #[arg(long)]
    rathole: Option<PathBuf>,
    /// Also writes the figures to this file, as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Also draws the figures into this file, as SVG.
    #[arg(long)]
    svg: Option<PathBuf>,
}

/// Part of the comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Section {
    /// CPU time per request of HTTP/1.1 callers.
    Http1,
    /// CPU time per request of HTTP/2 callers.
    Http2,
    /// System calls and sleeps of a request. As root, with `perf`; without, it is left out.
    Calls,
    /// CPU time per request with two workers.
    Workers,
    /// CPU time and speed of large bodies.
    Bulk,
    /// Latency at a constant rate of requests.
    Latency,
    /// Memory of idle callers.
    Idle,
    /// CPU time of a new connection with one request.
    Handshakes,
    /// Latency with a backend that writes head and body apart.
    SplitWrites,
    /// Latency beside downloads of the same service.
    Beside,
    /// Idle tunnels: CPU time per request beside them, and their memory.
    Tunnels,
}

/// Core of the measured setup, and core of backend and load generator.
const MEASURED_CORE: usize = 0;
const LOAD_CORE: usize = 1;
/// CPU time of other programs, in cores, from which on the figures are in doubt.
const NOISE_MAX: f64 = 0.1;

pub(crate) fn run(gateway: &Path, options: &Options) -> Result<(), Failure> {
    let cores = available_parallelism().map_or(1, usize::from);
    ensure(cores > LOAD_CORE, || {
        "two cores are needed: one for what is measured, one for the load".to_owned()
    })?;
    gw_shared::runtime::raise_open_file_limit();
    // Callers and backends of this process run on the core of the load.
    pin_to(None, LOAD_CORE)?;
    let bench = Bench::prepare(gateway, options)?;
    let _backend = bench.site.start_backend()?;
    let sections = if options.only.is_empty() {
        Section::value_variants()
    } else {
        &options.only
    };
    say(format_args!(
        "Core {MEASURED_CORE} runs what is measured, core {LOAD_CORE} backend and load; medians of \
         {} rounds.",
        options.rounds
    ));
    let mut cases = Vec::new();
    // A section that cannot be measured ends the run. The figures of those before it are written.
    let ended = sections.iter().try_for_each(|section| {
        let measured = cases.len();
        measure(&bench, *section, &mut cases)?;
        say(format_args!(
            "\n{}",
            output::table::table(&cases[measured..])
        ));
        write(options.json.as_deref(), || {
            let document = output::json::document(&cases, &bench.versions);
            Ok(serde_json::to_string_pretty(&document)? + "\n")
        })?;
        write(options.svg.as_deref(), || {
            output::svg::chart(&cases).map_err(|error| Failure::during("the chart", error))
        })
    });
    let failed = cases
        .iter()
        .flat_map(|case| case.rows.iter().map(move |row| (case, row)));
    let failed: Vec<String> = failed
        .filter(|(_, row)| row.failures() > 0)
        .map(|(case, row)| {
            format!(
                "{}, {}, {}: {} requests",
                case.section,
                case.name,
                row.setup,
                row.failures()
            )
        })
        .collect();
    ended?;
    ensure(failed.is_empty(), || {
        format!(
            "requests failed, so these figures do not compare: {}",
            failed.join("; ")
        )
    })
}

/// Measures a section, and says how much other programs disturbed it.
fn measure(bench: &Bench<'_>, section: Section, cases: &mut Vec<Case>) -> Result<(), Failure> {
    let value = section.to_possible_value();
    let name = value.as_ref().map_or("", |value| value.get_name());
    say(format_args!("measuring {name}"));
    let start = Instant::now();
    let others = procfs::cpu_of_others()?;
    cases.extend(bench.section(section)?);
    let others = procfs::cpu_of_others()?
        .saturating_sub(others)
        .as_secs_f64()
        / start.elapsed().as_secs_f64();
    if others > NOISE_MAX {
        say(format_args!(
            "note: other programs took {others:.2} cores during {name}; repeat it on an idle \
             machine"
        ));
    }
    Ok(())
}

/// Writes a file at once, so that an interruption leaves the one before.
fn write(
    path: Option<&Path>,
    content: impl FnOnce() -> Result<String, Failure>,
) -> Result<(), Failure> {
    let Some(path) = path else { return Ok(()) };
    let new = path.with_extension("new");
    let written = fs::write(&new, content()?).and_then(|()| fs::rename(&new, path));
    written.map_err(|error| Failure::during(path.display(), error))
}

/// What all sections share.
struct Bench<'a> {
    gateway: &'a Path,
    options: &'a Options,
    site: Site,
    entrants: Vec<Entrant>,
    versions: Versions,
}

impl<'a> Bench<'a> {
    fn prepare(gateway: &'a Path, options: &'a Options) -> Result<Self, Failure> {
        let left_in = |kind: &Kind| !options.without.contains(kind);
        let mut kinds: Vec<Kind> = Kind::value_variants()
            .iter()
            .copied()
            .filter(left_in)
            .collect();
        let mut rathole = None;
        if kinds.iter().any(|kind| kind.is_rathole()) {
            match Rathole::find(options.rathole.as_deref()) {
                Ok(found) => rathole = Some(found),
                // An explicit path must be right.
                Err(failure) if options.rathole.is_some() => return Err(failure),
                Err(failure) => {
                    say(format_args!("left out: {failure}"));
                    kinds.retain(|kind| !kind.is_rathole());
                }
            }
        }
        let haproxies = match &options.haproxy[..] {
            _ if !kinds.contains(&Kind::Haproxy) => Vec::new(),
            [] => vec![("haproxy".to_owned(), process::find("haproxy", "haproxy")?)],
            given => given
                .iter()
                .map(|it| named_haproxy(it))
                .collect::<Result<_, _>>()?,
        };
        let count = |kind| match kind {
            Kind::Haproxy => haproxies.len(),
            _ => 1,
        };
        let entrants = kinds
            .into_iter()
            .flat_map(|kind| (0..count(kind)).map(move |number| Entrant { kind, number }));
        let entrants = entrants.collect();
        let mut bench = Self {
            gateway,
            options,
            site: Site::prepare(haproxies, rathole)?,
            entrants,
            versions: Versions::new(),
        };
        bench.versions = bench.find_versions()?;
        let named = |(name, version)| format!("{name} {version}");
        let versions: Vec<String> = bench.versions.iter().map(named).collect();
        say(format_args!("programs: {}", versions.join(", ")));
        Ok(bench)
    }

    /// Versions of all programs that take part and are installed.
    fn find_versions(&self) -> Result<Versions, Failure> {
        let mut versions = Versions::new();
        let mut add = |name: &str, program: &Path, option| {
            versions.insert(name.to_owned(), version(program, option)?);
            Ok::<(), Failure>(())
        };
        add("gw", self.gateway, "--version")?;
        add("nginx", self.site.nginx(), "-v")?;
        for (name, program) in self.site.haproxies() {
            add(name, program, "-v")?;
        }
        if let Some(rathole) = self.site.rathole() {
            add("rathole", rathole, "--version")?;
        }
        // A section that needs one of these and does not find it says so.
        for (name, found, option) in [
            ("wrk", programs::wrk::find(), "-v"),
            ("h2load", programs::h2load::find(), "--version"),
        ] {
            if let Ok(program) = found {
                add(name, &program, option)?;
            }
        }
        Ok(versions)
    }

    fn name_of(&self, Entrant { kind, number }: Entrant) -> String {
        match self.site.haproxies().get(number) {
            Some((name, _)) if kind == Kind::Haproxy => name.clone(),
            _ => kind.name().to_owned(),
        }
    }

    fn section(&self, section: Section) -> Result<Vec<Case>, Failure> {
        match section {
            Section::Http1 => requests::http1(self),
            Section::Http2 => requests::http2(self),
            Section::Calls => calls::run(self),
            Section::Workers => requests::workers(self),
            Section::Bulk => transfer::run(self),
            Section::Latency => latency::at_a_constant_rate(self),
            Section::Idle => idle::run(self),
            Section::Handshakes => handshakes::run(self),
            Section::SplitWrites => latency::with_split_writes(self),
            Section::Beside => beside::run(self),
            Section::Tunnels => tunnels::run(self),
        }
    }

    /// The setups of `wanted` that take part.
    fn entrants(&self, wanted: &[Kind]) -> Vec<Entrant> {
        let of_kind = |kind| self.entrants.iter().filter(move |it| it.kind == kind);
        wanted
            .iter()
            .flat_map(|kind| of_kind(*kind))
            .copied()
            .collect()
    }

    /// Starts the setups of `wanted` that take part, in front of nginx.
    fn start_all(&self, wanted: &[Kind]) -> Result<Vec<Setup>, Failure> {
        self.start_all_before(wanted, self.site.backend_port())
    }

    /// Like [`Self::start_all`], in front of another backend.
    fn start_all_before(&self, wanted: &[Kind], backend_port: u16) -> Result<Vec<Setup>, Failure> {
        self.entrants(wanted)
            .into_iter()
            .map(|entrant| Setup::start(self, entrant, backend_port))
            .collect()
    }

    /// Starts the setups of `wanted` that take part, for callers that speak HTTP/2.
    fn start_for_http2(&self, wanted: &[Kind]) -> Result<Vec<Setup>, Failure> {
        let start = |entrant: Entrant| match Kind::FLOORS.contains(&entrant.kind) {
            // Its bytes reach the backend as they are.
            true => Setup::start_unchecked(self, entrant, self.site.h2c_port()),
            false => Setup::start(self, entrant, self.site.backend_port()),
        };
        self.entrants(wanted).into_iter().map(start).collect()
    }

    /// Measures all setups in turns, for the rows of `case`.
    fn compare(
        &self,
        setups: &[Setup],
        case: Case,
        measure: impl FnMut(&Setup) -> Result<Sample, Failure>,
    ) -> Result<Case, Failure> {
        let rounds = take_turns(self.options.rounds, setups, measure)?;
        let row = |(setup, rounds): (&Setup, _)| Row {
            setup: setup.name.clone(),
            rounds,
        };
        Ok(case.with_rows(setups.iter().zip(rounds).map(row).collect()))
    }
}

/// A HAProxy that was given, with the name of its setup.
fn named_haproxy(program: &Path) -> Result<(String, PathBuf), Failure> {
    let name = format!("haproxy {}", version(program, "-v")?);
    Ok((name, program.to_owned()))
}

/// Measures each subject once in each round. Every second round is in reverse order, so that no
/// subject always profits or suffers from the one before.
fn take_turns<S, T>(
    rounds: u32,
    subjects: &[S],
    mut measure: impl FnMut(&S) -> Result<T, Failure>,
) -> Result<Vec<Vec<T>>, Failure> {
    let mut samples: Vec<Vec<T>> = subjects.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds {
        let mut order: Vec<usize> = (0..subjects.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for index in order {
            samples[index].push(measure(&subjects[index])?);
        }
    }
    Ok(samples)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_alternate_their_order() {
        let mut order = Vec::new();
        let measure = |subject: &char| {
            order.push(*subject);
            Ok(order.len())
        };
        let samples = take_turns(3, &['a', 'b', 'c'], measure).unwrap();
        assert_eq!(samples, [[1, 6, 7], [2, 5, 8], [3, 4, 9]]);
        assert_eq!(order.iter().collect::<String>(), "abccbaabc");
    }
}
