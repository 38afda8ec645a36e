//! What an agent runs with: state folder, optional configuration file, options and variables, checked together.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use gw_shared::logging::LogFormat;
use serde::Deserialize;

use crate::backend::{Backend, InvalidBackend};
use crate::slots;
use crate::state::{Enrollment, StateDir, StateError};

/// Everything an agent needs to know to start; valid by construction.
#[derive(Debug, Clone)]
pub struct Config {
    pub(crate) state: StateDir,
    pub(crate) enrollment: Enrollment,
    /// Service hostname → backend.
    pub(crate) backends: BTreeMap<String, Backend>,
    /// `Err` holds the default that an invalid setting fell back to: to be warned of once logging has started.
    pub(crate) slots: Result<u32, u32>,
    pub log_format: LogFormat,
}

/// `agent.toml`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    state_dir: Option<PathBuf>,
    /// Backend of services that `backends` does not name.
    backend: Option<String>,
    #[serde(default)]
    backends: BTreeMap<String, String>,
    #[serde(default)]
    log_format: LogFormat,
}

/// Where enrollment leaves the agent's identity when nothing else is said.
const DEFAULT_STATE_DIR: &str = "/var/lib/gw-agent";

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("{path}: {error}")]
    Read { path: String, error: std::io::Error },
    #[error("{path}: {error}")]
    Toml { path: String, error: toml::de::Error },
    #[error("not enrolled: {0}")]
    State(#[from] StateError),
    #[error("configuration:{}", .0.iter().map(|error| format!("\n  {error}")).collect::<String>())]
    Invalid(Vec<String>),
}

impl Config {
    pub(crate) fn slots(&self) -> u32 {
        self.slots.unwrap_or_else(|default| default)
    }

    pub fn load(
        file: Option<&Path>,
        state_dir: Option<PathBuf>,
        backend: Option<&str>,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, ConfigError> {
        let file = file.map(read).transpose()?.unwrap_or_default();
        let from_environment = environment("GW_STATE_DIR").map(PathBuf::from);
        let state_dir = state_dir.or(from_environment).or(file.state_dir);
        let state = StateDir::new(state_dir.unwrap_or_else(|| DEFAULT_STATE_DIR.into()));
        let enrollment = state.enrollment()?;
        let backend_of_all = backend.map(str::to_owned).or_else(|| environment("GW_BACKEND"));
        let backends = backends(&enrollment, backend_of_all.as_deref(), file.backend.as_deref(), &file.backends)
            .map_err(ConfigError::Invalid)?;
        let log_format = match environment("GW_LOG_FORMAT") {
            Some(text) => {
                text.parse().map_err(|error| ConfigError::Invalid(vec![format!("GW_LOG_FORMAT: {error}")]))?
            }
            None => file.log_format,
        };
        let slots = slots::parse(environment(slots::VARIABLE).as_deref());
        Ok(Self { state, enrollment, backends, slots, log_format })
    }
}

fn read(path: &Path) -> Result<File, ConfigError> {
    let name = || path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|error| ConfigError::Read { path: name(), error })?;
    toml::from_str(&text).map_err(|error| ConfigError::Toml { path: name(), error })
}

/// A backend for every enrolled service, or all that is wrong.
fn backends(
    enrollment: &Enrollment,
    of_all: Option<&str>,
    fallback: Option<&str>,
    named: &BTreeMap<String, String>,
) -> Result<BTreeMap<String, Backend>, Vec<String>> {
    let mut errors: Vec<String> = named
        .keys()
        .filter(|hostname| !enrollment.services.contains(hostname))
        .map(|hostname| {
            format!("backends.{hostname}: not a service of this agent, which has {}", enrollment.services.join(", "))
        })
        .collect();
    let mut backends = BTreeMap::new();
    for hostname in &enrollment.services {
        let url = of_all.or(named.get(hostname).map(String::as_str)).or(fallback);
        match url.map(Backend::parse) {
            Some(Ok(backend)) => drop(backends.insert(hostname.clone(), backend)),
            Some(Err(error @ InvalidBackend { .. })) => errors.push(format!("backend of {hostname}: {error}")),
            None => errors.push(format!("backend of {hostname}: missing; give --backend http://HOST:PORT")),
        }
    }
    if errors.is_empty() { Ok(backends) } else { Err(errors) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enrollment() -> Enrollment {
        Enrollment {
            gateway_host: "eu1.example.com".into(),
            gateway_port: 443,
            services: vec!["acme--a.eu1.example.com".into(), "acme--b.eu1.example.com".into()],
        }
    }

    #[test]
    fn the_nearest_word_on_a_backend_counts() {
        let named = BTreeMap::from([("acme--a.eu1.example.com".to_owned(), "http://a:1".to_owned())]);
        let chosen = backends(&enrollment(), None, Some("http://rest:2"), &named).unwrap();
        let urls: Vec<String> = chosen.values().map(ToString::to_string).collect();
        assert_eq!(urls, ["http://a:1", "http://rest:2"]);
        let all = backends(&enrollment(), Some("http://all:3"), None, &named).unwrap();
        assert!(all.values().all(|backend| backend.to_string() == "http://all:3"));
    }

    #[test]
    fn every_mistake_is_reported() {
        let named = BTreeMap::from([
            ("acme--a.eu1.example.com".to_owned(), "ftp://x".to_owned()),
            ("other".to_owned(), "http://x".to_owned()),
        ]);
        let errors = backends(&enrollment(), None, None, &named).unwrap_err();
        assert_eq!(errors.len(), 3, "{errors:?}");
    }

    #[test]
    fn an_agent_that_is_not_enrolled_says_so() {
        let directory = tempfile::tempdir().unwrap();
        let error = Config::load(None, Some(directory.path().into()), None, |_| None).unwrap_err();
        assert!(error.to_string().starts_with("not enrolled: "), "{error}");
    }
}
