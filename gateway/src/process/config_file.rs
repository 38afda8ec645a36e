//! The configuration file of a process: reading it, and its changes since the start.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use gw_interface::config::Config;
use gw_shared::config::ConfigErrors;
use toml::{Table, Value};

/// A configuration file, with its text when it was read.
#[derive(Debug, Clone)]
pub struct ConfigFile {
    path: PathBuf,
    text: String,
}

/// What a changed file means to the process that runs.
#[derive(Debug, PartialEq, Eq)]
enum Change {
    None,
    /// Keys with another value.
    Keys(BTreeSet<String>),
    Mistakes(String),
}

impl ConfigFile {
    /// Reads the file. The error has path, cause and remedy.
    pub fn read(path: &Path) -> Result<Self, String> {
        let text = fs::read_to_string(path).map_err(|error| {
            let advice = match error.kind() {
                ErrorKind::NotFound => {
                    "name the file with --config, or let `gw-gateway init` write one".to_owned()
                }
                ErrorKind::PermissionDenied => {
                    format!(
                        "user {} has to be able to read it",
                        rustix::process::geteuid().as_raw()
                    )
                }
                ErrorKind::InvalidData => "it must be TOML in UTF-8".to_owned(),
                _ => "name a file with --config".to_owned(),
            };
            format!("{}: cannot be read: {error}; {advice}", path.display())
        })?;
        Ok(Self {
            path: path.to_owned(),
            text,
        })
    }

    /// Returns the text as it was read.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Parses the file and checks its certificate. Also returns warnings.
    pub fn check(&self) -> Result<(Config, Vec<String>), String> {
        checked(&self.text).map_err(|errors| format!("{}: {errors}", self.path.display()))
    }

    /// Logs what has changed in the file since this process read it, because a reload does not use
    /// it.
    pub(super) fn log_changes(&self) {
        let path = self.path.display();
        let now = match Self::read(&self.path) {
            Ok(now) => now,
            Err(error) => {
                return tracing::error!(
                    "configuration: {error}; the one read at the start stays in use"
                );
            }
        };
        match change(&self.text, &now.text) {
            Change::None => {}
            Change::Keys(keys) => {
                let keys = keys.into_iter().collect::<Vec<_>>().join(", ");
                tracing::warn!(%path, keys,
                    "the configuration file has changed: SIGHUP reads only certificates, SIGUSR2 \
                     applies the other keys");
            }
            Change::Mistakes(mistakes) => tracing::error!(
                %path,
                mistakes,
                "the configuration file has changed and has mistakes: the one read at the start \
                 stays in use, and the next start will fail"
            ),
        }
    }
}

fn checked(text: &str) -> Result<(Config, Vec<String>), ConfigErrors> {
    Config::check(text, |name| std::env::var(name).ok())
}

fn change(used: &str, now: &str) -> Change {
    let keys = changed_keys(used, now);
    match checked(now) {
        _ if used == now => Change::None,
        Err(errors) => Change::Mistakes(errors.0.join("; ")),
        Ok(_) if keys.is_empty() => Change::None,
        Ok(_) => Change::Keys(keys),
    }
}

/// Keys whose values differ between two texts; keys of tables with a dot.
fn changed_keys(used: &str, now: &str) -> BTreeSet<String> {
    let [used, now] = [used, now].map(|text| {
        let mut keys = Vec::new();
        flatten("", text.parse().unwrap_or_default(), &mut keys);
        keys
    });
    let only_in = |these: &[(String, Value)], those: &[(String, Value)]| {
        these
            .iter()
            .filter(|entry| !those.contains(entry))
            .map(|(key, _)| key.clone())
            .collect::<BTreeSet<_>>()
    };
    &only_in(&used, &now) | &only_in(&now, &used)
}

fn flatten(prefix: &str, table: Table, keys: &mut Vec<(String, Value)>) {
    for (key, value) in table {
        match value {
            Value::Table(table) => flatten(&format!("{prefix}{key}."), table, keys),
            value => keys.push((format!("{prefix}{key}"), value)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = "region = \"eu1\"\ndomain = \"example.com\"\ndata_dir = \"/d\"\n";

    #[test]
    fn changed_added_and_removed_keys_are_named() {
        let used =
            format!("{MINIMAL}workers = 2\nburst = 5\n[traces]\nendpoint = \"http://a:1\"\n");
        let now = format!(
            "{MINIMAL}workers = 3\ndrain_seconds = 1\n# new\n[traces]\nendpoint = \"http://b:1\"\n"
        );
        let expected = ["burst", "drain_seconds", "traces.endpoint", "workers"].map(str::to_owned);
        assert_eq!(change(&used, &now), Change::Keys(expected.into()));
        assert_eq!(change(&used, &format!("# a comment\n{used}")), Change::None);
        let Change::Mistakes(mistakes) =
            change(&used, &format!("{MINIMAL}wrokers = 1\nburst = 0\n"))
        else {
            panic!()
        };
        assert!(
            mistakes.contains("wrokers: ") && mistakes.contains("burst: "),
            "{mistakes}"
        );
        assert!(matches!(change(&used, "region = "), Change::Mistakes(_)));
    }

    #[test]
    fn a_file_that_cannot_be_read_is_named_with_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gateway.toml");
        let error = ConfigFile::read(&path).unwrap_err();
        assert!(
            error.starts_with(&format!("{}: cannot be read: No such file", path.display())),
            "{error}"
        );
        assert!(error.contains("--config"), "{error}");
        assert!(
            ConfigFile::read(folder.path())
                .unwrap_err()
                .contains("Is a directory")
        );
    }
}
