//! Why a gateway does not start.

use std::io;

use gw_control_plane::control::ControlError;
use gw_region::RegionKeyError;
use gw_shared::runtime::DriverError;
use gw_shared::telemetry::trace::ExporterError;
use gw_telemetry::request_log::LogError;
use gw_telemetry::request_log::archive::ArchiveError;

use crate::process::sockets::listeners::ListenError;
use crate::process::takeover::TakeoverError;

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error(transparent)]
    Traces(#[from] ExporterError),
    #[error("cannot take over from the running process: {0}")]
    Takeover(#[from] TakeoverError),
    #[error(transparent)]
    RequestLog(#[from] LogError),
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    #[error(transparent)]
    RegionKey(#[from] RegionKeyError),
    #[error("a worker did not start; see the log for the reason")]
    Worker,
    #[error(transparent)]
    AgentPrograms(io::Error),
    #[error("membership in the region: {0}")]
    Membership(io::Error),
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
}
