//! Backends as they are: what callers notice of the ways in which real servers end connections,
//! authenticate them and take them over. Each section needs the software that it names, and is
//! skipped without it.

mod docker;
mod grpc;
mod gunicorn;
mod names;
mod nginx;
mod ntlm;
mod posts;

use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};

use crate::demo::first_line;
use crate::enrolled::output;
use crate::failure::{Failure, ensure};
use crate::machine::process::{self, Process};
use crate::report::say;
use crate::scenarios::agents::site::{Plan, Pool, Site};

const STARTED_WITHIN: Duration = Duration::from_secs(30);
const TICK: Duration = Duration::from_millis(20);

/// A section of the scenario.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Section {
    /// POSTs through nginx, which ends connections of HTTP/2 after a number of requests
    Nginx,
    /// Calls to a gRPC server whose connections have a greatest age
    Grpc,
    /// A stream of gRPC without messages, at a server that counts PINGs
    GrpcSilent,
    /// POSTs with pauses near the keep-alive of gunicorn
    Gunicorn,
    /// exec, attach and run of a Docker daemon on a Unix socket
    Docker,
    /// Callers with NTLM and without credentials, at two servers
    Ntlm,
    /// The name server of a backend's name stops answering
    Names,
}

#[derive(Args)]
pub(crate) struct Options {
    /// Sections to run; all if not given
    #[arg(long, value_delimiter = ',', value_enum)]
    only: Vec<Section>,
    /// Environment of Python with grpcio and gunicorn, and folder of `node_modules` with express
    /// and express-ntlm
    #[arg(long, value_name = "FOLDER", hide_default_value = true,
          default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/backends"))]
    programs: PathBuf,
    /// Seconds without a message of `grpc-silent`
    #[arg(long, default_value_t = 60)]
    silent_seconds: u32,
}

/// What the sections have in common.
struct Bench {
    site: Site,
    programs: PathBuf,
    silent_seconds: u32,
}

/// Why a section did not hold, or did not run.
enum Missed {
    /// Its software is not installed, or cannot run here.
    Skipped(Failure),
    Failed(Failure),
}

impl<E: Into<Failure>> From<E> for Missed {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// Figures of a section.
type Figures = Result<String, Missed>;

/// Runs the sections, and fails if one of them misses a figure.
pub(crate) fn run(gateway: &Path, options: &Options) -> Result<(), Failure> {
    gw_shared::runtime::raise_open_file_limit();
    let bench = Bench {
        site: Site::start(gateway, 1)?,
        programs: options.programs.clone(),
        silent_seconds: options.silent_seconds,
    };
    let mut rows = Vec::new();
    let mut missed = 0;
    for section in Section::value_variants() {
        if !options.only.is_empty() && !options.only.contains(section) {
            continue;
        }
        let figures = match section.run(&bench) {
            Ok(figures) => figures,
            Err(Missed::Skipped(reason)) => format!("skipped: {reason}"),
            Err(Missed::Failed(failure)) => {
                missed += 1;
                format!("MISSED: {failure}")
            }
        };
        say(format_args!("backends: {section:?}: {figures}"));
        rows.push(format!("| {section:?} | {figures} |"));
    }
    bench.site.stop()?;
    say(format_args!("\n| section | figures |\n|---|---|"));
    for row in &rows {
        say(format_args!("{row}"));
    }
    ensure(missed == 0, || {
        format!("{missed} of {} sections miss a figure", rows.len())
    })
}

impl Section {
    fn run(self, bench: &Bench) -> Figures {
        match self {
            Self::Nginx => nginx::run(bench),
            Self::Grpc => grpc::aged(bench),
            Self::GrpcSilent => grpc::silent(bench),
            Self::Gunicorn => gunicorn::run(bench),
            Self::Docker => docker::run(bench),
            Self::Ntlm => ntlm::run(bench),
            Self::Names => names::run(bench),
        }
    }
}

impl Bench {
    /// A new service with one agent.
    fn pool(&self, backend: &str) -> Result<Pool<'_>, Failure> {
        self.site.pool(vec![Plan::new(backend)])
    }

    /// Python with this module; otherwise the section is skipped.
    fn python(&self, module: &str) -> Result<PathBuf, Missed> {
        let own = self.programs.join("bin/python");
        let python = if own.is_file() {
            own
        } else {
            find("python3", "python3")?
        };
        let mut import = Command::new(&python);
        import.args(["-c", &format!("import {module}")]);
        need(&mut import, &format!("{module} of PyPI is not installed"))?;
        Ok(python)
    }
}

/// A program; without it, the section is skipped.
fn find(program: &str, package: &str) -> Result<PathBuf, Missed> {
    process::find(program, package).map_err(Missed::Skipped)
}

/// Skips the section unless `trial` succeeds.
fn need(trial: &mut Command, otherwise: &str) -> Result<(), Missed> {
    match output(trial) {
        Ok(_) => Ok(()),
        Err(_) => Err(Missed::Skipped(Failure::new(otherwise))),
    }
}

/// Skips the section unless this process may make mount namespaces.
fn need_root() -> Result<(), Missed> {
    let mut trial = Command::new(find("unshare", "util-linux")?);
    need(trial.args(["--mount", "true"]), "it needs root")
}

/// Path of a program of this scenario.
fn program(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/backends")).join(name)
}

/// Starts a server that prints its URL.
fn start_with_url(name: &'static str, command: &mut Command) -> Result<(Process, String), Failure> {
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut process = Process::spawn(name, command)?;
    let url = first_line(&mut process)?;
    Ok((process, url))
}

/// Waits until a server on loopback accepts connections.
fn wait_for_port(port: u16) -> Result<(), Failure> {
    wait_until(&format!("no server on port {port}"), || {
        TcpStream::connect(("127.0.0.1", port)).is_ok()
    })
}

fn wait_until(otherwise: &str, mut holds: impl FnMut() -> bool) -> Result<(), Failure> {
    let deadline = Instant::now() + STARTED_WITHIN;
    while !holds() {
        ensure(Instant::now() < deadline, || otherwise.to_owned())?;
        std::thread::sleep(TICK);
    }
    Ok(())
}
