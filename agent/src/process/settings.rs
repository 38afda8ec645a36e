//! What the supervisor reads of the configuration: its own settings alone. Workers check the whole
//! of it, because an updated program may know keys that the installed one does not.

use std::path::PathBuf;

use gw_shared::config::{ConfigErrors, Keys};
use gw_shared::identity::program::ReleaseKeys;
use gw_shared::process::core_dump;
use gw_shared::telemetry::logging::LogFormat;

use crate::config::{ConfigError, read, release_keys};
use crate::identity::state::{self, StateDir};

/// Where the configuration of an agent is.
#[derive(Debug, Clone)]
pub struct ConfigSource {
    /// The configuration file.
    pub file: Option<PathBuf>,
    /// Takes precedence over `state_dir` in the file.
    pub state_dir: Option<PathBuf>,
}

/// Settings of the supervisor.
#[derive(Debug)]
pub(super) struct SupervisorSettings {
    pub(super) state: StateDir,
    /// Release keys that the agent accepts; `None` if it does not update itself.
    pub(super) release_keys: Option<ReleaseKeys>,
    pub(super) log_format: LogFormat,
    /// Whether the process may leave core dumps.
    pub(super) core_dumps: bool,
}

impl SupervisorSettings {
    pub(super) fn load(
        source: &ConfigSource,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, ConfigError> {
        let table = source
            .file
            .as_deref()
            .map(read)
            .transpose()?
            .unwrap_or_default();
        let mut keys = Keys::new(table, &environment);
        let state_dir = keys.text("state_dir", "a folder", |text| Some(PathBuf::from(text)));
        let log_format = keys.text("log_format", "\"text\" or \"json\"", |text| {
            text.parse().ok()
        });
        let release_keys = release_keys(&mut keys);
        let core_dumps = core_dump::take(&mut keys);
        if !keys.errors.is_empty() {
            return Err(ConfigError::Invalid(ConfigErrors(keys.errors)));
        }
        let state_dir = source.state_dir.clone().or(state_dir);
        let state = StateDir::new(state_dir.unwrap_or_else(|| state::DEFAULT.into()));
        Ok(Self {
            state,
            release_keys,
            log_format: log_format.unwrap_or_default(),
            core_dumps,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_other_versions_are_left_to_the_worker() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("agent.toml");
        let load = |text: &str| {
            std::fs::write(&file, text).unwrap();
            let source = ConfigSource {
                file: Some(file.clone()),
                state_dir: None,
            };
            SupervisorSettings::load(&source, |_| None)
        };
        let text = "state_dir = '/s'\nlog_format = 'json'\nbackend = 7\nnew_key = 1\n";
        let settings = load(text).unwrap();
        assert_eq!(settings.state.path().to_str(), Some("/s"));
        assert_eq!(settings.release_keys, None);
        assert_eq!(settings.log_format, LogFormat::Json);
        assert!(matches!(
            load("update = \"sometimes\"\n"),
            Err(ConfigError::Invalid(_))
        ));
        assert!(matches!(load("update = \n"), Err(ConfigError::Toml { .. })));
    }
}
