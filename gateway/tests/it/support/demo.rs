//! A gateway and an agent in this process, with the records of the demo.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use gw_base::service::rate::Rate;
pub(crate) use gw_gateway::demo::About;
use gw_gateway::demo::{self, DemoError};
use gw_interface::config::Config;
use gw_shared::telemetry::trace::{CollectorSettings, CollectorUrl};

use super::admin_api::{Api, Tunnel};
use super::agents::in_process;
use super::metrics::Metrics;

/// Options of a demo.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    /// URL of the backend; the built-in echo if `None`.
    pub(crate) backend: Option<String>,
    /// `Host` that the backend gets: `preserve`, the default, or `rewrite`.
    pub(crate) host_header: Option<String>,
    /// Configuration file of the agent, with its backends; `backend` is ignored then.
    pub(crate) agent_config: Option<PathBuf>,
    /// A temporary folder if `None`.
    pub(crate) data_dir: Option<PathBuf>,
    pub(crate) workers: usize,
    /// Burst and refill per minute of the service, and of the gateway's default.
    pub(crate) rate: (u32, u32),
    pub(crate) hand_over: &'static str,
    /// The number of slots of the agent.
    pub(crate) slots: Option<u32>,
    /// URL to which gateway and agent export spans, and the share of traces.
    pub(crate) traces: Option<(String, f64)>,
    /// Further lines of the gateway's configuration.
    pub(crate) configuration: String,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            backend: None,
            host_header: None,
            agent_config: None,
            data_dir: None,
            workers: 1,
            rate: (1000, 300),
            hand_over: "auto",
            slots: None,
            traces: None,
            configuration: String::new(),
        }
    }
}

/// A running gateway and its agent, which serves the service `echo` of the account `demo`.
pub(crate) struct Demo {
    inner: demo::Demo,
    pub(crate) about: About,
    /// Deleted after the demo has ended.
    _temporary: Option<tempfile::TempDir>,
}

impl Demo {
    /// Starts both; requests can be served when this returns.
    pub(crate) fn start(options: &Options) -> Result<Self, DemoError> {
        let temporary = options
            .data_dir
            .is_none()
            .then(|| tempfile::tempdir().unwrap());
        let data_dir = options.data_dir.clone();
        let data_dir = data_dir.unwrap_or_else(|| temporary.as_ref().unwrap().path().join("demo"));
        let traces = options.traces.as_ref();
        let of_demo = demo::Options {
            backend: options.backend.clone(),
            host_header: options.host_header.clone(),
            agent_config: options.agent_config.clone(),
            rate: Rate::new(options.rate.0, options.rate.1).unwrap(),
            slots: options.slots,
            traces: traces.map(|(endpoint, sample_ratio)| CollectorSettings {
                endpoint: CollectorUrl::below(endpoint).unwrap(),
                sample_ratio: *sample_ratio,
            }),
            ..demo::Options::default()
        };
        let text = format!(
            "region = \"eu1\"\ndomain = \"gw.localhost\"\ndata_dir = \"{}\"\n\
             listen = \"127.0.0.1:0\"\nadmin_listen = \"127.0.0.1:0\"\nworkers = {}\n\
             burst = {}\nrefill_per_minute = {}\nhand_over = \"{}\"\n{}",
            data_dir.display(),
            options.workers,
            options.rate.0,
            options.rate.1,
            options.hand_over,
            options.configuration,
        );
        let mut config = Config::parse(&text, |_| None).unwrap();
        config.traces = of_demo.traces.clone();
        let inner = demo::Demo::start_with(&config, &of_demo)?;
        Ok(Self {
            about: inner.about.clone(),
            inner,
            _temporary: temporary,
        })
    }

    pub(crate) fn api(&self) -> Api {
        Api::of(&self.about)
    }

    /// Address of the listener for callers.
    pub(crate) fn address(&self) -> SocketAddr {
        self.inner.gateway().address()
    }

    pub(crate) fn port(&self) -> u16 {
        self.address().port()
    }

    pub(crate) fn admin_address(&self) -> SocketAddr {
        self.inner.gateway().admin_address()
    }

    /// Address of the agent's metrics.
    pub(crate) fn agent_metrics_address(&self) -> Option<SocketAddr> {
        self.inner.agent().metrics_address()
    }

    pub(crate) fn metrics(&self) -> Metrics {
        self.api().metrics()
    }

    pub(crate) fn tunnels(&self) -> Vec<Tunnel> {
        self.api().tunnels()
    }

    /// Number of tunnels that have ended, by reason.
    pub(crate) fn tunnels_ended(&self) -> BTreeMap<String, u64> {
        self.metrics().by_label("gw_tunnels_ended_total", "reason")
    }

    /// Enrolls an agent for services of `account` into `state_dir`. Returns its id.
    pub(crate) fn enroll(&self, account: &str, services: &[&str], state_dir: &Path) -> String {
        let token = self.api().create_enrollment_token(account, services);
        let url = format!("https://eu1.gw.localhost:{}", self.port());
        in_process::enroll_with(token, &url, &self.about.ca_file, state_dir)
    }

    /// Stops both after the running requests.
    pub(crate) fn stop(self) {
        self.inner.stop();
    }
}
