//! Signed agent programs: what a gateway offers to its agents, and how an agent checks it. The
//! release key that signs is kept offline; an agent gets its public half from its build or its
//! configuration, never from a gateway.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::signature::{ED25519, Ed25519KeyPair, UnparsedPublicKey};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use crate::text::hexadecimal;
use crate::version::Version;
use crate::version::later_members::LaterMembers;

/// Path on an agent's connection below which the programs are, by their SHA-256.
pub const PATH: &str = "/program/";
/// Largest program, in bytes.
pub const SIZE_MAX: u64 = 64 << 20;
/// Time limit for the download of a program.
pub const DOWNLOAD_WITHIN: Duration = Duration::from_secs(600);
/// Longest name of a target, in bytes.
pub const TARGET_MAX: usize = 32;
/// Target of this build: the architecture. All programs are for Linux.
pub const TARGET: &str = std::env::consts::ARCH;

/// Description of an agent program, with its signature.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignedProgram {
    pub version: Version,
    /// Architecture, as in [`TARGET`].
    pub target: String,
    /// In bytes.
    pub size: u64,
    /// SHA-256 of the program, in lower-case hexadecimal.
    pub sha256: String,
    /// Lowest version of the signed programs that agents run from now on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minimum: Option<Version>,
    /// Highest version that this one replaces though it is older: a roll-back that the release key
    /// permits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaces: Option<Version>,
    /// Ed25519 signature (RFC 8032) of the members above, in base64.
    pub signature: String,
    /// Not signed, as far as this version knows. If a later version signs them, this one refuses
    /// the signature.
    #[serde(flatten)]
    pub later: LaterMembers,
}

/// Public half of a release key: an Ed25519 key of 32 bytes, written in base64.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct ReleaseKey([u8; 32]);

/// The release keys that an agent accepts: one, or two while one replaces the other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<ReleaseKey>")]
pub struct ReleaseKeys(Vec<ReleaseKey>);

/// Why a program is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidProgram {
    #[error("its signature is not by a release key that this agent accepts")]
    Signature,
    #[error("it has {found} bytes instead of {expected}")]
    Size { expected: u64, found: u64 },
    #[error("its SHA-256 differs from the signed one")]
    Hash,
    #[error("it is for {0}, and this agent needs {TARGET}")]
    Target(String),
    #[error("version {version} is older than the minimum {minimum} that it requires")]
    Minimum { version: Version, minimum: Version },
    #[error("version {version} is to replace {replaces}, which is not newer")]
    Replaces { version: Version, replaces: Version },
    #[error(
        "version {version} is older than {floor}, which this agent has run, or which the release \
         key requires"
    )]
    BelowFloor { version: Version, floor: Version },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a release key is 32 bytes in base64, as `gw-gateway agent-program new-key` prints it")]
pub struct InvalidReleaseKey;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("there must be one release key, or two different ones while one replaces the other")]
pub struct InvalidReleaseKeys;

impl SignedProgram {
    /// Describes and signs `program`, without a minimum version.
    pub fn sign(version: Version, target: &str, program: &[u8], key: &Ed25519KeyPair) -> Self {
        Self::describe(version, target, program).signed(key)
    }

    /// Describes `program`, without a signature, a minimum version and a version that it replaces.
    pub fn describe(version: Version, target: &str, program: &[u8]) -> Self {
        let size = program.len() as u64;
        let sha256 = hexadecimal(digest(&SHA256, program).as_ref());
        let target = target.to_owned();
        Self {
            version,
            target,
            size,
            sha256,
            minimum: None,
            replaces: None,
            signature: String::new(),
            later: LaterMembers::default(),
        }
    }

    /// Signs this description.
    pub fn signed(mut self, key: &Ed25519KeyPair) -> Self {
        self.signature = STANDARD.encode(key.sign(&self.message()));
        self
    }

