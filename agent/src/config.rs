//! Configuration of an agent: state folder, optional configuration file, command-line options and
//! environment variables, checked together.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use gw_shared::config::{ConfigErrors, Keys, parse_table, unknown_in_environment};
use gw_shared::files::cannot_read;
use gw_shared::identity::program::ReleaseKeys;
use gw_shared::identity::program_marker::ProgramMarker;
use gw_shared::process::core_dump;
use gw_shared::telemetry::logging::LogFormat;
use gw_shared::telemetry::trace::CollectorSettings;
use gw_shared::tunnel::endpoint::STREAMS_MAX;
use gw_shared::version::VERSION;

use crate::backend::{Backends, HealthCheck};
use crate::forward::slots;
use crate::identity::state::{self, Enrollment, StateDir, StateError};
use crate::proxy::ProxySettings;

/// Version of this program, and its release keys: those that a variable of the build names, with a
/// comma between two.
static MARKER: ProgramMarker = ProgramMarker::new(
    VERSION,
    match option_env!("GW_RELEASE_KEY") {
        Some(keys) => keys,
        None => "",
    },
);

/// Environment variable that overrides `metrics_listen`.
const METRICS_VARIABLE: &str = "GW_AGENT_METRICS_LISTEN";

/// Checked configuration of an agent.
#[derive(Debug, Clone)]
pub struct Config {
    pub(crate) state: StateDir,
    /// The enrollment at start; the gateway may have changed the services since.
    pub(crate) enrollment: Enrollment,
    /// Proxy of connections to the gateway.
    pub(crate) proxies: ProxySettings,
    pub(crate) backends: ServiceBackends,
    /// `Err` contains the default that replaced an invalid setting; [`warn`](Self::warn) logs it.
    pub(crate) slots: Result<u32, u32>,
    /// Requests are for other agents while one of them can serve them.
    pub(crate) standby: bool,
    /// `None` without a trace collector.
    pub(crate) traces: Option<CollectorSettings>,
    /// Address of `/metrics`, `/readyz` and `/healthz`, if they are served.
    pub(crate) metrics_listen: Option<SocketAddr>,
    pub log_format: LogFormat,
    /// Whether the process may leave core dumps, which have its secrets.
    pub core_dumps: bool,
}

/// The backends of each service.
#[derive(Debug, Clone)]
pub(crate) struct ServiceBackends {
    /// `--backend`: for every service; takes precedence.
    of_all: Option<Backends>,
    /// `backends`, by service hostname.
    named: BTreeMap<String, Backends>,
    /// `backend`: for services that `backends` does not name.
    fallback: Option<Backends>,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("{0}")]
    Read(String),
    #[error("{path}: {error}")]
    Toml { path: String, error: String },
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Invalid(ConfigErrors),
}

impl Config {
    pub(crate) const HOW_TO_SET_A_BACKEND: &str =
        "pass --backend http://HOST:PORT, or set `backend` or `backends` in the configuration file";

    pub(crate) fn slots(&self) -> u32 {
        self.slots.unwrap_or_else(|default| default)
    }

