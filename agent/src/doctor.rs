//! `gw-agent doctor`: checks whether this agent can serve, and reports what prevents it. Changes
//! nothing, and does not disturb a running agent.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::slice;
use std::time::{Duration, SystemTime};

use gw_shared::config::unknown_in_environment;
use gw_shared::doctor::{Examination, machine};
use gw_shared::net::resolve;
use gw_shared::runtime::{self, Driver};

use crate::apex_client::ApexClient;
use crate::apex_client::error::GatewayError;
use crate::backend::{ConnectError, Pool};
use crate::clock::GatewayClock;
use crate::config::{Config, ConfigError};
use crate::identity::Identity;
use crate::identity::state::{self, Enrollment, StateDir, StateError};
use crate::tunnel::dial;

/// Open files of a busy agent: one per slot of its tunnels, and as many backend connections.
const OPEN_FILES: u64 = 4096;
/// Time limit of each check on the network.
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// Bytes of the answer of a listener that are read.
const ANSWER_MAX: u64 = 4096;
/// Differences between the clocks of agent and gateway that are reported. Certificates are
/// backdated by five minutes, so a larger difference makes new ones invalid.
const OFFSET_WARNING: Duration = Duration::from_secs(30);
const OFFSET_FAILED: Duration = Duration::from_secs(300);
/// Time after expiry within which the agent can replace its certificate by itself.
const RECOVERY: Duration = Duration::from_hours(30 * 24);

/// Options of `doctor`, the same as those of `run`.
#[derive(Debug, Clone, Default)]
pub struct DoctorOptions {
    /// `agent.toml`
    pub config: Option<PathBuf>,
    pub state_dir: Option<PathBuf>,
    pub backends: Vec<String>,
}

/// Runs all checks.
pub fn examine(
    options: &DoctorOptions,
    environment: impl Fn(&str) -> Option<String>,
) -> Examination {
    let mut out = Examination::default();
    machine::examine(&mut out, OPEN_FILES);
    for unknown in unknown_in_environment() {
        out.warning(
            "environment",
            unknown.to_string(),
            "correct the name or unset the variable",
        );
    }
    let folder = options
        .state_dir
        .clone()
        .or_else(|| environment(state::VARIABLE).map(PathBuf::from));
    let folder = StateDir::new(folder.unwrap_or_else(|| state::DEFAULT.into()));
    let of_http = match options {
        DoctorOptions {
            config: None,
            backends,
            ..
        } if backends.is_empty() && environment("GW_BACKEND").is_none() => folder.http_backend(),
        _ => None,
    };
    let config = Config::load(
        options.config.as_deref(),
        options.state_dir.clone(),
        of_http.as_ref().map_or(&*options.backends, slice::from_ref),
        &environment,
    );
    let state = config.as_ref().map_or(&folder, |config| &config.state);
    machine::folder(&mut out, "state folder", state.path());
    owner(&mut out, state.path());
    match config {
        Ok(config) => {
            let from = match (&options.config, of_http) {
                (Some(file), _) => file.display().to_string(),
                (None, Some(url)) => format!("the last `gw-agent http`, for {url}"),
                (None, None) => "command-line options only".to_owned(),
            };
            out.ok("configuration", from);
            configured(&mut out, &config);
        }
        Err(error) => refused(&mut out, &error),
    }
    out
}

/// Reports why there is no configuration.
fn refused(out: &mut Examination, error: &ConfigError) {
    let (check, advice) = match error {
        ConfigError::State(StateError::Permission { .. }) => (
            "enrollment",
            "run it as the user of the agent, such as `sudo -u gw-agent gw-agent doctor`",
        ),
        ConfigError::State(_) => (
            "enrollment",
            "an administrator makes a token with `gw-gateway enrollment-token create`",
        ),
        _ => ("configuration", "docs/configuration.md lists all settings"),
    };
    out.failed(check, error.to_string(), advice);
}

/// Runs the checks that need the configuration.
fn configured(out: &mut Examination, config: &Config) {
    machine::core_dumps(out, config.core_dumps);
    if let Some(address) = config.metrics_listen {
        metrics_listener(out, address);
    }
    let identity = match config.state.identity() {
        Ok(identity) => identity,
        Err(error) => {
            let advice = "enroll again: `gw-agent enroll --force`";
            return out.failed("identity", error.to_string(), advice);
        }
    };
    certificate(out, &identity, SystemTime::now());
    // A failure is reported by the checks of the machine.
    let Ok(driver) = Driver::choose() else {
        return;
    };
    if let Err(error) = driver.block_on(network(out, config, &identity)) {
        out.failed("reactor", error.to_string(), "see the checks above");
    }
}

