//! `gw-agent`: arguments, command, exit code.

use std::path::PathBuf;
use std::pin::pin;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use futures_util::future::{Either, select};
use gw_agent::Config;
use gw_shared::logging;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Keeps a tunnel to the Gw gateway and forwards its requests to your backend.
#[derive(Parser)]
#[command(name = "gw-agent", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Connect, and forward until stopped. SIGTERM finishes running requests first.
    Run {
        /// Configuration file; without one, what the state folder and the options say.
        #[arg(long)]
        config: Option<PathBuf>,
        /// Folder with the agent's identity, as enrollment left it.
        #[arg(long)]
        state_dir: Option<PathBuf>,
        /// Backend of every service, for example http://127.0.0.1:8080.
        #[arg(long)]
        backend: Option<String>,
    },
}

fn main() -> ExitCode {
    let Command::Run { config, state_dir, backend } = Arguments::parse().command;
    let environment = |name: &str| std::env::var(name).ok();
    let config = match Config::load(config.as_deref(), state_dir, backend.as_deref(), environment) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("gw-agent: {error}");
            return ExitCode::from(2);
        }
    };
    logging::start(config.log_format, "info");
    match run(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gw-agent: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(config: Config) -> Result<(), Box<dyn std::error::Error>> {
    let agent = gw_agent::start(config)?;
    let signals = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let result = signals.block_on(async {
        stop_signal().await?;
        tracing::warn!("stopping: running requests may end; a second signal cuts them");
        let drained = tokio::task::spawn_blocking(|| agent.drain());
        match select(pin!(drained), pin!(stop_signal())).await {
            Either::Left(_) => Ok(()),
            Either::Right(_) => Err("stopped during the drain: running requests were cut".into()),
        }
    });
    // A drain that was cut short is not waited for.
    signals.shutdown_background();
    result
}

async fn stop_signal() -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    select(pin!(interrupt.recv()), pin!(terminate.recv())).await;
    Ok(())
}