    /// Loads and checks the configuration. Command-line options take precedence over environment
    /// variables, and those over the file.
    pub fn load(
        file: Option<&Path>,
        state_dir: Option<PathBuf>,
        backends: &[String],
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, ConfigError> {
        let table = file.map(read).transpose()?.unwrap_or_default();
        let mut keys = Keys::new(table, &environment);
        let of_state_dir = keys.text("state_dir", "a folder", |text| Some(PathBuf::from(text)));
        let log_format = keys.text("log_format", "\"text\" or \"json\"", |text| {
            text.parse().ok()
        });
        let core_dumps = core_dump::take(&mut keys);
        let proxies = ProxySettings::take(&mut keys);
        let standby = keys.boolean("standby").unwrap_or(false);
        let health_check = keys
            .text("health_check", HealthCheck::FORMS, HealthCheck::parse)
            .unwrap_or_default();
        let traces = CollectorSettings::take(&mut keys);
        // The supervisor uses them.
        let _ = release_keys(&mut keys);
        let metrics_listen = listen_address(
            keys.in_file("metrics_listen"),
            &environment,
            &mut keys.errors,
        );
        let named = keys.in_file("backends");
        let fallback = keys.in_file("backend");
        keys.refuse_unknown();
        let mut errors = keys.errors;
        let backends = ServiceBackends::parse(
            of_all(backends, &environment).as_deref(),
            environment(HOST_HEADER_VARIABLE).as_deref(),
            &table_of_backends(named, &mut errors),
            fallback.as_ref(),
            &health_check,
            &mut errors,
        );
        let slots = slots::parse(environment(slots::VARIABLE).as_deref());
        let state_dir = state_dir.or(of_state_dir);
        let state = StateDir::new(state_dir.unwrap_or_else(|| state::DEFAULT.into()));
        let enrollment = match state.enrollment() {
            Ok(enrollment) => enrollment,
            Err(error) if errors.is_empty() => return Err(error.into()),
            Err(_) => return Err(ConfigError::Invalid(ConfigErrors(errors))),
        };
        // Services without a backend do not keep the others from being served: the gateway can add
        // a service at any time.
        let has_backend = |hostname: &String| backends.of(hostname).is_some();
        if errors.is_empty() && !enrollment.services.iter().any(has_backend) {
            errors.extend(backends.none_of(&enrollment.services));
        }
        if !errors.is_empty() {
            return Err(ConfigError::Invalid(ConfigErrors(errors)));
        }
        Ok(Self {
            state,
            enrollment,
            proxies,
            backends,
            slots,
            standby,
            traces,
            metrics_listen,
            log_format: log_format.unwrap_or_default(),
            core_dumps,
        })
    }

    /// Checks that the folder has the key and the certificate of the agent.
    pub fn check_identity(&self) -> Result<(), StateError> {
        self.state.identity().map(drop)
    }

    /// Keeps the backend of `gw-agent http` in the state folder, for [`doctor`](crate::doctor).
    pub fn keep_http_backend(&self, url: &str) -> Result<(), StateError> {
        self.state.keep_http_backend(url)
    }

    /// Configuration of an agent that uses no files.
    #[cfg(feature = "bench_support")]
    pub(crate) fn in_memory(agent_id: gw_shared::id::AgentId, hostname: &str, slots: u32) -> Self {
        let gateway_name = "localhost".to_owned();
        let services = vec![hostname.to_owned()];
        let gateway_host = gateway_name.clone();
        Self {
            state: StateDir::new("unused"),
            enrollment: Enrollment {
                agent_id,
                gateway_name,
                gateway_host,
                gateway_port: 443,
                services,
                later: Default::default(),
            },
            proxies: ProxySettings::default(),
            backends: ServiceBackends {
                of_all: None,
                named: BTreeMap::new(),
                fallback: None,
            },
            slots: Ok(slots),
            standby: false,
            traces: None,
            metrics_listen: None,
            core_dumps: false,
            log_format: LogFormat::default(),
        }
    }

    /// Logs warnings about settings that are probably mistakes.
    pub(crate) fn warn(&self) {
        for unknown in unknown_in_environment() {
            tracing::warn!("{unknown}");
        }
        match self.slots {
            Err(default) => tracing::warn!(
                "{} is not a positive number: using {default}",
                slots::VARIABLE
            ),
            Ok(slots) if slots as usize > STREAMS_MAX => tracing::warn!(
                "{} is {slots}, but a tunnel carries at most {STREAMS_MAX} requests at once; the \
                 gateway refuses further ones",
                slots::VARIABLE
            ),
            Ok(_) => {}
        }
        for hostname in self
            .backends
            .named
            .keys()
            .filter(|hostname| !self.enrollment.services.contains(hostname))
        {
            let services = self.enrollment.services.join(", ");
            tracing::warn!("{}", not_served(hostname, &services));
        }
    }
}

/// Explains a key of `backends` that is no service of the agent.
fn not_served(name: &str, services: &str) -> String {
    format!(
        "backends.{name}: not a service of this agent; a key is the whole hostname of a service, \
         here {services}"
    )
}

/// Variable with the `Host` that the backends of `--backend` get.
pub const HOST_HEADER_VARIABLE: &str = "GW_HOST_HEADER";

/// URLs of the backends for every service: of the command line, or of the environment.
fn of_all(given: &[String], environment: &dyn Fn(&str) -> Option<String>) -> Option<Vec<String>> {
    if !given.is_empty() {
        return Some(given.to_vec());
    }
    // Separated by spaces, which a URL cannot contain.
    let urls = environment("GW_BACKEND")?;
    Some(urls.split_ascii_whitespace().map(str::to_owned).collect())
}

fn table_of_backends(named: Option<toml::Value>, errors: &mut Vec<String>) -> toml::Table {
    match named {
        Some(toml::Value::Table(named)) => return named,
        Some(value) => errors.push(format!("backends: {value} is not a table")),
        None => {}
    }
    toml::Table::new()
}

/// The release keys that the agent accepts, if it is to update itself.
pub(crate) fn release_keys(keys: &mut Keys<'_>) -> Option<ReleaseKeys> {
    let is_on = keys.text("update", "\"off\" or \"auto\"", |text| match text {
        "off" => Some(false),
        "auto" => Some(true),
        _ => None,
    });
    let had_errors = keys.errors.len();
    let given = keys.list("update_key", "a release key: 32 bytes in base64", |text| {
        text.parse().ok()
    });
    if is_on != Some(true) || keys.errors.len() > had_errors {
        return None;
    }
    let built_in = || {
        MARKER
            .keys()?
            .split(',')
            .map(|key| key.parse().ok())
            .collect()
    };
    let Some(accepted) = given.or_else(built_in) else {
        keys.errors.push(
            "update_key: missing; update = \"auto\" needs the public half of the release key, \
             because this build has none"
                .to_owned(),
        );
        return None;
    };
    ReleaseKeys::try_from(accepted)
        .map_err(|error| keys.errors.push(format!("update_key: {error}")))
        .ok()
}

/// The address of the admin endpoints. The environment variable takes precedence; an empty one
/// turns them off.
fn listen_address(
    in_file: Option<toml::Value>,
    environment: &dyn Fn(&str) -> Option<String>,
    errors: &mut Vec<String>,
) -> Option<SocketAddr> {
    let (name, value) = match environment(METRICS_VARIABLE) {
        Some(text) => (METRICS_VARIABLE, text.into()),
        None => ("metrics_listen", in_file?),
    };
    if value.as_str() == Some("") {
        return None;
    }
    let address = value.as_str().and_then(|text| text.parse().ok());
    if address.is_none() {
        errors.push(format!(
            "{name}: {value} is not ADDRESS:PORT, for example 127.0.0.1:9091"
        ));
    }
    address
}

/// Reads and parses a configuration file.
pub(crate) fn read(path: &Path) -> Result<toml::Table, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| ConfigError::Read(cannot_read(path, &error)))?;
    parse_table(&text).map_err(|error| ConfigError::Toml {
        path: path.display().to_string(),
        error,
    })
}

