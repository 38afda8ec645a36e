//! The `gw-agent` program: parses arguments, runs a command, returns an exit code.

mod cli;
#[path = "../../packaging/manual.rs"]
mod manual;

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver};

use clap::{CommandFactory, Parser};
use gw_agent::doctor::{self, DoctorOptions};
use gw_agent::identity::enroll::{Enrolled, Options, enroll};
use gw_agent::identity::state::DEFAULT;
use gw_agent::process::{self, Hangup, Source};
use gw_agent::{Config, RelayedService};
use gw_shared::command::{self, Failure};
use gw_shared::core_dump;
use gw_shared::telemetry::logging::{self, LogFormat};
use gw_shared::text::escaped;

use cli::{Arguments, Command, EnrollArguments, RunArguments, enroll_failure};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    core_dump::refuse_at_start("gw-agent");
    let result = match Arguments::parse().command {
        Command::Enroll(arguments) => run_enroll(arguments).map(|()| 0),
        Command::Run { run, supervised } => run_agent(&run, supervised, Hangup::Reload),
        Command::Http(arguments) => arguments.enroll().and_then(|arguments| run_agent(&arguments, false, Hangup::Stop)),
        Command::Doctor { run, json } => run_doctor(run, json).map(|()| 0),
        Command::Manual { folder } => manual::write(Arguments::command(), &folder)
            .map(|()| 0)
            .map_err(|error| Failure::Run(format!("{}: {error}", folder.display()))),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(failure) => command::exit("gw-agent", Err(failure)),
    }
}

fn run_enroll(arguments: EnrollArguments) -> Result<(), Failure> {
    logging::start(LogFormat::Text, "info");
    let EnrollArguments { enrollment, state_dir, force } = arguments;
    let options = Options { force, ..enrollment.options(state_dir) };
    let enrolled = enroll(options, |name| std::env::var(name).ok()).map_err(enroll_failure)?;
    print_next_step(&enrolled, &mut io::stdout().lock()).map_err(Failure::run)
}

fn print_next_step(Enrolled { enrollment, state, .. }: &Enrolled, out: &mut impl Write) -> io::Result<()> {
    writeln!(
        out,
        "Enrolled as {} for {}. Next step:\n",
        enrollment.agent_id,
        escaped(&enrollment.services.join(", "))
    )?;
    write!(out, "  gw-agent run --backend http://127.0.0.1:8080")?;
    if state.path() != DEFAULT {
        write!(out, " --state-dir {}", state.path().display())?;
    }
    writeln!(out)?;
    out.flush()
}

/// Runs the agent under a supervisor, or as the worker of one.
fn run_agent(arguments: &RunArguments, supervised: bool, hangup: Hangup) -> Result<u8, Failure> {
    let RunArguments { config, state_dir, backend, print_addresses } = arguments;
    if !supervised {
        let source = Source { file: config.clone(), state_dir: state_dir.clone() };
        return process::supervise(source, arguments.of_worker(), hangup);
    }
    let environment = |name: &str| std::env::var(name).ok();
    let loaded = Config::load(config.as_deref(), state_dir.clone(), backend, environment)
        .map_err(|error| Failure::Usage(error.to_string()))?;
    core_dump::allow(loaded.core_dumps).map_err(Failure::run)?;
    logging::start(loaded.log_format, "info");
    let (sender, relayed) = mpsc::channel();
    print_each(relayed).map_err(Failure::run)?;
    process::work(loaded, print_addresses.then_some(sender)).map(|()| 0)
}

/// Prints the services that are relayed, until the agent has ended. On a thread of its own, because a reader of the
/// output may be slow.
fn print_each(relayed: Receiver<RelayedService>) -> io::Result<()> {
    let print = move || {
        for service in relayed {
            // The agent also serves without a reader of its output.
            let _ = writeln!(io::stdout(), "{}", escaped(&service.to_string()));
        }
    };
    std::thread::Builder::new().name("gw-addresses".into()).spawn(print).map(drop)
}

fn run_doctor(arguments: RunArguments, json: bool) -> Result<(), Failure> {
    let RunArguments { config, state_dir, backend, .. } = arguments;
    let options = DoctorOptions { config, state_dir, backends: backend };
    doctor::examine(&options, |name| std::env::var(name).ok()).print(json)
}
