//! Agents of other versions: which ones are served, and the programs that are offered to them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use aws_lc_rs::digest::{SHA256, digest};
use bytes::Bytes;
use gw_shared::config::Keys;
use gw_shared::id::AgentId;
use gw_shared::identity::program::{SIZE_MAX, SignedProgram, TARGET_MAX};
use gw_shared::tunnel::control::ToAgent;
use gw_shared::version::{AgentVersions, ReleaseLine, VERSION, Version};

/// Folder of the programs that come with the gateway's package.
const PACKAGED: &str = "/usr/lib/gw-gateway/agent-programs";
/// Folder in the data folder that takes precedence.
const IN_DATA_DIR: &str = "agent-programs";
/// Ending of the description of a program.
const DESCRIPTION: &str = "json";
/// Most programs in the folder.
const TARGETS_MAX: usize = 8;
/// First release line whose agents understand the offer of a program.
const UPDATABLE: ReleaseLine = ReleaseLine { major: 0, minor: 2 };

/// Which agents a gateway serves and updates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReleaseSettings {
    /// Versions of agents that are served (`agent_versions`).
    pub served: AgentVersions,
    /// Folder with programs for agents; `None` for the default folders.
    pub programs: Option<PathBuf>,
    /// Percentage of agents that are offered a program.
    pub percent: u8,
}

impl Default for ReleaseSettings {
    fn default() -> Self {
        Self {
            served: AgentVersions::Same,
            programs: None,
            percent: 100,
        }
    }
}

impl ReleaseSettings {
    /// Takes the keys of a configuration.
    pub fn take(keys: &mut Keys<'_>) -> Self {
        let defaults = Self::default();
        let served = keys.text(
            "agent_versions",
            "\"same\" or \"previous\"",
            |text| match text {
                "same" => Some(AgentVersions::Same),
                "previous" => Some(AgentVersions::Previous),
                _ => None,
            },
        );
        let programs = keys.text("agent_programs", "a folder", |text| {
            Some(PathBuf::from(text))
        });
        let percent = keys.integer("agent_update_percent", 0..=100);
        Self {
            served: served.unwrap_or(defaults.served),
            programs,
            percent: percent.unwrap_or(defaults.percent),
        }
    }
}

/// The agents that are served, and the programs of this gateway's release line.
#[derive(Debug, Default)]
pub struct AgentReleases {
    /// Versions of agents that are served.
    pub served: AgentVersions,
    programs: Vec<OfferedProgram>,
    percent: u8,
}

#[derive(Debug)]
struct OfferedProgram {
    description: SignedProgram,
    content: Bytes,
}

