//! The product with nothing to configure: one process with a gateway, an agent that reaches it over loopback, and a
//! small backend. The only file that runs an agent.

use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gw_agent::AgentHandle;
use gw_shared::id::{AccountId, InvalidId, ServiceId};
use gw_shared::logging::LogFormat;
use serde::Serialize;

use crate::auth::NewServiceKey;
use crate::config::{Config, HandOver};
use crate::control::ControlError;
use crate::echo;
use crate::files;
use crate::hostname::Region;
use crate::limit::Rate;
use crate::server::{Gateway, StartError};
use crate::tls::CertificateSource;

/// What can be changed about a demo.
#[derive(Debug, Clone)]
pub struct Options {
    /// 0 lets the kernel choose.
    pub port: u16,
    pub admin_port: u16,
    /// The echo backend if there is none.
    pub backend: Option<String>,
    /// A fresh temporary folder if there is none.
    pub data_dir: Option<PathBuf>,
    /// At least 1.
    pub workers: usize,
    pub rate: Rate,
    pub hand_over: HandOver,
}

/// A running demo.
pub struct Demo {
    gateway: Gateway,
    agent: AgentHandle,
    pub about: About,
    /// Removed, with all in it, when the demo ends.
    _temporary: Option<tempfile::TempDir>,
}

/// What one needs to know to use a demo; with `--json`, printed as one line.
#[derive(Debug, Clone, Serialize)]
pub struct About {
    pub base_url: String,
    pub tenant_url: String,
    pub account: &'static str,
    pub service: &'static str,
    pub client_id: Option<String>,
    pub client_secret: Option<String>,
    pub service_key: String,
    pub ca_file: PathBuf,
    pub admin_url: String,
    pub admin_token: String,
}

#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    #[error(transparent)]
    Gateway(#[from] StartError),
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error("agent: {0}")]
    Agent(#[from] gw_agent::config::ConfigError),
    #[error("agent: {0}")]
    AgentStart(#[from] gw_agent::StartError),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Id(#[from] InvalidId),
    #[error("the agent has no tunnel after {0:?}; see the log above")]
    NoTunnel(Duration),
}

const ACCOUNT: &str = "demo";
const SERVICE: &str = "echo";
/// Longest wait for the agent's tunnel, which takes some milliseconds.
const TUNNEL_WITHIN: Duration = Duration::from_secs(20);

impl Demo {
    /// Starts everything; requests can be served when this returns.
    pub fn start(options: &Options) -> Result<Self, DemoError> {
        let (data_dir, temporary) = match &options.data_dir {
            Some(path) => (path.clone(), None),
            None => {
                let temporary = tempfile::Builder::new().prefix("gw-demo-").tempdir()?;
                (temporary.path().to_owned(), Some(temporary))
            }
        };
        files::create_private_dir(&data_dir)?;
        let gateway = Gateway::start(&config(options, data_dir.clone()))?;
        let (account, service) = (AccountId::new(ACCOUNT)?, ServiceId::new(SERVICE)?);
        let control = gateway.control();
        control.create_account(&account)?;
        let hostname = control.create_service(&account, &service, Some(options.rate))?;
        let NewServiceKey { text: service_key, .. } =
            control.create_service_key(&account, std::slice::from_ref(&service))?;

        let ca_file = data_dir.join("dev-ca.crt");
        let state_dir = data_dir.join("agent");
        let port = gateway.address().port();
        let ca = files::read_text(&ca_file)?;
        let services = std::slice::from_ref(&service);
        control.create_agent(&account, "demo", services, ("127.0.0.1", port), Some(&ca), &state_dir)?;
        let agent = start_agent(options, &state_dir)?;
        wait_for_tunnel(&gateway)?;

        let about = About {
            base_url: format!("https://{}:{port}", gateway.control().region().apex()),
            tenant_url: format!("https://{hostname}:{port}"),
            account: ACCOUNT,
            service: SERVICE,
            // There are no access tokens yet, and so no credentials to get one with.
            client_id: None,
            client_secret: None,
            service_key: service_key.reveal().to_owned(),
            ca_file,
            admin_url: format!("http://{}", gateway.admin_address()),
            admin_token: control_token(&gateway),
        };
        Ok(Self { gateway, agent, about, _temporary: temporary })
    }

    pub fn gateway(&self) -> &Gateway {
        &self.gateway
    }

    /// Runs until it is told to stop, then ends gateway and agent.
    pub fn run_until_stopped(self) -> io::Result<()> {
        crate::server::run_until_stopped(self.gateway)?;
        self.agent.drain();
        Ok(())
    }

    /// Ends gateway and agent, running requests first.
    pub fn stop(self) {
        self.gateway.drain();
        self.agent.drain();
    }
}

impl About {
    /// Writes what a person would want to try next.
    pub fn write_hints(&self, out: &mut impl Write) -> io::Result<()> {
        let Self { tenant_url, service_key, admin_url, .. } = self;
        let ca = self.ca_file.display();
        writeln!(out, "Gw is running: caller -> gateway -> tunnel -> agent -> backend. Try:\n")?;
        writeln!(out, "  curl --cacert {ca} -H 'X-Gw-Service-Key: {service_key}' '{tenant_url}/hello?name=you'")?;
        writeln!(
            out,
            "  curl --cacert {ca} -H 'X-Gw-Service-Key: {service_key}' {tenant_url}/bytes/1000000 -o /dev/null"
        )?;
        writeln!(out, "  curl --cacert {ca} -H 'X-Gw-Service-Key: {service_key}' -N {tenant_url}/sse")?;
        writeln!(out, "  curl --cacert {ca} {tenant_url}/without-a-key")?;
        writeln!(out, "  curl {admin_url}/metrics\n")?;
        writeln!(out, "Also /slow?ms=500 and /status/404. Stop with Ctrl-C.")
    }
}

fn config(options: &Options, data_dir: PathBuf) -> Config {
    let loopback = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    Config {
        region: Region::new("eu1", "gw.localhost"),
        certificate: CertificateSource::Development { data_dir: data_dir.clone() },
        data_dir,
        listen: loopback(options.port),
        admin_listen: loopback(options.admin_port),
        workers: options.workers,
        hand_over: options.hand_over,
        default_rate: options.rate,
        drain: Duration::from_secs(10),
        log_format: LogFormat::Text,
    }
}

fn start_agent(options: &Options, state_dir: &Path) -> Result<AgentHandle, DemoError> {
    let backend = match &options.backend {
        Some(url) => url.clone(),
        None => format!("http://{}", echo::start()?),
    };
    let environment = |name: &str| std::env::var(name).ok();
    let config = gw_agent::Config::load(None, Some(state_dir.to_owned()), Some(&backend), environment)?;
    Ok(gw_agent::start(config)?)
}

fn wait_for_tunnel(gateway: &Gateway) -> Result<(), DemoError> {
    let deadline = Instant::now() + TUNNEL_WITHIN;
    while gateway.control().reports().iter().all(|report| report.tunnels.is_empty()) {
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
