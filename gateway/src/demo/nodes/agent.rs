//! The agent of a demo of several nodes: a process of its own, which reaches the nodes through a
//! balancer.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use gw_local_region::{Balancer, Event, Events};
use gw_shared::identity::secret::Secret;
use serde::{Deserialize, Serialize};

use super::super::{DemoError, Options, enroll, start_agent};
use super::{NodesError, region};

/// What the agent needs. Its process reads it as JSON from standard input.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct AgentSettings {
    /// Listeners of the nodes for agents.
    pub(super) nodes: Vec<SocketAddr>,
    pub(super) ca_file: PathBuf,
    pub(super) state_dir: PathBuf,
    pub(super) enrollment_token: String,
    /// The built-in echo backend if `None`.
    pub(super) backend: Option<String>,
    pub(super) host_header: Option<String>,
}

impl AgentSettings {
    pub(super) fn to_json(&self) -> Result<Vec<u8>, DemoError> {
        Ok(serde_json::to_vec(self).map_err(io::Error::from)?)
    }
}

/// Checks the URL of the backend, which the agent's process would refuse.
pub(super) fn check_backend(backend: Option<&String>) -> Result<(), NodesError> {
    let Some(url) = backend else { return Ok(()) };
    let loaded = gw_agent::Config::load(
        None,
        Some(PathBuf::new()),
        std::slice::from_ref(url),
        |_| None,
    );
    match loaded {
        Err(gw_agent::config::ConfigError::Invalid(mistakes)) => {
            Err(NodesError::Usage(mistakes.to_string()))
        }
        // Another error means that there is no enrolled agent yet.
        _ => Ok(()),
    }
}

/// The agent's process: enrolls through any node, and runs until a signal stops it.
pub fn run() -> Result<(), DemoError> {
    let mut events = Events::listen()?;
    let settings: AgentSettings =
        serde_json::from_reader(io::stdin().lock()).map_err(io::Error::from)?;
    let AgentSettings {
        nodes,
        ca_file,
        state_dir,
        enrollment_token,
        backend,
        host_header,
    } = settings;
    let balancer = Balancer::start(nodes)?;
    enroll(
        &region(),
        balancer.address.port(),
        &ca_file,
        &state_dir,
        Secret::new(enrollment_token),
    )?;
    let agent = start_agent(
        &Options {
            backend,
            host_header,
            ..Options::default()
        },
        &state_dir,
    )?;
    while events.wait_for_any() != Event::Stop {}
    agent.drain();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_backend_is_refused_before_anything_starts() {
        assert!(check_backend(None).is_ok());
        assert!(check_backend(Some(&"http://127.0.0.1:3000".to_owned())).is_ok());
        let error = check_backend(Some(&"ftp://127.0.0.1".to_owned())).unwrap_err();
        assert!(
            matches!(&error, NodesError::Usage(text) if text.contains("ftp://127.0.0.1")),
            "{error}"
        );
    }
}
