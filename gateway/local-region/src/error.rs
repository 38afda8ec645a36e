//! Reasons why a part does not start or stop.

use std::io;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The options do not fit together.
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
        "{option} {first}: node {node} cannot listen on 127.0.0.1:{port}: {error}; give another \
         {option}, or 0 for free ports"
    )]
    Port {
        option: &'static str,
        first: u16,
        node: usize,
        port: u16,
        error: io::Error,
    },
    #[error(
        "{what}: not within {seconds} s; with --data-dir FOLDER, the logs in that folder stay and \
         show the cause"
    )]
    Late { what: &'static str, seconds: u64 },
    #[error("stopped by a signal before the demo was ready")]
    Stopped,
    #[error("stopped by a second signal: running requests were aborted")]
    Aborted,
    #[error("configuration of a node: {0}")]
    Config(String),
    #[error("{what}: {error}")]
    Io { what: String, error: io::Error },
}

impl Error {
    /// For `map_err`: an error of `what`, such as a path.
    pub(crate) fn io(what: impl ToString) -> impl FnOnce(io::Error) -> Self {
        move |error| Self::Io {
            what: what.to_string(),
            error,
        }
    }
}
