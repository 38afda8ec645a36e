//! Signed statements about agent programs.

use gw_shared::identity::program::{ReleaseKey, ReleaseKeys, SIZE_MAX, SignedProgram, TARGET};
use gw_shared::version::Version;

use super::key_pair;

/// Release keys of the agent. Both sign.
const KEYS: [u8; 2] = [31, 32];

/// Members of statements that [`agent_programs`] signs: version, minimum and replaced version, with
/// a name.
const STATEMENTS: [(&str, &str, Option<&str>, Option<&str>); 3] = [
    ("plain", "1.2.3", None, None),
    ("minimum", "1.2.3", Some("1.2.2"), None),
    ("roll-back", "1.2.3", Some("1.2.0"), Some("1.2.5")),
];

/// A statement (JSON), as a gateway offers it to an agent. Only what a release key has signed is
/// accepted, and it has one reading. With a signature of the target, a statement is accepted
/// exactly if its versions, size and target permit that.
pub fn agent_program(data: &[u8]) {
    let Ok(statement) = serde_json::from_slice::<SignedProgram>(data) else {
        return;
    };
    let written = serde_json::to_vec(&statement).expect("a read statement can be written");
    let again: SignedProgram = serde_json::from_slice(&written).expect("it can be read back");
    assert_eq!(signed_members(&again), signed_members(&statement));

    let keys = release_keys();
    if statement.verify(&keys).is_ok() {
        let known = agent_programs();
        assert!(
            known
                .iter()
                .any(|(_, known)| signed_members(known) == signed_members(&statement)),
            "accepted, and never signed: {statement:?}"
        );
    }
    signed_by_the_target(&statement.signed(&key_pair(KEYS[1])), &keys);
}

fn signed_by_the_target(statement: &SignedProgram, keys: &ReleaseKeys) {
    let SignedProgram {
        version,
        minimum,
        replaces,
        ..
    } = *statement;
    let is_permitted = statement.target == TARGET
        && statement.size <= SIZE_MAX
        && !statement.sha256.contains('\0')
        && minimum.is_none_or(|minimum| minimum <= version)
        && replaces.is_none_or(|replaces| replaces > version);
    assert_eq!(statement.verify(keys).is_ok(), is_permitted);
    if !is_permitted {
        return;
    }
    for floor in [Some(version), minimum, replaces].into_iter().flatten() {
        let may_run = floor <= version || replaces >= Some(floor);
        assert_eq!(statement.verify_floor(Some(floor)).is_ok(), may_run);
        assert_eq!(
            statement.supersedes(floor),
            may_run && floor != version,
            "an agent of the version {floor}"
        );
    }
}

/// The members that a signature covers, and the signature.
fn signed_members(statement: &SignedProgram) -> SignedProgram {
    SignedProgram {
        later: Default::default(),
        ..statement.clone()
    }
}

fn release_keys() -> ReleaseKeys {
    let keys = KEYS.map(|seed| ReleaseKey::of(&key_pair(seed)));
    ReleaseKeys::try_from(keys.to_vec()).expect("two different keys")
}

/// Signed statements with their names in the corpus. A mutation of another one would fail at the
/// signature.
pub fn agent_programs() -> Vec<(&'static str, SignedProgram)> {
    let version = |text: &str| text.parse::<Version>().expect("a version");
    let sign = |(name, of, minimum, replaces): (_, &str, Option<&str>, Option<&str>)| {
        let described = SignedProgram::describe(version(of), TARGET, b"program");
        let statement = SignedProgram {
            minimum: minimum.map(version),
            replaces: replaces.map(version),
            ..described
        };
        (name, statement.signed(&key_pair(KEYS[0])))
    };
    STATEMENTS.into_iter().map(sign).collect()
}
