//! Versions and release lines. A version is `MAJOR.MINOR.PATCH`, and its release line
//! `MAJOR.MINOR`: the tunnel protocol never changes within a line, so gateway and agent of one line
//! work together.

pub mod later_members;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Version of this build, as sent in `X-Gw-Version`.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The last release of the line before that of this build: its version, and the commit that it was
/// made of. A new release line changes this file only.
pub const PREVIOUS_RELEASE: &str = include_str!("version/previous-release.txt");

/// The release line before that of this build.
pub const PREVIOUS: ReleaseLine = line_of(PREVIOUS_RELEASE.as_bytes());

/// `MAJOR.MINOR`
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReleaseLine {
    pub major: u16,
    pub minor: u16,
}

/// `MAJOR.MINOR.PATCH`, each up to 65,535. Later versions compare as greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Version {
    pub line: ReleaseLine,
    pub patch: u16,
}

/// Error of a text that is not a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a version is MAJOR.MINOR.PATCH, for example {VERSION}")]
pub struct InvalidVersion;

/// The line of the version that `text` begins with.
const fn line_of(text: &[u8]) -> ReleaseLine {
    let (major, at) = number_at(text, 0);
    let (minor, _) = number_at(text, at + 1);
    ReleaseLine { major, minor }
}

/// The number at a position, and the position of the `.` after it.
const fn number_at(text: &[u8], mut at: usize) -> (u16, usize) {
    let mut number = 0;
    while text[at] != b'.' {
        assert!(
            text[at].is_ascii_digit(),
            "a version begins with two numbers"
        );
        number = number * 10 + (text[at] - b'0') as u16;
        at += 1;
    }
    (number, at)
}

impl Version {
    /// Version of this build.
    pub fn own() -> Self {
        // The version of the package has no other form, as a test checks.
        VERSION.parse().unwrap_or(Self {
            line: ReleaseLine { major: 0, minor: 0 },
            patch: 0,
        })
    }
}

impl FromStr for Version {
    type Err = InvalidVersion;

    fn from_str(text: &str) -> Result<Self, InvalidVersion> {
        let mut parts = text.split('.').map(|part| {
            let is_number = part.bytes().all(|byte| byte.is_ascii_digit())
                && (part == "0" || !part.starts_with('0'));
            part.parse::<u16>()
                .ok()
                .filter(|_| is_number)
                .ok_or(InvalidVersion)
        });
        let mut next = || parts.next().ok_or(InvalidVersion)?;
        let version = Self {
            line: ReleaseLine {
                major: next()?,
                minor: next()?,
            },
            patch: next()?,
        };
        if parts.next().is_none() {
            Ok(version)
        } else {
            Err(InvalidVersion)
        }
    }
}

impl TryFrom<String> for Version {
    type Error = InvalidVersion;

    fn try_from(text: String) -> Result<Self, InvalidVersion> {
        text.parse()
    }
}

impl From<Version> for String {
    fn from(version: Version) -> Self {
        version.to_string()
    }
}

impl fmt::Display for ReleaseLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.line, self.patch)
    }
}

/// Agents that a gateway serves, by their version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AgentVersions {
    /// Those of the gateway's own release line.
    #[default]
    Same,
    /// Also those of the release line before it, for the time of an upgrade.
    Previous,
}

/// Refusal of an agent because of its version.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the gateway runs version {VERSION} and serves agents of version {}; this agent runs \
         {agent}", .served.lines())]
pub struct VersionMismatch {
    /// As the agent has sent it; not necessarily a version.
    pub agent: String,
    pub served: AgentVersions,
}

impl AgentVersions {
    /// Checks the version that an agent has sent.
    pub fn check(self, agent: &str) -> Result<Version, VersionMismatch> {
        let own = Version::own().line;
        let is_served = |line| line == own || (self == Self::Previous && line == PREVIOUS);
        match agent.parse::<Version>() {
            Ok(version) if is_served(version.line) => Ok(version),
            _ => Err(VersionMismatch {
                agent: agent.chars().take(40).collect(),
                served: self,
            }),
        }
    }

    fn lines(self) -> String {
        let own = Version::own().line;
        match self {
            Self::Same => format!("{own}.x"),
            Self::Previous => format!("{own}.x and {PREVIOUS}.x"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_parse_and_compare() {
        assert_eq!(Version::own().to_string(), VERSION);
        let version = |text: &str| text.parse::<Version>();
        assert!(version("0.10.0").unwrap() > version("0.9.65535").unwrap());
        assert!(version("1.0.0").unwrap() > version("0.10.1").unwrap());
        for bad in [
            "",
            "1",
            "1.2",
            "1.2.3.4",
            "1.2.x",
            "01.2.3",
            "1.+2.3",
            "1.2.65536",
            "1.2.3 ",
            "1..3",
        ] {
            assert_eq!(version(bad), Err(InvalidVersion), "{bad}");
        }
    }

    #[test]
    fn the_previous_line_is_older() {
        assert!(PREVIOUS < Version::own().line);
        assert_eq!(line_of(b"12.345.6 x").to_string(), "12.345");
        let (version, commit) = PREVIOUS_RELEASE.trim_end().split_once(' ').unwrap();
        assert_eq!(version.parse::<Version>().unwrap().line, PREVIOUS);
        assert!(commit.len() == 40 && commit.bytes().all(|byte| byte.is_ascii_hexdigit()));
    }

    #[test]
    fn agents_of_the_line_are_served_and_of_the_previous_one_on_request() {
        let Version {
            line: ReleaseLine { major, minor },
            ..
        } = Version::own();
        let same = format!("{major}.{minor}.999");
        let next = format!("{major}.{}.0", minor + 1);
        let previous = format!("{PREVIOUS}.7");
        for (served, expected) in [
            (AgentVersions::Same, [true, false, false, false]),
            (AgentVersions::Previous, [true, true, false, false]),
        ] {
            let checked = [&same, &previous, &next, ""].map(|agent| served.check(agent).is_ok());
            assert_eq!(checked, expected, "{served:?}");
        }
        let refused = AgentVersions::Same.check("0.0.9").unwrap_err().to_string();
        for version in ["0.0.9", VERSION] {
            assert!(refused.contains(version), "{refused}");
        }
        let refused = AgentVersions::Same.check(&"x".repeat(100)).unwrap_err();
        assert_eq!(refused.agent.len(), 40);
    }
}