    /// Checks that one of `keys` has signed this description of a program for this machine. The
    /// content remains to be checked.
    pub fn verify(&self, keys: &ReleaseKeys) -> Result<(), InvalidProgram> {
        // Texts with a NUL could move a part of the message from one member to another.
        if self.target.contains('\0') || self.sha256.contains('\0') {
            return Err(InvalidProgram::Signature);
        }
        let signature = STANDARD
            .decode(&self.signature)
            .map_err(|_| InvalidProgram::Signature)?;
        let message = self.message();
        let has_signed = |key: &ReleaseKey| {
            UnparsedPublicKey::new(&ED25519, key.0)
                .verify(&message, &signature)
                .is_ok()
        };
        if !keys.0.iter().any(has_signed) {
            return Err(InvalidProgram::Signature);
        }
        if self.target != TARGET {
            return Err(InvalidProgram::Target(
                self.target.chars().take(TARGET_MAX).collect(),
            ));
        }
        if self.size > SIZE_MAX {
            return Err(InvalidProgram::Size {
                expected: SIZE_MAX,
                found: self.size,
            });
        }
        let version = self.version;
        match (self.minimum, self.replaces) {
            (Some(minimum), _) if minimum > version => {
                Err(InvalidProgram::Minimum { version, minimum })
            }
            (_, Some(replaces)) if replaces <= version => {
                Err(InvalidProgram::Replaces { version, replaces })
            }
            _ => Ok(()),
        }
    }

    /// Whether an agent that runs `version` is to run this program: a newer one, or an older one
    /// that replaces it.
    pub fn supersedes(&self, version: Version) -> bool {
        self.version > version || self.rolls_back(version)
    }

    /// Whether this is an older program than `version` that replaces it.
    pub fn rolls_back(&self, version: Version) -> bool {
        self.version < version && self.replaces >= Some(version)
    }

    /// Checks that the program is not older than the lowest version that may run, or that the
    /// release key permits it to replace that version.
    pub fn verify_floor(&self, floor: Option<Version>) -> Result<(), InvalidProgram> {
        match floor {
            Some(floor) if floor > self.version && !self.rolls_back(floor) => {
                Err(InvalidProgram::BelowFloor {
                    version: self.version,
                    floor,
                })
            }
            _ => Ok(()),
        }
    }

    /// Checks that `program` is the one described.
    pub fn verify_content(&self, program: &[u8]) -> Result<(), InvalidProgram> {
        let found = program.len() as u64;
        if found != self.size {
            return Err(InvalidProgram::Size {
                expected: self.size,
                found,
            });
        }
        if hexadecimal(digest(&SHA256, program).as_ref()) == self.sha256 {
            Ok(())
        } else {
            Err(InvalidProgram::Hash)
        }
    }

    /// What is signed: bound to its purpose, and without a second reading if no member contains a
    /// NUL.
    fn message(&self) -> Vec<u8> {
        let Self {
            version,
            target,
            size,
            sha256,
            minimum,
            replaces,
            signature: _,
            later: _,
        } = self;
        // Programs without a minimum are signed as before there was one.
        let minimum = minimum.map_or_else(String::new, |version| format!("\0{version}"));
        let replaces = replaces.map_or_else(String::new, |version| format!("\0replaces {version}"));
        format!("gw-agent program\0{version}\0{target}\0{size}\0{sha256}{minimum}{replaces}")
            .into_bytes()
    }
}

impl ReleaseKey {
    /// The public half of `pair`.
    pub fn of(pair: &Ed25519KeyPair) -> Self {
        use aws_lc_rs::signature::KeyPair;
        let mut bytes = [0; 32];
        // An Ed25519 public key has 32 bytes (RFC 8032 §5.1.5).
        bytes.copy_from_slice(pair.public_key().as_ref());
        Self(bytes)
    }
}

impl FromStr for ReleaseKey {
    type Err = InvalidReleaseKey;

    fn from_str(text: &str) -> Result<Self, InvalidReleaseKey> {
        let bytes = STANDARD
            .decode(text.trim())
            .map_err(|_| InvalidReleaseKey)?;
        bytes.try_into().map(Self).map_err(|_| InvalidReleaseKey)
    }
}

impl TryFrom<String> for ReleaseKey {
    type Error = InvalidReleaseKey;

    fn try_from(text: String) -> Result<Self, InvalidReleaseKey> {
        text.parse()
    }
}

impl From<ReleaseKey> for String {
    fn from(key: ReleaseKey) -> Self {
        key.to_string()
    }
}

impl ReleaseKeys {
    pub fn iter(&self) -> impl Iterator<Item = &ReleaseKey> {
        self.0.iter()
    }
}

