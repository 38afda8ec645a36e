//! Agents in this process, and enrollment without a process.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use gw_agent::AgentHandle;
use gw_agent::identity::enroll::{self, EnrollmentOptions, TokenSource};
use gw_agent::identity::state::StateDir;
pub(crate) use gw_bed::tls::Identity;
use gw_shared::identity::secret::Secret;

/// An agent that runs. A drop stops it at once.
pub(crate) struct Agent(AgentHandle);

impl Agent {
    /// Starts the agent of a state folder in front of `backend`.
    pub(crate) fn start(state_dir: PathBuf, backend: &str) -> Self {
        Self::start_with(state_dir, backend, |_| None)
    }

    /// As [`Self::start`], with this number of slots.
    pub(crate) fn with_slots(state_dir: PathBuf, backend: &str, slots: usize) -> Self {
        Self::start_with(state_dir, backend, |name| {
            (name == "GW_AGENT_MAX_CONCURRENT_BACKEND_REQUESTS").then(|| slots.to_string())
        })
    }

    /// As [`Self::start`], with these environment variables.
    pub(crate) fn start_with(
        state_dir: PathBuf,
        backend: &str,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Self {
        Self::start_of(None, state_dir, &[backend.to_owned()], environment)
    }

    /// As [`Self::start_with`], with a configuration file, or with backends.
    pub(crate) fn start_of(
        file: Option<&Path>,
        state_dir: PathBuf,
        backends: &[String],
        environment: impl Fn(&str) -> Option<String>,
    ) -> Self {
        let config = gw_agent::Config::load(file, Some(state_dir), backends, environment).unwrap();
        Self(gw_agent::start(config).unwrap())
    }

    pub(crate) fn metrics_address(&self) -> Option<SocketAddr> {
        self.0.metrics_address()
    }

    /// Stops the agent after the running requests.
    pub(crate) fn drain(self) {
        self.0.drain();
    }
}

/// Enrolls an agent with a token at `gateway`, a base URL, over HTTPS, as `gw-agent enroll` does.
/// Its name is that of its state folder. Returns its id.
pub(crate) fn enroll_with(
    token: String,
    gateway: &str,
    ca_file: &Path,
    state_dir: &Path,
) -> String {
    let name = state_dir.file_name().unwrap().to_str().unwrap();
    let options = EnrollmentOptions {
        state_dir: state_dir.to_owned(),
        gateway: Some(gateway.to_owned()),
        token: Some(TokenSource::Text(Secret::new(token))),
        name: Some(name.trim_start_matches('.').to_owned()),
        ca_file: Some(ca_file.to_owned()),
        ..EnrollmentOptions::default()
    };
    let enrolled = enroll::enroll(options, |_| None).unwrap();
    enrolled.enrollment.agent_id.to_string()
}

/// Enrolls an agent that connects to the gateway at `address`, not by its name; through a proxy if
/// there is one.
pub(crate) fn enroll_through(
    proxy: Option<&str>,
    token: String,
    address: SocketAddr,
    ca_file: &Path,
    state_dir: &Path,
) {
    let options = EnrollmentOptions {
        state_dir: state_dir.to_owned(),
        gateway: Some(format!("https://eu1.gw.localhost:{}", address.port())),
        token: Some(TokenSource::Text(Secret::new(token))),
        ca_file: Some(ca_file.to_owned()),
        connect_to: Some((address.ip().to_string(), address.port())),
        ..EnrollmentOptions::default()
    };
    let variable = |name: &str| proxy.filter(|_| name == "GW_PROXY").map(str::to_owned);
    enroll::enroll(options, variable).unwrap();
}

/// The certificate in the state folder of an agent, and its key.
pub(crate) fn identity(state_dir: &Path) -> Identity {
    let identity = StateDir::new(state_dir.to_owned()).identity().unwrap();
    (identity.certificate.clone(), identity.key.clone_key())
}
