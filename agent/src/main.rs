//! The `gw-agent` program: parses arguments, runs a command, returns an exit code.

mod cli;
#[path = "../../packaging/manual.rs"]
mod manual;
#[path = "../../packaging/tips.rs"]
mod tips;

use std::env;
use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver};

use clap::CommandFactory;
use gw_agent::doctor::{self, DoctorOptions};
use gw_agent::identity::enroll::{Enrolled, EnrollmentOptions, enroll};
use gw_agent::identity::state::{DEFAULT, VARIABLE};
use gw_agent::process::{self, AgentExit, Hangup};
use gw_agent::{Config, RelayedService};
use gw_shared::command::{self, Failure};
use gw_shared::process::allocator::Allocator;
use gw_shared::process::core_dump;
use gw_shared::telemetry::logging::{self, LogFormat};
use gw_shared::text::escaped;

use cli::{
    Arguments, Command, EnrollArguments, RunArguments, RunEnrolledArguments, enroll_failure, meant,
};

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn main() -> ExitCode {
    core_dump::refuse_at_start("gw-agent");
    let result = match tips::parse::<Arguments>(meant).command {
        Command::Enroll(arguments) => run_enroll(arguments).map(|()| 0),
        Command::Run {
            run,
            supervised: true,
            ..
        } => run_worker(&run).map(|()| 0),
        Command::Run { run, enrolled, .. } => run_agent(&run, enrolled),
        Command::Http(arguments) => arguments
            .enroll()
            .and_then(|(run, can_enroll)| supervise(&run, Hangup::Stop, can_enroll)),
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
    logging::start(LogFormat::Text, tracing::Level::INFO);
    let EnrollArguments {
        enrollment,
        state_dir,
        force,
    } = arguments;
    let options = EnrollmentOptions {
        force,
        ..enrollment.options(state_dir)
    };
    let enrolled = enroll(options, |name| env::var(name).ok()).map_err(enroll_failure)?;
    print_next_step(&enrolled, &mut io::stdout().lock()).map_err(Failure::run)
}

fn print_next_step(
    Enrolled {
        enrollment, state, ..
    }: &Enrolled,
    out: &mut impl Write,
) -> io::Result<()> {
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

/// Enrolls the agent if the options ask for that, and runs it under a supervisor.
fn run_agent(arguments: &RunArguments, enrolled: RunEnrolledArguments) -> Result<u8, Failure> {
    let can_enroll =
        enrolled.are_given() && enrolled.enroll(process::state_folder(&arguments.source())?)?;
    supervise(arguments, Hangup::Reload, can_enroll)
}

/// Runs the agent under a supervisor. If its record was deleted meanwhile, it enrolls again if it
/// `can_enroll`.
fn supervise(arguments: &RunArguments, hangup: Hangup, can_enroll: bool) -> Result<u8, Failure> {
    match process::supervise(
        arguments.source(),
        arguments.of_worker(),
        hangup,
        can_enroll,
    )? {
        AgentExit::Exit(code) => Ok(code),
        AgentExit::Deleted => Err(Failure::run(format!(
            "cannot start again to enroll: {}",
            start_again()
        ))),
    }
}

/// Begins this program again, to enroll before it runs. Returns only the error. Not a loop: a new
/// program has the default actions of signals while it enrolls.
fn start_again() -> io::Error {
    let mut arguments: Vec<OsString> = env::args_os().skip(1).collect();
    if !arguments
        .iter()
        .any(|argument| argument == RunEnrolledArguments::ENROLL_AGAIN)
    {
        // Behind the name of the command.
        arguments.insert(
            1.min(arguments.len()),
            RunEnrolledArguments::ENROLL_AGAIN.into(),
        );
    }
    match env::current_exe() {
        Ok(program) => std::process::Command::new(program).args(arguments).exec(),
        Err(error) => error,
    }
}

/// Runs the agent as the worker of a supervisor.
fn run_worker(arguments: &RunArguments) -> Result<(), Failure> {
    let RunArguments {
        config,
        state_dir,
        backend,
        host,
        print_addresses,
    } = arguments;
    let environment = host.environment();
    let loaded = Config::load(config.as_deref(), state_dir.clone(), backend, environment)
        .map_err(|error| Failure::Usage(error.to_string()))?;
    loaded
        .check_identity()
        .map_err(|error| Failure::Usage(error.to_string()))?;
    core_dump::allow(loaded.core_dumps).map_err(Failure::run)?;
    logging::start(loaded.log_format, tracing::Level::INFO);
    // `gw-agent http` runs with these options, and has the folder for itself now.
    if let (true, [url]) = (*print_addresses, backend.as_slice())
        && let Err(error) = loaded.keep_http_backend(url)
    {
        tracing::warn!(%error,
            "cannot keep the backend for `gw-agent doctor`; give it with --backend");
    }
    let (sender, relayed) = mpsc::channel();
    print_each(relayed).map_err(Failure::run)?;
    process::work(loaded, print_addresses.then_some(sender))
}

/// Prints the services that are relayed, until the agent has ended. On a thread of its own, because
/// a reader of the output may be slow.
fn print_each(relayed: Receiver<RelayedService>) -> io::Result<()> {
    let print = move || {
        for service in relayed {
            // The agent also serves without a reader of its output.
            let _ = writeln!(io::stdout(), "{}", escaped(&service.to_string()));
        }
    };
    std::thread::Builder::new()
        .name("gw-addresses".into())
        .spawn(print)
        .map(drop)
}

fn run_doctor(arguments: RunArguments, json: bool) -> Result<(), Failure> {
    let RunArguments {
        config,
        state_dir,
        backend,
        ..
    } = arguments;
    let environment = |name: &str| env::var(name).ok();
    let of_http = || {
        let unnamed = config.is_none() && environment(VARIABLE).is_none();
        unnamed
            .then(|| cli::enrolled_by_http(environment))
            .flatten()
    };
    let options = DoctorOptions {
        state_dir: state_dir.or_else(of_http),
        config,
        backends: backend,
    };
    doctor::examine(&options, environment).print(json)
}
