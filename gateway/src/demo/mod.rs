//! A demo without configuration: one process with a gateway, an agent that reaches it over
//! loopback, and a small backend; or a region of several nodes, with a process for each part
//! ([`nodes`]). No other module of the gateway runs an agent.

pub mod echo;
pub mod nodes;
mod records;
#[cfg(test)]
pub(crate) mod tests;

use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gw_agent::AgentHandle;
use gw_base::service::hostname::Region;
use gw_base::service::rate::Rate;
use gw_base::service::service_settings::ServiceSettings;
use gw_control_plane::admin_client::console_url;
use gw_control_plane::control::ControlError;
use gw_interface::config::Config;
use gw_shared::command::{quoted, sudo};
use gw_shared::files;
use gw_shared::identity::secret::Secret;
use gw_shared::telemetry::trace::CollectorSettings;
use serde::Serialize;

use crate::process::gateway::{Gateway, StartError};
use crate::process::signals::{RunError, Signals};

use self::records::Seeded;

/// Options of a demo.
#[derive(Debug, Clone)]
pub struct Options {
    /// 0 means a free port.
    pub port: u16,
    pub admin_port: u16,
    /// The built-in echo backend if `None`.
    pub backend: Option<String>,
    /// `Host` that `backend` gets: `preserve`, the default, or `rewrite`.
    pub host_header: Option<String>,
    /// A new temporary folder if `None`.
    pub data_dir: Option<PathBuf>,
    /// At least 1.
    pub workers: usize,
    pub rate: Rate,
    /// Where gateway and agent export spans.
    pub traces: Option<CollectorSettings>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            port: 0,
            admin_port: 0,
            backend: None,
            host_header: None,
            data_dir: None,
            workers: 1,
            rate: ServiceSettings::RATE,
            traces: None,
        }
    }
}

impl Options {
    /// Returns the configuration of a demo's gateway with these options.
    pub fn config(&self, data_dir: PathBuf) -> Config {
        let loopback = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        Config {
            listen: loopback(self.port),
            admin_listen: loopback(self.admin_port),
            workers: self.workers,
            default_rate: self.rate,
            drain: Duration::from_secs(10),
            traces: self.traces.clone(),
            ..Config::new(Region::new("eu1", "gw.localhost"), data_dir)
        }
    }
}

/// A running demo.
pub struct Demo {
    gateway: Gateway,
    agent: AgentHandle,
    pub about: About,
    /// Removed with its contents when the demo ends.
    _temporary: Option<tempfile::TempDir>,
}