/// Why a program is not offered.
#[derive(Debug, thiserror::Error)]
enum UnusableRelease {
    #[error("cannot read it: {0}")]
    Io(#[from] io::Error),
    #[error("its description is invalid: {0}")]
    Json(#[from] serde_json::Error),
    #[error("it is larger than {SIZE_MAX} bytes")]
    TooLarge,
    #[error("it is version {0}, which is not of the release line of this gateway, {VERSION}")]
    OtherLine(Version),
    #[error("its content: {0}")]
    Content(#[from] gw_shared::identity::program::InvalidProgram),
    #[error("its target has another name than its file")]
    Target,
}

/// Path of the program for `target` in a folder, and of its description.
pub fn program_files(folder: &Path, target: &str) -> (PathBuf, PathBuf) {
    let program = folder.join(format!("gw-agent-{target}"));
    let description = program.with_extension(DESCRIPTION);
    (program, description)
}

impl AgentReleases {
    /// Reads the programs. Fails if a folder was configured and cannot be read. A program that
    /// cannot be used is logged and not offered, so that it does not keep the gateway from
    /// starting.
    pub fn load(settings: &ReleaseSettings, data_dir: &Path) -> io::Result<Self> {
        let ReleaseSettings {
            served,
            programs,
            percent,
        } = settings;
        let in_data_dir = data_dir.join(IN_DATA_DIR);
        let folder = match programs {
            Some(folder) => folder.as_path(),
            None if in_data_dir.is_dir() => &in_data_dir,
            None => Path::new(PACKAGED),
        };
        let entries = match fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(_) if programs.is_none() => {
                return Ok(Self {
                    served: *served,
                    programs: Vec::new(),
                    percent: *percent,
                });
            }
            Err(error) => {
                let message = format!(
                    "agent_programs: cannot read the folder {}: {error}",
                    folder.display()
                );
                return Err(io::Error::new(error.kind(), message));
            }
        };
        let mut loaded = Vec::new();
        let is_description =
            |path: &PathBuf| path.extension().is_some_and(|ending| ending == DESCRIPTION);
        for path in entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(is_description)
            .take(TARGETS_MAX)
        {
            match OfferedProgram::read(folder, &path) {
                Ok(program) => {
                    let SignedProgram {
                        version,
                        target,
                        size,
                        ..
                    } = &program.description;
                    tracing::info!(
                        %version,
                        platform = target,
                        size,
                        folder = %folder.display(),
                        "agents are offered a program"
                    );
                    loaded.push(program);
                }
                Err(error) => {
                    tracing::error!(file = %path.display(), %error,
                        "a program for agents is not offered");
                }
            }
        }
        Ok(Self {
            served: *served,
            programs: loaded,
            percent: *percent,
        })
    }

    /// The offer to an agent that runs `version`, if there is one.
    pub fn offer(&self, agent: &AgentId, version: Version) -> Option<ToAgent> {
        if version.line < UPDATABLE || !self.has_newer(version) || !self.includes(agent) {
            return None;
        }
        Some(ToAgent::Programs {
            programs: self
                .programs
                .iter()
                .map(|program| program.description.clone())
                .collect(),
        })
    }

    /// Whether an agent that runs `version` waits until the percentage is raised.
    pub fn holds_back(&self, agent: &AgentId, version: Version) -> bool {
        self.has_newer(version) && !self.includes(agent)
    }

    /// Whether a program is offered in place of `version`: a newer one, or an older one that
    /// replaces it.
    fn has_newer(&self, version: Version) -> bool {
        self.programs
            .iter()
            .any(|program| program.description.supersedes(version))
    }

    /// Whether the agent is among those that are offered a program: the same ones at the same
    /// percentage, and more at a higher one.
    fn includes(&self, agent: &AgentId) -> bool {
        let hash = digest(&SHA256, agent.as_str().as_bytes());
        let point = hash
            .as_ref()
            .iter()
            .take(4)
            .fold(0_u32, |point, byte| point << 8 | u32::from(*byte));
        u64::from(point) * 100 < u64::from(self.percent) << 32
    }

    /// The programs that replace newer ones.
    pub fn roll_backs(&self) -> impl Iterator<Item = &SignedProgram> {
        let descriptions = self.programs.iter().map(|program| &program.description);
        descriptions.filter(|description| description.replaces.is_some())
    }

    /// The program with this SHA-256, in lower-case hexadecimal.
    pub fn program(&self, sha256: &str) -> Option<&Bytes> {
        self.programs
            .iter()
            .find(|program| program.description.sha256 == sha256)
            .map(|program| &program.content)
    }
}

impl OfferedProgram {
    /// Reads the program that the file `description` describes.
    fn read(folder: &Path, description: &Path) -> Result<Self, UnusableRelease> {
        let file = description;
        let description: SignedProgram = serde_json::from_slice(&fs::read(file)?)?;
        let (program, expected) = program_files(folder, &description.target);
        if expected != file || description.target.len() > TARGET_MAX {
            return Err(UnusableRelease::Target);
        }
        if description.version.line != Version::own().line {
            return Err(UnusableRelease::OtherLine(description.version));
        }
        if fs::metadata(&program)?.len() > SIZE_MAX {
            return Err(UnusableRelease::TooLarge);
        }
        let content = Bytes::from(fs::read(program)?);
        description.verify_content(&content)?;
        Ok(Self {
            description,
            content,
        })
    }
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::signature::Ed25519KeyPair;

    use super::*;

    fn put(folder: &Path, version: &str, target: &str) {
        let key = Ed25519KeyPair::generate().unwrap();
        let signed = SignedProgram::sign(version.parse().unwrap(), target, b"program", &key);
        let (program, description) = program_files(folder, target);
        fs::write(program, b"program").unwrap();
        fs::write(description, serde_json::to_vec(&signed).unwrap()).unwrap();
    }

    fn load(folder: &Path, percent: u8) -> AgentReleases {
        let settings = ReleaseSettings {
            programs: Some(folder.to_owned()),
            percent,
            ..ReleaseSettings::default()
        };
        AgentReleases::load(&settings, Path::new("/nonexistent")).unwrap()
    }

    #[test]
    fn programs_of_the_own_line_with_their_content_are_offered() {
        let folder = tempfile::tempdir().unwrap();
        let own = Version::own().to_string();
        put(folder.path(), &own, "x86_64");
        put(folder.path(), "0.0.1", "vax");
        put(folder.path(), &own, "changed");
        fs::write(program_files(folder.path(), "changed").0, b"Program").unwrap();
        put(folder.path(), &own, "moved");
        fs::rename(
            program_files(folder.path(), "moved").1,
            folder.path().join("gw-agent-other.json"),
        )
        .unwrap();
        let releases = load(folder.path(), 100);
        let targets: Vec<&str> = releases
            .programs
            .iter()
            .map(|it| it.description.target.as_str())
            .collect();
        assert_eq!(targets, ["x86_64"]);
    }

    #[test]
    fn only_older_agents_that_understand_the_offer_get_it() {
        let folder = tempfile::tempdir().unwrap();
        put(folder.path(), &Version::own().to_string(), "x86_64");
        let mut releases = load(folder.path(), 100);
        let agent = AgentId::random();
        assert!(
            releases.offer(&agent, Version::own()).is_none(),
            "it runs this version"
        );
        releases.programs[0].description.version = "0.3.0".parse().unwrap();
        assert!(releases.offer(&agent, "0.2.9".parse().unwrap()).is_some());
        assert!(
            releases.offer(&agent, "0.1.9".parse().unwrap()).is_none(),
            "it does not know the message"
        );
        releases.percent = 0;
        assert!(releases.offer(&agent, "0.2.9".parse().unwrap()).is_none());
        assert!(releases.holds_back(&agent, "0.2.9".parse().unwrap()));
    }

    #[test]
    fn a_percentage_selects_the_same_agents_and_more_as_it_grows() {
        let agents: Vec<AgentId> = (0..1000).map(|_| AgentId::random()).collect();
        let mut before: Vec<&AgentId> = Vec::new();
        for percent in [0, 1, 25, 50, 100] {
            let releases = AgentReleases {
                percent,
                ..AgentReleases::default()
            };
            let included: Vec<&AgentId> = agents
                .iter()
                .filter(|agent| releases.includes(agent))
                .collect();
            assert!(
                before.iter().all(|agent| included.contains(agent)),
                "{percent}"
            );
            let expected = usize::from(percent) * 10;
            assert!(
                included.len().abs_diff(expected) < 100,
                "{percent}: {}",
                included.len()
            );
            before = included;
        }
        assert_eq!(before.len(), 1000);
    }

    #[test]
    fn a_configured_folder_must_exist_and_a_default_one_need_not() {
        let settings = ReleaseSettings {
            programs: Some("/nonexistent".into()),
            ..ReleaseSettings::default()
        };
        let error = AgentReleases::load(&settings, Path::new("/"))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("agent_programs") && error.contains("/nonexistent"),
            "{error}"
        );
        assert!(
            AgentReleases::load(&ReleaseSettings::default(), Path::new("/nonexistent"))
                .unwrap()
                .programs
                .is_empty()
        );
    }
}