impl From<ReleaseKey> for ReleaseKeys {
    fn from(key: ReleaseKey) -> Self {
        Self(vec![key])
    }
}

impl TryFrom<Vec<ReleaseKey>> for ReleaseKeys {
    type Error = InvalidReleaseKeys;

    fn try_from(keys: Vec<ReleaseKey>) -> Result<Self, InvalidReleaseKeys> {
        match &keys[..] {
            [_] => Ok(Self(keys)),
            [one, other] if one != other => Ok(Self(keys)),
            _ => Err(InvalidReleaseKeys),
        }
    }
}

impl fmt::Display for ReleaseKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&STANDARD.encode(self.0))
    }
}

/// Progress of an agent's update, as the agent reports it to the gateway.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateReport {
    pub state: UpdateState,
    /// Release keys that the agent accepts; `None` if it does not update itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub release_keys: Option<ReleaseKeys>,
    /// Version that the agent updates to, or failed to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<Version>,
    /// Why the update failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UpdateState {
    /// The agent does not update itself.
    Off,
    /// The agent updates itself when the gateway offers a newer program.
    Ready,
    /// It downloads the program, or starts it.
    Updating,
    Failed,
}

impl UpdateReport {
    /// Longest error, in bytes.
    pub const ERROR_MAX: usize = 300;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_program_or_description_is_refused() {
        let pair = Ed25519KeyPair::generate().unwrap();
        let other = Ed25519KeyPair::generate().unwrap();
        let key = ReleaseKeys::from(ReleaseKey::of(&pair));
        let signed = SignedProgram::sign("1.2.3".parse().unwrap(), TARGET, b"program", &pair);
        assert_eq!(signed.verify(&key), Ok(()));
        assert_eq!(signed.verify_content(b"program"), Ok(()));
        let by_other = signed.verify(&ReleaseKey::of(&other).into());
        assert_eq!(by_other, Err(InvalidProgram::Signature));
        assert_eq!(signed.verify_content(b"Program"), Err(InvalidProgram::Hash));
        assert!(matches!(
            signed.verify_content(b"program "),
            Err(InvalidProgram::Size { .. })
        ));
        let changes: [fn(&mut SignedProgram); 7] = [
            |it| it.replaces = Some("1.2.4".parse().unwrap()),
            |it| it.version = "1.2.4".parse().unwrap(),
            |it| it.target.push('x'),
            |it| it.size += 1,
            |it| it.sha256 = it.sha256.replace(|_: char| true, "0"),
            |it| it.minimum = Some("1.2.0".parse().unwrap()),
            |it| it.signature = "AAAA".to_owned(),
        ];
        for change in changes {
            let mut changed = signed.clone();
            change(&mut changed);
            let verified = changed.verify(&key);
            assert_eq!(verified, Err(InvalidProgram::Signature), "{changed:?}");
        }
        let foreign = SignedProgram::sign("1.2.3".parse().unwrap(), "vax", b"program", &pair);
        let expected = InvalidProgram::Target("vax".into());
        assert_eq!(foreign.verify(&key), Err(expected));
    }

    #[test]
    fn a_minimum_is_signed_and_not_above_the_version() {
        let pair = Ed25519KeyPair::generate().unwrap();
        let [lower, version, higher]: [Version; 3] =
            ["1.2.2", "1.2.3", "1.2.4"].map(|text| text.parse().unwrap());
        let sign = |minimum| {
            let described = SignedProgram::describe(version, TARGET, b"program");
            SignedProgram {
                minimum,
                ..described
            }
            .signed(&pair)
        };
        let verify = |signed: &SignedProgram| signed.verify(&ReleaseKey::of(&pair).into());
        for minimum in [lower, version] {
            assert_eq!(verify(&sign(Some(minimum))), Ok(()));
        }
        let minimum = higher;
        let expected = InvalidProgram::Minimum { version, minimum };
        assert_eq!(verify(&sign(Some(minimum))), Err(expected));
        let unsigned = SignedProgram {
            minimum: None,
            ..sign(Some(version))
        };
        assert_eq!(verify(&unsigned), Err(InvalidProgram::Signature));
        // The same message, with the minimum as a part of the hash.
        let moved = SignedProgram {
            sha256: format!("{}\0{version}", unsigned.sha256),
            ..unsigned
        };
        assert_eq!(verify(&moved), Err(InvalidProgram::Signature));
    }

