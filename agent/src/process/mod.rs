//! The processes of `gw-agent run`. A small supervisor keeps the process id; a worker serves. The
//! supervisor starts a second worker for a new configuration or a new program, and the first one
//! ends when its requests have ended: the gateway replaces the tunnels of an agent by its newer
//! ones without failing a request.

mod messages;
mod settings;
mod supervision;
mod supervisor;
mod worker;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::mpsc::Sender;

use gw_shared::command::Failure;
use gw_shared::process::core_dump;
use gw_shared::telemetry::logging;
use tokio::runtime::{Builder, Runtime};

pub use self::settings::ConfigSource;
use self::settings::SupervisorSettings;
pub use self::supervisor::{AgentExit, Hangup};
use self::supervisor::{Invocation, Supervisor};
use self::worker::WorkError;
use crate::config::Config;
use crate::lifecycle::StartError;
use crate::tunnel::RelayedService;

/// The state folder of an agent with this configuration. Also starts the log of this process.
pub fn state_folder(source: &ConfigSource) -> Result<PathBuf, Failure> {
    let settings = settings(source)?;
    logging::start(settings.log_format, tracing::Level::INFO);
    Ok(settings.state.path().to_owned())
}

fn settings(source: &ConfigSource) -> Result<SupervisorSettings, Failure> {
    SupervisorSettings::load(source, environment).map_err(|error| Failure::Usage(error.to_string()))
}

/// Runs the agent in a worker process until a signal stops it, or until its record was deleted if
/// it `can_enroll` again. `invocation` make this program a worker with the configuration of
/// `source`.
pub fn supervise(
    source: ConfigSource,
    invocation: Vec<OsString>,
    hangup: Hangup,
    can_enroll: bool,
) -> Result<AgentExit, Failure> {
    let usage = |error: &dyn std::error::Error| Failure::Usage(error.to_string());
    let settings = settings(&source)?;
    core_dump::allow(settings.core_dumps).map_err(Failure::run)?;
    logging::start(settings.log_format, tracing::Level::INFO);
    settings.state.enrollment().map_err(|error| usage(&error))?;
    let _lock = settings.state.lock().map_err(|error| usage(&error))?;
    let runtime = runtime()?;
    let invocation = Invocation {
        source,
        of_worker: invocation,
        hangup,
        can_enroll,
    };
    runtime
        .block_on(async { Supervisor::new(settings, invocation)?.run().await })
        .map_err(Failure::run)
}

/// The runtime of supervisor and worker. The agent itself runs on a reactor of its own.
fn runtime() -> Result<Runtime, Failure> {
    Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(Failure::run)
}

fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Runs the agent in this process, as a worker. Sends each service to `relayed` once its first
/// tunnel is ready.
pub fn work(config: Config, relayed: Option<Sender<RelayedService>>) -> Result<(), Failure> {
    // The kernel names a process after its path, which is a number for a stored program. Fails
    // never: the name is short.
    let _ = rustix::thread::set_name(c"gw-agent");
    let runtime = runtime()?;
    let worked = runtime.block_on(worker::work(config, relayed));
    // Does not wait for an aborted drain.
    runtime.shutdown_background();
    worked.map_err(|error| match error {
        WorkError::Start(StartError::State(_) | StartError::Driver(_))
        | WorkError::NoSupervisor => Failure::Usage(error.to_string()),
        error => Failure::run(error),
    })
}