/// Parses the backend on a command line: a port of this machine, `HOST:PORT`, or a URL as in
/// `--backend`. Returns the URL.
pub fn backend_url(text: &str) -> Result<String, String> {
    let is_port = |text: &str| text.parse().is_ok_and(|port: u16| port > 0);
    let url = match text.rsplit_once(':') {
        // Programs listen on 127.0.0.1, on ::1 or on both.
        None if is_port(text) => format!("http://localhost:{text}"),
        Some((_, port)) if is_port(port) && !text.contains('/') => format!("http://{text}"),
        Some((_, rest)) if rest.starts_with('/') || text.contains("://") => text.to_owned(),
        _ => {
            return Err(
                "use the port of a program on this machine (1 to 65535), HOST:PORT, or a URL"
                    .to_owned(),
            );
        }
    };
    let mut mistakes = Vec::new();
    Backends::from_urls("backend", std::slice::from_ref(&url), &mut mistakes);
    if mistakes.is_empty() {
        Ok(url)
    } else {
        Err(mistakes.join("; "))
    }
}

impl ServiceBackends {
    /// The mistakes of an agent that has no backend for any of its services.
    fn none_of(&self, services: &[String]) -> Vec<String> {
        let services = services.join(", ");
        let how = Config::HOW_TO_SET_A_BACKEND;
        let none = format!("no backend for {services}: {how}");
        let named = self.named.keys().map(|name| not_served(name, &services));
        [none].into_iter().chain(named).collect()
    }

    fn parse(
        of_all: Option<&[String]>,
        host_of_all: Option<&str>,
        named: &toml::Table,
        fallback: Option<&toml::Value>,
        health_check: &HealthCheck,
        errors: &mut Vec<String>,
    ) -> Self {
        let of_all = of_all.and_then(|urls| Backends::of_command_line(urls, host_of_all, errors));
        let of_all = of_all.map(|backends| backends.or_checked_by(health_check));
        let named = named.iter().filter_map(|(hostname, value)| {
            let backends = Backends::from_toml(&format!("backends.{hostname}"), value, errors)?;
            Some((hostname.clone(), backends.or_checked_by(health_check)))
        });
        let named = named.collect();
        let fallback = fallback.and_then(|value| Backends::from_toml("backend", value, errors));
        Self {
            of_all,
            named,
            fallback: fallback.map(|backends| backends.or_checked_by(health_check)),
        }
    }

    /// The backends of the service at `hostname`: from `--backend`, else `backends`, else
    /// `backend`.
    pub(crate) fn of(&self, hostname: &str) -> Option<&Backends> {
        self.of_all
            .as_ref()
            .or_else(|| self.named.get(hostname))
            .or(self.fallback.as_ref())
    }
}
