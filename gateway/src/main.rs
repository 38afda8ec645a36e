//! `gw-gateway`: parses arguments, runs the command, returns the exit code.

mod cli;
#[path = "../../packaging/manual.rs"]
mod manual;

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use gw_gateway::config::{Config, workers_or_cores};
use gw_gateway::demo::{Demo, DemoError, Options};
use gw_gateway::process::doctor;
use gw_gateway::rate::Rate;
use gw_gateway::{Gateway, Predecessor, Program, Signals};
use gw_shared::command::{self, Failure};
use gw_shared::telemetry::logging::{self, LogFormat};
use gw_shared::telemetry::trace::Settings;

use cli::arguments::{Arguments, Command, DemoArguments};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Serve { config, check } => serve(&config, check),
        Command::Doctor { config, json } => examine(config.as_deref(), json),
        Command::Demo(arguments) => demo(arguments),
        Command::Manual { folder } => manual::write(Arguments::command(), &folder)
            .map_err(|error| Failure::Run(format!("{}: {error}", folder.display()))),
        Command::Administer(administration) => administration.run(),
    };
    command::exit("gw-gateway", result)
}

fn serve(path: &Path, check: bool) -> Result<(), Failure> {
    if check {
        let (_, warnings) = checked_config(path)?;
        for warning in warnings {
            let _ = writeln!(io::stderr(), "gw-gateway: warning: {warning}");
        }
        return Ok(());
    }
    let program = Program::of_this_process();
    let signals = Signals::listen().map_err(Failure::run)?;
    let mut predecessor = Predecessor::find().map_err(Failure::run)?;
    let started = start(path, predecessor.as_mut());
    if let (Err(failure), Some(predecessor)) = (&started, &mut predecessor) {
        predecessor.failed(failure.message());
    }
    signals.run(started?, Some(&program)).map_err(Failure::run)
}

fn examine(config: Option<&Path>, json: bool) -> Result<(), Failure> {
    let examination = doctor::examine(config, |name| std::env::var(name).ok());
    let written = examination.write(&mut io::stdout().lock(), json);
    written.map_err(|error| Failure::Run(error.to_string()))?;
    if examination.is_good() { Ok(()) } else { Err(Failure::Run("some checks failed".to_owned())) }
}

fn start(path: &Path, predecessor: Option<&mut Predecessor>) -> Result<Gateway, Failure> {
    // Warnings are logged when the certificate is loaded.
    let (config, _) = checked_config(path)?;
    logging::start(config.log_format, "info");
    Gateway::start_after(&config, predecessor).map_err(Failure::run)
}

/// The configuration, and warnings about properties that some callers refuse.
fn checked_config(path: &Path) -> Result<(Config, Vec<String>), Failure> {
    let text = std::fs::read_to_string(path).map_err(|error| Failure::Usage(format!("{}: {error}", path.display())))?;
    Config::check(&text, |name| std::env::var(name).ok())
        .map_err(|errors| Failure::Usage(format!("{}: {errors}", path.display())))
}

/// The trace settings of the environment, because a demo has no configuration file.
fn traces_of_environment() -> Result<Option<Settings>, Failure> {
    let mut errors = Vec::new();
    let settings = Settings::resolve(None, None, &|name| std::env::var(name).ok(), &mut errors);
    if errors.is_empty() { Ok(settings) } else { Err(Failure::Usage(errors.join("; "))) }
}

fn demo(arguments: DemoArguments) -> Result<(), Failure> {
    logging::start(LogFormat::Text, "warn");
    let rate = Rate::new(arguments.burst, arguments.refill_per_minute)
        .ok_or_else(|| Failure::Usage("--burst and --refill-per-minute must be at least 1".to_owned()))?;
    let options = Options {
        port: arguments.port,
        admin_port: arguments.admin_port,
        backend: arguments.backend,
        data_dir: arguments.data_dir,
        workers: workers_or_cores(arguments.workers),
        rate,
        traces: traces_of_environment()?,
        ..Options::default()
    };
    let demo = Demo::start(&options).map_err(|error| match error {
        DemoError::Agent(_) => Failure::Usage(error.to_string()),
        _ => Failure::run(error),
    })?;
    let mut out = io::stdout().lock();
    let told = if arguments.json {
        serde_json::to_writer(&mut out, &demo.about).map_err(io::Error::from).and_then(|()| writeln!(out))
    } else {
        demo.about.write_hints(&mut out)
    };
    told.and_then(|()| out.flush()).map_err(Failure::run)?;
    drop(out);
    demo.run_until_stopped().map_err(Failure::run)
}
