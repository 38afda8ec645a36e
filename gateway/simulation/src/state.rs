//! How far a campaign is, in a file from which it resumes.

use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// What the seeds from [`Self::from`] up to [`Self::next`] came to.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct State {
    pub(crate) from: u64,
    /// The first seed that has not run.
    pub(crate) next: u64,
    pub(crate) requests: u64,
    pub(crate) relayed: u64,
    /// CPU time of all scenarios, in seconds.
    #[serde(default)]
    pub(crate) cpu_seconds: f64,
    #[serde(default)]
    pub(crate) failures: Vec<Failure>,
}

/// A seed that violates an invariant.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Failure {
    pub(crate) seed: u64,
    pub(crate) invariant: String,
}

impl State {
    pub(crate) fn new(from: u64) -> Self {
        Self {
            from,
            next: from,
            ..Self::default()
        }
    }

    /// Reads the file, or begins at `from` if there is none. A campaign that began elsewhere is not
    /// resumed.
    pub(crate) fn load(path: &Path, from: Option<u64>) -> io::Result<Self> {
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Self::new(from.unwrap_or(0)));
            }
            Err(error) => return Err(about(path, &error)),
        };
        let state: Self = toml::from_str(&text).map_err(|error| {
            about(
                path,
                &format!("not the state of a campaign: {error}Delete it to begin again."),
            )
        })?;
        match from {
            Some(from) if from != state.from => Err(about(
                path,
                &format!(
                    "the campaign began at seed {}, not {from}. Name another file, or omit --from.",
                    state.from
                ),
            )),
            _ => Ok(state),
        }
    }

    /// Writes the file. It is replaced as a whole, so a killed process leaves the previous one.
    pub(crate) fn store(&self, path: &Path) -> io::Result<()> {
        let text = toml::to_string(self).map_err(io::Error::other)?;
        let mut new = path.as_os_str().to_owned();
        new.push(".new");
        let written = fs::write(&new, text).and_then(|()| fs::rename(&new, path));
        written.map_err(|error| about(path, &error))
    }
}

fn about(path: &Path, problem: &impl std::fmt::Display) -> io::Error {
    io::Error::other(format!("{}: {problem}", path.display()))
}
