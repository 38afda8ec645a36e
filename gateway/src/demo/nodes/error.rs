//! Reasons why a demo of several nodes does not start.

use std::io;

use super::super::DemoError;
use crate::config::Config;
use crate::control::ControlError;
use crate::process::gateway::StartError;
use crate::process::region::RegionError;

#[derive(Debug, thiserror::Error)]
pub enum NodesError {
    /// The command line is wrong.
    #[error("{0}")]
    Usage(String),
    #[error("{0}")]
    Postgres(String),
    #[error("{name} has ended early ({status}); the last lines of its log:\n{log}")]
    Ended {
        name: String,
        status: String,
        log: String,
    },
    #[error(
        "{option} {first}: node {node} cannot listen on 127.0.0.1:{port}: {error}; give another {option}, or 0 for free \
         ports"
    )]
    Port {
        option: &'static str,
        first: u16,
        node: usize,
        port: u16,
        error: io::Error,
    },
    #[error(
        "{what}: not within {seconds} s; with --data-dir FOLDER, the logs in that folder stay and show the cause"
    )]
    Late { what: &'static str, seconds: u64 },
    #[error("stopped by a signal before the demo was ready")]
    Stopped,
    #[error("stopped by a second signal: running requests were aborted")]
    Aborted,
    #[error(
        "--store {database}: it holds the region {name} already, and its key is not in {folder}; give the --data-dir \
         of the demo that made it, or an empty database"
    )]
    OtherRegion {
        database: String,
        name: String,
        folder: String,
    },
    #[error("configuration of a node: {0}")]
    Config(String),
    #[error(transparent)]
    Region(#[from] RegionError),
    #[error(transparent)]
    Gateway(#[from] StartError),
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error(transparent)]
    Demo(#[from] DemoError),
    #[error("{what}: {error}")]
    Io { what: String, error: io::Error },
}

impl NodesError {
    /// For `map_err`: an error of `what`, such as a path.
    pub(super) fn io(what: impl ToString) -> impl FnOnce(io::Error) -> Self {
        move |error| Self::Io {
            what: what.to_string(),
            error,
        }
    }
}

/// Parses the configuration file of a node. The environment of the demo does not count.
pub(super) fn parse(text: &str) -> Result<Config, NodesError> {
    Config::parse(text, |_| None).map_err(|errors| NodesError::Config(errors.to_string()))
}