/// Checks that the listener for metrics can have its address, or that an agent has it.
fn metrics_listener(out: &mut Examination, address: SocketAddr) {
    const CHECK: &str = "metrics_listen";
    match TcpListener::bind(address) {
        Ok(_) => out.ok(CHECK, format!("{address} is free")),
        Err(_) if is_agent(address).unwrap_or(false) => {
            out.ok(CHECK, format!("{address}: an agent has it and answers"));
        }
        Err(error) => out.failed(
            CHECK,
            format!("{address}: {error}"),
            "set an address of this machine with a free port",
        ),
    }
}

/// Whether an agent serves its metrics at this address.
fn is_agent(address: SocketAddr) -> io::Result<bool> {
    let mut stream = TcpStream::connect_timeout(&address, TIME_LIMIT)?;
    stream.set_read_timeout(Some(TIME_LIMIT))?;
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.take(ANSWER_MAX).read_to_end(&mut answer)?;
    Ok(answer.starts_with(b"HTTP/1.1 200 ") && answer.ends_with(b"\r\n\r\nok\n"))
}

/// Checks that `run` and `enroll` of this user accept the state folder.
fn owner(out: &mut Examination, folder: &Path) {
    // A missing folder is reported by other checks.
    if let Ok(about) = fs::metadata(folder)
        && let Err(error) = state::check_owner(&about)
    {
        let found = format!("{}: {error}", folder.display());
        out.warning(
            "owner of the state folder",
            found,
            "run gw-agent as the owner: it refuses folders of other users",
        );
    }
}

/// Checks the agent's certificate at the time `now`.
fn certificate(out: &mut Examination, identity: &Identity, now: SystemTime) {
    const CHECK: &str = "certificate";
    const ENROLL: &str = "enroll again: `gw-agent enroll --force`";
    let validity = match identity.validity() {
        Ok(validity) => validity,
        Err(error) => return out.failed(CHECK, error.to_string(), ENROLL),
    };
    if !identity.is_consistent() {
        return out.failed(
            CHECK,
            "the certificate is not for the private key in identity.pem",
            ENROLL,
        );
    }
    match (
        validity.not_after.duration_since(now),
        now.duration_since(validity.not_after),
    ) {
        (_, Ok(expired)) if expired < RECOVERY => out.warning(
            CHECK,
            format!("expired {} ago", in_words(expired)),
            "`gw-agent run` replaces it automatically, up to 30 days after its expiry",
        ),
        (_, Ok(expired)) => out.failed(CHECK, format!("expired {} ago", in_words(expired)), ENROLL),
        (Ok(_), _) if now < validity.not_before => {
            out.warning(
                CHECK,
                "not valid yet by this machine's clock",
                "set the clock",
            );
        }
        (Ok(left), _) => out.ok(CHECK, format!("valid for another {}", in_words(left))),
        (Err(_), Err(_)) => {}
    }
}

fn in_words(duration: Duration) -> String {
    let hours = duration.as_secs() / 3600;
    if hours >= 48 {
        format!("{} days", hours / 24)
    } else {
        format!("{hours} hours")
    }
}

const NETWORK_ADVICE: &str = "check firewalls and proxies between here and the gateway; the agent \
                              needs one outbound port, and no proxy may intercept its TLS";

/// Checks the gateway, the tunnels and the backends.
async fn network(out: &mut Examination, config: &Config, identity: &Identity) {
    let Enrollment {
        gateway_name,
        gateway_host,
        gateway_port,
        services,
        ..
    } = &config.enrollment;
    match config.proxies.for_host(gateway_host, *gateway_port) {
        Some(proxy) => {
            let source = &proxy.source;
            out.ok(
                "proxy",
                format!(
                    "{proxy}, from {source}; it resolves {gateway_host}, and the checks below \
                         go through it"
                ),
            );
        }
        None => {
            if let Some(proxy) = config.proxies.proxy() {
                out.ok(
                    "proxy",
                    format!(
                        "{proxy}, from {}, is not used for {gateway_host}",
                        proxy.source
                    ),
                );
            }
            if !resolves(out, gateway_host, *gateway_port).await {
                return;
            }
        }
    }
    match gateway_date(config).await {
        Ok(date) => {
            out.ok(
                "gateway",
                format!("{gateway_name} answers and its certificate is trusted"),
            );
            clock_offset(out, date, SystemTime::now());
        }
        Err(error) => {
            out.failed("gateway", error.to_string(), NETWORK_ADVICE);
        }
    }
    for hostname in services {
        tunnel(out, config, identity, hostname).await;
    }
    for hostname in services {
        backends(out, config, hostname).await;
    }
}