/// Addresses and secrets for using a demo; printed as one line with `--json`.
#[derive(Debug, Clone, Serialize)]
pub struct About {
    pub base_url: String,
    pub tenant_url: String,
    pub account: &'static str,
    pub service: &'static str,
    pub client_id: String,
    pub client_secret: String,
    pub service_key: String,
    pub ca_file: PathBuf,
    pub admin_url: String,
    /// For browsers.
    pub console_url: String,
    pub admin_token: String,
    /// A backend in place of the built-in echo.
    #[serde(skip)]
    pub backend: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    #[error(transparent)]
    Gateway(#[from] StartError),
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error("agent: {0}")]
    Enroll(#[from] gw_agent::identity::enroll::EnrollError),
    #[error("agent: {0}")]
    Agent(#[from] gw_agent::config::ConfigError),
    #[error("agent: {0}")]
    AgentStart(#[from] gw_agent::StartError),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("the agent has no tunnel after {0:?}; see the log above")]
    NoTunnel(Duration),
}

const ACCOUNT: &str = "demo";
const SERVICE: &str = "echo";
const AGENT: &str = "demo";
/// Longest wait for the agent's tunnel, which normally takes some milliseconds.
const TUNNEL_WITHIN: Duration = Duration::from_secs(20);

impl Demo {
    /// Starts all parts; requests can be served when this returns.
    pub fn start(options: &Options) -> Result<Self, DemoError> {
        let (data_dir, temporary) = match &options.data_dir {
            Some(path) => (path.clone(), None),
            None => {
                let temporary = tempfile::Builder::new().prefix("gw-demo-").tempdir()?;
                (temporary.path().to_owned(), Some(temporary))
            }
        };
        Ok(Self {
            _temporary: temporary,
            ..Self::start_with(&options.config(data_dir), options)?
        })
    }

    /// As [`Demo::start`], with this configuration of the gateway, also for its ports, its folder
    /// and its workers.
    pub fn start_with(config: &Config, options: &Options) -> Result<Self, DemoError> {
        files::create_private_dir(&config.data_dir)?;
        let gateway = Gateway::start(config)?;
        let seeded = Seeded::new(gateway.control(), options.rate)?;
        let ca_file = config.data_dir.join("dev-ca.crt");
        let state_dir = config.data_dir.join("agent");
        let port = gateway.address().port();
        enroll(
            gateway.control().region(),
            port,
            &ca_file,
            &state_dir,
            seeded.enrollment_token.clone(),
        )?;
        let agent = start_agent(options, &state_dir)?;
        wait_for_tunnel(&gateway)?;

        let region = gateway.control().region();
        let about = About {
            backend: options.backend.clone(),
            ..About::new(
                seeded,
                region,
                port,
                gateway.admin_address(),
                ca_file,
                control_token(&gateway),
            )
        };
        Ok(Self {
            gateway,
            agent,
            about,
            _temporary: None,
        })
    }

    pub fn gateway(&self) -> &Gateway {
        &self.gateway
    }

    pub fn agent(&self) -> &AgentHandle {
        &self.agent
    }

    /// Runs until a stop signal, then stops gateway and agent.
    pub fn run_until_stopped(self) -> Result<(), RunError> {
        let signals = Signals::listen(self.gateway.background())?;
        signals.run(self.gateway, None)?;
        self.agent.drain();
        Ok(())
    }

    /// Stops gateway and agent after the running requests.
    pub fn stop(self) {
        self.gateway.drain();
        self.agent.drain();
    }
}

/// Enrolls the agent with the gateway on `port` over HTTPS with a token, as any agent does.
fn enroll(
    region: &Region,
    port: u16,
    ca_file: &Path,
    state_dir: &Path,
    token: Secret,
) -> Result<(), DemoError> {
    let options = gw_agent::identity::enroll::EnrollmentOptions {
        gateway: Some(format!("{}:{port}", region.base_url())),
        token: Some(gw_agent::identity::enroll::TokenSource::Text(token)),
        state_dir: state_dir.to_owned(),
        ca_file: Some(ca_file.to_owned()),
        name: Some(AGENT.to_owned()),
        // Replaces the state of an earlier demo.
        force: true,
        connect_to: Some((Ipv4Addr::LOCALHOST.to_string(), port)),
    };
    gw_agent::identity::enroll::enroll(options, |_| None)?;
    Ok(())
}

impl About {
    /// `port` is that of the listener for callers.
    fn new(
        seeded: Seeded,
        region: &Region,
        port: u16,
        admin: SocketAddr,
        ca_file: PathBuf,
        admin_token: String,
    ) -> Self {
        Self {
            base_url: format!("https://{}:{port}", region.apex()),
            tenant_url: format!("https://{}:{port}", seeded.hostname),
            account: ACCOUNT,
            service: SERVICE,
            client_id: seeded.client_id.to_string(),
            client_secret: seeded.client_secret,
            service_key: seeded.service_key,
            ca_file,
            admin_url: format!("http://{admin}"),
            console_url: console_url(admin),
            admin_token,
            backend: None,
        }
    }

    /// Writes example commands.
    pub fn write_hints(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(
            out,
            "Gw is running: caller -> gateway -> tunnel -> agent -> backend. Try:\n"
        )?;
        self.write_commands(out)?;
        writeln!(out, "{}Stop with Ctrl-C.", self.further_paths())
    }

    /// What else there is at the echo backend.
    fn further_paths(&self) -> &'static str {
        match self.backend {
            None => "Also /slow?ms=500 and /status/404. ",
            Some(_) => "",
        }
    }

    /// `curl` that trusts the gateway. Only the user of the demo can read the file.
    fn curl(&self) -> String {
        let ca = quoted(&self.ca_file.display().to_string());
        format!("{}curl --cacert {ca}", sudo())
    }

    /// Writes commands that send requests and administer the gateway.
    fn write_commands(&self, out: &mut impl Write) -> io::Result<()> {
        let Self {
            base_url,
            tenant_url,
            service_key,
            client_id,
            client_secret,
            admin_url,
            admin_token,
            ..
        } = self;
        let curl = self.curl();
        let call = format!("  {curl} -H 'X-Gw-Service-Key: {service_key}'");
        match &self.backend {
            None => {
                writeln!(out, "{call} '{tenant_url}/hello?name=you'")?;
                writeln!(out, "{call} {tenant_url}/bytes/1000000 -o /dev/null")?;
                writeln!(out, "{call} -N {tenant_url}/sse")?;
            }
            Some(url) => {
                writeln!(out, "  # The backend is {url}.")?;
                writeln!(out, "{call} {tenant_url}/")?;
            }
        }
        writeln!(out, "  {curl} {tenant_url}/without-a-key")?;
        writeln!(
            out,
            "\nAn access token, for X-Gw-Authorization: Bearer ... instead of the key:\n"
        )?;
        writeln!(
            out,
            "  {curl} {base_url}/oauth/token -u {client_id}:{client_secret} \\\n    -d \
             'scope=account:{ACCOUNT} service:{SERVICE}'"
        )?;
        writeln!(out, "\nAdministration:\n")?;
        writeln!(
            out,
            "  export GW_ADMIN_URL={admin_url} GW_ADMIN_TOKEN={admin_token}"
        )?;
        writeln!(out, "  gw-gateway agent list {ACCOUNT}")?;
        writeln!(out, "  curl {admin_url}/metrics\n")?;
        writeln!(out, "Console, with the same token: {}\n", self.console_url)
    }
}

fn start_agent(options: &Options, state_dir: &Path) -> Result<AgentHandle, DemoError> {
    let backend = match &options.backend {
        Some(url) => url.clone(),
        None => format!("http://{}", echo::start()?),
    };
    let environment = |name: &str| {
        let said = match name {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" => options
                .traces
                .as_ref()
                .map(|traces| traces.endpoint.to_string()),
            gw_agent::config::HOST_HEADER_VARIABLE => options.host_header.clone(),
            // The gateway is in this process: no proxy.
            "GW_PROXY" => Some(String::new()),
            "OTEL_TRACES_SAMPLER_ARG" => options
                .traces
                .as_ref()
                .map(|traces| traces.sample_ratio.to_string()),
            _ => None,
        };
        said.or_else(|| std::env::var(name).ok())
    };
    let config = gw_agent::Config::load(None, Some(state_dir.to_owned()), &[backend], environment)?;
    Ok(gw_agent::start(config)?)
}

fn wait_for_tunnel(gateway: &Gateway) -> Result<(), DemoError> {
    let deadline = Instant::now() + TUNNEL_WITHIN;
    while gateway
        .control()
        .reports()
        .iter()
        .all(|report| report.tunnels.is_empty())
    {
        if Instant::now() >= deadline {
            return Err(DemoError::NoTunnel(TUNNEL_WITHIN));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn control_token(gateway: &Gateway) -> String {
    gateway.control().admin_token().reveal().to_owned()
}
