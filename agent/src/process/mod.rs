//! The processes of `gw-agent run`. A small supervisor keeps the process id; a worker serves. The supervisor starts a
//! second worker for a new configuration or a new program, and the first one ends when its requests have ended: the
//! gateway replaces the tunnels of an agent by its newer ones without failing a request.

mod messages;
mod supervision;
mod supervisor;
mod worker;

use std::ffi::OsString;
use std::sync::mpsc::Sender;

use gw_shared::command::Failure;
use tokio::runtime::Builder;

use crate::config::Config;
use crate::lifecycle::StartError;
use crate::tunnel::RelayedService;
use worker::WorkError;

/// Runs the agent in a worker process until a signal stops it; the exit code. `arguments` make this program a worker with
/// the same configuration.
pub fn supervise(config: Config, arguments: Vec<OsString>) -> Result<u8, Failure> {
    let _lock = config.state.lock().map_err(|error| Failure::Usage(error.to_string()))?;
    let runtime = Builder::new_current_thread().enable_all().build().map_err(Failure::run)?;
    runtime.block_on(supervisor::supervise(config, arguments)).map_err(Failure::run)
}

/// Runs the agent in this process, as a worker. Sends each service to `relayed` once its first tunnel is ready.
pub fn work(config: Config, relayed: Option<Sender<RelayedService>>) -> Result<(), Failure> {
    let runtime = Builder::new_current_thread().enable_all().build().map_err(Failure::run)?;
    let worked = runtime.block_on(worker::work(config, relayed));
    // Does not wait for an aborted drain.
    runtime.shutdown_background();
    worked.map_err(|error| match error {
        WorkError::Start(StartError::State(_)) | WorkError::NoSupervisor => Failure::Usage(error.to_string()),
        error => Failure::run(error),
    })
}
