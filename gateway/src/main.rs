//! `gw-gateway`: parses arguments, runs the command, returns the exit code.

mod cli;
#[path = "../../packaging/manual.rs"]
mod manual;
#[path = "../../packaging/tips.rs"]
mod tips;

use std::path::Path;
use std::process::ExitCode;

use clap::CommandFactory;
use gw_base::process::background::Background;
use gw_gateway::process::config_file::ConfigFile;
use gw_gateway::process::doctor;
use gw_gateway::{Gateway, Predecessor, Program, Signals};
use gw_shared::command::{self, Failure};
use gw_shared::config::unknown_in_environment;
use gw_shared::process::allocator::Allocator;
use gw_shared::process::core_dump;
use gw_shared::telemetry::logging;

use cli::arguments::{Arguments, Command, meant};

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn main() -> ExitCode {
    core_dump::refuse_at_start("gw-gateway");
    let result = match tips::parse::<Arguments>(meant).command {
        Command::Init(arguments) => {
            arguments.run(|config, started| run_gateway(config, &Program::serving(config), started))
        }
        Command::Serve { config, check } => serve(&config, check),
        Command::Doctor { config, json } => examine(config.as_deref(), json),
        Command::Healthy(arguments) => arguments.run(),
        Command::Backup(arguments) => arguments.run(),
        Command::Restore(arguments) => arguments.run(),
        Command::Region { command } => command.run(),
        Command::AgentProgram { command } => command.run(),
        #[cfg(feature = "demo")]
        Command::Demo(arguments) => cli::demo::run(arguments),
        #[cfg(feature = "demo")]
        Command::DemoPart(arguments) => cli::demo::run_part(arguments, serve_unreplaced),
        Command::Manual { folder } => manual::write(Arguments::command(), &folder)
            .map_err(|error| Failure::Run(format!("{}: {error}", folder.display()))),
        Command::Administer(administration) => administration.run(),
    };
    command::exit("gw-gateway", result)
}

fn serve(path: &Path, check: bool) -> Result<(), Failure> {
    if check {
        let file = ConfigFile::read(path).map_err(Failure::Usage)?;
        let (_, warnings) = file.check().map_err(Failure::Usage)?;
        let unknown = unknown_in_environment()
            .into_iter()
            .map(|unknown| unknown.to_string());
        for warning in warnings.into_iter().chain(unknown) {
            command::note("gw-gateway", format_args!("warning: {warning}"));
        }
        return Ok(());
    }
    run_gateway(path, &Program::of_this_process(), &|_| Ok(()))
}

/// Runs a gateway that `program` replaces. Calls `started` once it accepts connections.
fn run_gateway(
    path: &Path,
    program: &Program,
    started: &dyn Fn(&Gateway) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let background = Background::start().map_err(Failure::run)?;
    let signals = Signals::listen(&background).map_err(Failure::run)?;
    let mut predecessor = Predecessor::find().map_err(Failure::run)?;
    let gateway = start(path, predecessor.as_mut(), background);
    if let (Err(failure), Some(predecessor)) = (&gateway, &mut predecessor) {
        predecessor.failed(failure.message());
    }
    let gateway = gateway?;
    started(&gateway)?;
    Ok(signals.run(gateway, Some(program))?)
}

/// Serves as a process that no other one replaces: the successor would outlive the demo.
#[cfg(feature = "demo")]
fn serve_unreplaced(path: &Path) -> Result<(), Failure> {
    let background = Background::start().map_err(Failure::run)?;
    let signals = Signals::listen(&background).map_err(Failure::run)?;
    Ok(signals.run(start(path, None, background)?, None)?)
}

fn examine(config: Option<&Path>, json: bool) -> Result<(), Failure> {
    let mut examination = doctor::examine(config, |name| std::env::var(name).ok());
    if let Some(config) = config {
        cli::administration::warnings::examine(&mut examination, config);
    }
    examination.print(json)
}

fn start(
    path: &Path,
    predecessor: Option<&mut Predecessor>,
    background: Background,
) -> Result<Gateway, Failure> {
    let file = ConfigFile::read(path).map_err(Failure::Usage)?;
    // Warnings are logged when the certificate is loaded.
    let (config, _) = file.check().map_err(Failure::Usage)?;
    core_dump::allow(config.core_dumps).map_err(Failure::run)?;
    logging::start(config.log_format, tracing::Level::INFO);
    for unknown in unknown_in_environment() {
        tracing::warn!("{unknown}");
    }
    let mut gateway =
        Gateway::start_after(&config, predecessor, background).map_err(Failure::run)?;
    gateway.set_config_file(file);
    Ok(gateway)
}