/// Checks the connections to the backends of `hostname`, and their health check.
async fn backends(out: &mut Examination, config: &Config, hostname: &str) {
    let check = format!("backend of {hostname}");
    let Some(backends) = config.backends.of(hostname) else {
        return out.failed(check, "none", Config::HOW_TO_SET_A_BACKEND);
    };
    let pool = Pool::new(hostname, backends, 1);
    for (name, connected) in pool.probe(TIME_LIMIT).await {
        match connected {
            Ok(version) => out.ok(check.clone(), format!("{name} speaks {version}")),
            Err(error) => out.failed(
                check.clone(),
                format!("{name}: {error}"),
                match error {
                    ConnectError::Unreachable(_) => "start the backend, or correct its address",
                    _ => "correct the URL or the TLS settings of the backend, or the backend",
                },
            ),
        }
    }
    let Some(health_check) = backends.health_check() else {
        return;
    };
    let check = format!("health check of {hostname}");
    for (name, result) in pool.check_all().await {
        match result {
            Ok(()) => out.ok(check.clone(), format!("{name} passes {health_check}")),
            Err(error) => out.failed(
                check.clone(),
                format!("{name} fails {health_check}: {error}"),
                "correct `health_check`, or the backend: the service gets no requests through one \
                 that fails",
            ),
        }
    }
}

/// Checks that this machine resolves the gateway's name.
async fn resolves(out: &mut Examination, host: &str, port: u16) -> bool {
    const CHECK: &str = "gateway's name";
    let resolved = async {
        resolve::resolve(host, port)
            .await
            .map_err(|error| GatewayError::Resolve {
                host: host.to_owned(),
                error,
            })
    };
    match within(resolved).await {
        Ok(addresses) => {
            let addresses: Vec<String> = addresses
                .iter()
                .map(|address| address.ip().to_string())
                .collect();
            out.ok(
                CHECK,
                format!("{host} resolves to {}", addresses.join(", ")),
            );
            true
        }
        Err(error) => {
            let advice = "check this machine's DNS; agent.json in the state folder contains the \
                          gateway's host";
            out.failed(CHECK, error.to_string(), advice);
            false
        }
    }
}

/// Reads the gateway's clock.
async fn gateway_date(config: &Config) -> Result<Option<SystemTime>, GatewayError> {
    let Enrollment {
        gateway_name,
        gateway_host,
        gateway_port,
        ..
    } = &config.enrollment;
    let authorities = config
        .state
        .gateway_authorities()
        .map_err(|error| GatewayError::Certificates(error.to_string()))?;
    let clock = GatewayClock::default();
    let apex = ApexClient::new(
        gateway_name,
        gateway_host,
        *gateway_port,
        &config.proxies,
        authorities,
        &clock,
    )?;
    within(apex.date()).await
}

fn clock_offset(out: &mut Examination, gateway: Option<SystemTime>, local: SystemTime) {
    const CHECK: &str = "clock of the gateway";
    const ADVICE: &str = "synchronise both clocks with NTP: certificates are checked against them";
    let Some(gateway) = gateway else {
        return out.warning(
            CHECK,
            "the answer has no date",
            "check whether a proxy removes it",
        );
    };
    let offset = local
        .duration_since(gateway)
        .unwrap_or_else(|error| error.duration());
    let found = format!(
        "differs by {} seconds from this machine's",
        offset.as_secs()
    );
    match offset {
        _ if offset >= OFFSET_FAILED => out.failed(CHECK, found, ADVICE),
        _ if offset >= OFFSET_WARNING => out.warning(CHECK, found, ADVICE),
        _ => out.ok(CHECK, found),
    }
}

/// Opens a tunnel like `run` up to the gateway's answer, and closes it. The gateway registers a
/// tunnel only after the agent has sent HELLO, which does not happen here, so a running agent keeps
/// its own tunnel.
async fn tunnel(out: &mut Examination, config: &Config, identity: &Identity, hostname: &str) {
    let check = format!("tunnel of {hostname}");
    match within(async {
        Ok(dial::open(config, hostname, identity, &GatewayClock::default()).await)
    })
    .await
    {
        Ok(Ok(stream)) => {
            drop(stream.close().await);
            out.ok(check, "the gateway accepts it");
        }
        Ok(Err(error)) if error.is_certificate_expired() => {
            out.warning(
                check,
                error.to_string(),
                "`gw-agent run` replaces the certificate automatically",
            );
        }
        Ok(Err(error)) => {
            out.failed(
                check,
                error.to_string(),
                "`gw-gateway agent show ACCOUNT AGENT` shows the record of this agent and its \
                 services; if there is none, enroll again with a new token and `gw-agent enroll \
                 --force`",
            );
        }
        Err(error) => out.failed(check, error.to_string(), NETWORK_ADVICE),
    }
}

async fn within<T>(
    future: impl Future<Output = Result<T, GatewayError>>,
) -> Result<T, GatewayError> {
    runtime::timeout(TIME_LIMIT, future)
        .await
        .unwrap_or(Err(GatewayError::TimedOut(TIME_LIMIT)))
}

#[cfg(test)]
mod tests;
