//! A gateway in this process, started with the text of a configuration file.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use gw_interface::config::Config;

use super::admin_api::{Api, Tunnel};
use super::agents::in_process;
use super::metrics::Metrics;

/// A running gateway. A drop stops it at once.
pub(crate) struct Gateway {
    inner: gw_gateway::Gateway,
    data_dir: PathBuf,
}

impl Gateway {
    pub(crate) fn start(configuration: &str) -> Self {
        Self::try_start(configuration).unwrap()
    }

    /// As [`Self::start`], as a node that can be a member of a region although its records are in a
    /// file of its own: the test chooses the members.
    pub(crate) fn start_as_node(configuration: &str, region_key: &Path) -> Self {
        let mut config = Config::parse(configuration, |_| None).unwrap();
        config.peer_listen = Some("127.0.0.1:0".parse().unwrap());
        config.region_key = Some(region_key.to_owned());
        Self::of(&config).unwrap()
    }

    /// As [`Self::start`]; an error is the text that the program would print.
    pub(crate) fn try_start(configuration: &str) -> Result<Self, String> {
        let config = Config::parse(configuration, |_| None).map_err(|error| error.to_string())?;
        Self::of(&config)
    }

    fn of(config: &Config) -> Result<Self, String> {
        let inner = gw_gateway::Gateway::start(config).map_err(|error| error.to_string())?;
        Ok(Self {
            inner,
            data_dir: config.data_dir.clone(),
        })
    }

    /// Address of the listener for callers.
    pub(crate) fn address(&self) -> SocketAddr {
        self.inner.address()
    }

    pub(crate) fn port(&self) -> u16 {
        self.address().port()
    }

    pub(crate) fn admin_address(&self) -> SocketAddr {
        self.inner.admin_address()
    }

    /// The folder of the gateway's state.
    pub(crate) fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    /// The authority of a gateway without a certificate of its own.
    pub(crate) fn ca_file(&self) -> PathBuf {
        self.data_dir.join("dev-ca.crt")
    }

    pub(crate) fn admin_token(&self) -> String {
        let token = std::fs::read_to_string(self.data_dir.join("admin.token")).unwrap();
        token.trim().to_owned()
    }

    pub(crate) fn api(&self) -> Api {
        Api::at(self.admin_address(), &self.admin_token())
    }

    pub(crate) fn metrics(&self) -> Metrics {
        self.api().metrics()
    }

    pub(crate) fn tunnels(&self) -> Vec<Tunnel> {
        self.api().tunnels()
    }

    /// The gateway itself, for what members of a region do.
    pub(super) fn inner(&self) -> &gw_gateway::Gateway {
        &self.inner
    }

    /// Enrolls an agent for services of `account` into `state_dir`. Returns its id.
    pub(crate) fn enroll(&self, account: &str, services: &[&str], state_dir: &Path) -> String {
        let token = self.api().create_enrollment_token(account, services);
        let url = format!("https://eu1.gw.localhost:{}", self.port());
        in_process::enroll_with(token, &url, &self.ca_file(), state_dir)
    }

    /// Stops the gateway after the running requests.
    pub(crate) fn drain(self) {
        self.inner.drain();
    }
}
