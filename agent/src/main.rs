//! The `gw-agent` program: parses arguments, runs a command, returns an exit code.

mod cli;
#[path = "../../packaging/manual.rs"]
mod manual;

use std::io::{self, Write};
use std::pin::pin;
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver};

use clap::{CommandFactory, Parser};
use futures_util::future::{Either, select};
use gw_agent::doctor::{self, DoctorOptions};
use gw_agent::identity::enroll::{Enrolled, Options, enroll};
use gw_agent::identity::state::DEFAULT;
use gw_agent::{AgentHandle, Config, RelayedService, StartError};
use gw_shared::command::{self, Failure};
use gw_shared::telemetry::logging::{self, LogFormat};

use cli::{Arguments, Command, EnrollArguments, RunArguments, enroll_failure};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Enroll(arguments) => run_enroll(arguments),
        Command::Run(arguments) => run_agent(&arguments),
        Command::Http(arguments) => arguments.enroll().and_then(|arguments| run_agent(&arguments)),
        Command::Doctor { run, json } => run_doctor(run, json),
        Command::Manual { folder } => manual::write(Arguments::command(), &folder)
            .map_err(|error| Failure::Run(format!("{}: {error}", folder.display()))),
    };
    command::exit("gw-agent", result)
}

fn run_enroll(arguments: EnrollArguments) -> Result<(), Failure> {
    logging::start(LogFormat::Text, "info");
    let EnrollArguments { enrollment, state_dir, force } = arguments;
    let options = Options { force, ..enrollment.options(state_dir) };
    let enrolled = enroll(options, |name| std::env::var(name).ok()).map_err(enroll_failure)?;
    print_next_step(&enrolled, &mut io::stdout().lock()).map_err(Failure::run)
}

fn print_next_step(Enrolled { enrollment, state, .. }: &Enrolled, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "Enrolled as {} for {}. Next step:\n", enrollment.agent_id, enrollment.services.join(", "))?;
    write!(out, "  gw-agent run --backend http://127.0.0.1:8080")?;
    if state.path() != DEFAULT {
        write!(out, " --state-dir {}", state.path().display())?;
    }
    writeln!(out)?;
    out.flush()
}

fn run_agent(arguments: &RunArguments) -> Result<(), Failure> {
    let RunArguments { config, state_dir, backend, print_addresses } = arguments;
    let environment = |name: &str| std::env::var(name).ok();
    let config = Config::load(config.as_deref(), state_dir.clone(), backend, environment)
        .map_err(|error| Failure::Usage(error.to_string()))?;
    logging::start(config.log_format, "info");
    let started = if *print_addresses {
        let (sender, relayed) = mpsc::channel();
        print_each(relayed).map_err(Failure::run)?;
        gw_agent::start_announcing(config, sender)
    } else {
        gw_agent::start(config)
    };
    let agent = started.map_err(|error| match error {
        StartError::State(_) => Failure::Usage(error.to_string()),
        error => Failure::run(error),
    })?;
    run_until_stopped(agent).map_err(Failure::run)
}

/// Prints the services that are relayed, until the agent has ended. On a thread of its own, because a reader of the
/// output may be slow.
fn print_each(relayed: Receiver<RelayedService>) -> io::Result<()> {
    let print = move || {
        for service in relayed {
            // The agent also serves without a reader of its output.
            let _ = writeln!(io::stdout(), "{service}");
        }
    };
    std::thread::Builder::new().name("gw-addresses".into()).spawn(print).map(drop)
}

fn run_doctor(arguments: RunArguments, json: bool) -> Result<(), Failure> {
    let RunArguments { config, state_dir, backend, .. } = arguments;
    let options = DoctorOptions { config, state_dir, backends: backend };
    doctor::examine(&options, |name| std::env::var(name).ok()).print(json)
}

/// Runs the agent until a signal stops it.
fn run_until_stopped(agent: AgentHandle) -> Result<(), Box<dyn std::error::Error>> {
    let signals = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let result = signals.block_on(async {
        stop_signal().await?;
        tracing::warn!("stopping after running requests have ended; a second signal aborts them");
        let drained = tokio::task::spawn_blocking(|| agent.drain());
        match select(pin!(drained), pin!(stop_signal())).await {
            Either::Left(_) => Ok(()),
            Either::Right(_) => Err("a second signal aborted running requests".into()),
        }
    });
    // Does not wait for an aborted drain.
    signals.shutdown_background();
    result
}

async fn stop_signal() -> io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    select(pin!(interrupt.recv()), pin!(terminate.recv())).await;
    Ok(())
}