    #[test]
    fn a_program_below_the_floor_is_refused() {
        let [lower, version, floor]: [Version; 3] =
            ["1.2.2", "1.2.3", "1.2.4"].map(|text| text.parse().unwrap());
        let pair = Ed25519KeyPair::generate().unwrap();
        let signed = SignedProgram::sign(version, TARGET, b"program", &pair);
        for floor in [None, Some(lower), Some(version)] {
            assert_eq!(signed.verify_floor(floor), Ok(()));
        }
        let expected = InvalidProgram::BelowFloor { version, floor };
        assert_eq!(signed.verify_floor(Some(floor)), Err(expected));
    }

    #[test]
    fn an_older_program_replaces_what_the_release_key_names() {
        let pair = Ed25519KeyPair::generate().unwrap();
        let [version, between, replaced, higher]: [Version; 4] =
            ["1.2.3", "1.2.4", "1.2.5", "1.2.6"].map(|text| text.parse().unwrap());
        let sign = |replaces| {
            let described = SignedProgram::describe(version, TARGET, b"program");
            SignedProgram {
                replaces,
                ..described
            }
            .signed(&pair)
        };
        let keys = ReleaseKey::of(&pair).into();
        let roll_back = sign(Some(replaced));
        assert_eq!(roll_back.verify(&keys), Ok(()));
        let superseded = [version, between, replaced, higher].map(|it| roll_back.supersedes(it));
        assert_eq!(superseded, [false, true, true, false]);
        assert_eq!(roll_back.verify_floor(Some(replaced)), Ok(()));
        assert!(roll_back.verify_floor(Some(higher)).is_err());
        assert!(!sign(None).supersedes(between) && sign(None).verify_floor(Some(between)).is_err());
        let replaces = version;
        let expected = InvalidProgram::Replaces { version, replaces };
        assert_eq!(sign(Some(version)).verify(&keys), Err(expected));
        // A minimum is not taken for a version that is replaced.
        let other = SignedProgram {
            minimum: None,
            replaces: Some(version),
            ..SignedProgram {
                minimum: Some(version),
                ..SignedProgram::describe(version, TARGET, b"program")
            }
            .signed(&pair)
        };
        assert_eq!(other.verify(&keys), Err(InvalidProgram::Signature));
    }

    #[test]
    fn one_key_or_two_different_ones_are_accepted() {
        let pairs = [(); 3].map(|()| Ed25519KeyPair::generate().unwrap());
        let keys = pairs.each_ref().map(ReleaseKey::of);
        let accepted = ReleaseKeys::try_from(keys[..2].to_vec()).unwrap();
        let verified = pairs.each_ref().map(|pair| {
            let signed = SignedProgram::sign(Version::own(), TARGET, b"program", pair);
            signed.verify(&accepted)
        });
        assert_eq!(verified, [Ok(()), Ok(()), Err(InvalidProgram::Signature)]);
        for wrong in [vec![], vec![keys[0]; 2], keys.to_vec()] {
            let keys = ReleaseKeys::try_from(wrong.clone());
            assert_eq!(keys, Err(InvalidReleaseKeys));
            let json = serde_json::to_string(&wrong).unwrap();
            assert!(serde_json::from_str::<ReleaseKeys>(&json).is_err());
        }
        let json = serde_json::to_string(&accepted).unwrap();
        let read: ReleaseKeys = serde_json::from_str(&json).unwrap();
        assert_eq!(read, accepted);
    }

    #[test]
    fn keys_and_descriptions_parse_back() {
        let key = ReleaseKey::of(&Ed25519KeyPair::generate().unwrap());
        assert_eq!(key.to_string().parse(), Ok(key));
        for bad in ["", "AAAA", "not base64"] {
            assert_eq!(bad.parse::<ReleaseKey>(), Err(InvalidReleaseKey));
        }
        let pair = Ed25519KeyPair::generate().unwrap();
        let signed = SignedProgram::sign(Version::own(), TARGET, b"program", &pair);
        let json = serde_json::to_string(&signed).unwrap();
        let read: SignedProgram = serde_json::from_str(&json).unwrap();
        assert_eq!(read, signed);
    }
}
