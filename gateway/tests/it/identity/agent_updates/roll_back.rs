//! Signed programs as administrators make them, and their way back to an older one.

use super::*;
use crate::support::processes::process::gw_gateway;

/// Beginning of the marker in a program.
const MARKER: &[u8] = b"gw-agent-program \xb3\x1e\xf0\x07\x9c\x5a\xe4\x82";

/// Positions of `part` in `content`.
fn positions(content: &[u8], part: &[u8]) -> Vec<usize> {
    let windows = content.windows(part.len()).enumerate();
    windows
        .filter(|(_, window)| *window == part)
        .map(|(at, _)| at)
        .collect()
}

/// The agent's program with the text of another version, which has the same length.
fn program_of_version(version: Version) -> Vec<u8> {
    let mut content = program();
    let own = Version::own().to_string();
    let version = version.to_string();
    assert_eq!(own.len(), version.len());
    for at in positions(&content, own.as_bytes()) {
        content[at..at + own.len()].copy_from_slice(version.as_bytes());
    }
    content
}

/// Runs `gw-gateway agent-program`. It must exit with `code` and print `part`.
#[track_caller]
fn agent_program(folder: &Path, arguments: &[&str], code: i32, part: &str) {
    let output = gw_gateway()
        .arg("agent-program")
        .args(arguments)
        .current_dir(folder)
        .output()
        .unwrap();
    let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(text.contains(part), "{text}");
}

/// A folder with `release.key`, and the key.
fn folder_with_key() -> (tempfile::TempDir, Ed25519KeyPair) {
    let folder = tempfile::tempdir().unwrap();
    agent_program(folder.path(), &["new-key", "release.key"], 0, "");
    let document = fs::read(folder.path().join("release.key")).unwrap();
    (folder, Ed25519KeyPair::from_pkcs8(&document).unwrap())
}

/// Arguments of `command` for the program `file`, with further options.
fn arguments<'a>(command: &'a str, file: &'a str, options: &[&'a str]) -> Vec<&'a str> {
    [
        &[command, "--key", "release.key", "--out", "out", file],
        options,
    ]
    .concat()
}

/// The signed program in the folder `out`, which fits its description.
fn described(folder: &Path) -> SignedProgram {
    let (program, description) = program_files(&folder.join("out"));
    let signed: SignedProgram = serde_json::from_slice(&fs::read(description).unwrap()).unwrap();
    assert_eq!(signed.verify_content(&fs::read(program).unwrap()), Ok(()));
    signed
}

#[test]
fn only_the_file_of_an_agent_is_signed_as_what_it_is() {
    let (folder, _) = folder_with_key();
    let folder = folder.path();
    let mut foreign = program();
    foreign[18..20].copy_from_slice(&40_u16.to_le_bytes());
    // A program that was built with the key of another release.
    let other = ReleaseKey::of(&Ed25519KeyPair::generate().unwrap()).to_string();
    let mut with_key = program();
    let [marker] = positions(&with_key, MARKER)[..] else {
        panic!("one marker in the program")
    };
    let keys = marker + MARKER.len() + Version::own().to_string().len() + 1;
    with_key[keys..keys + other.len()].copy_from_slice(other.as_bytes());
    let other_key = format!("accept programs by the release key {other}");
    let is_no_program = "script: it is not a program (no ELF header)";
    let is_no_agent = fs::read("/bin/true").unwrap();
    for (name, content, part) in [
        ("script", b"#!/bin/sh\n".to_vec(), is_no_program),
        ("true", is_no_agent, "true: it is no gw-agent"),
        ("arm", foreign, "for another machine"),
        ("other", with_key, &other_key),
    ] {
        fs::write(folder.join(name), content).unwrap();
        agent_program(folder, &arguments("sign", name, &[]), 2, part);
        assert!(!folder.join("out").exists(), "{name}");
    }
}

#[test]
fn a_program_is_signed_with_a_minimum_and_replaced_on_demand_only() {
    let (folder, pair) = folder_with_key();
    let folder = folder.path();
    fs::write(folder.join("gw-agent"), program()).unwrap();
    let own = Version::own();
    let sign = |options: &[&str], code: i32, part: &str| {
        agent_program(folder, &arguments("sign", "gw-agent", options), code, part);
    };
    sign(&["--minimum", "999.0.0"], 2, "--minimum: 999.0.0 is above");
    let is_signed = format!("Signed: gw-agent {own} for {TARGET}");
    sign(&["--minimum", &own.to_string()], 0, &is_signed);
    let signed = described(folder);
    assert_eq!((signed.version, signed.minimum), (own, Some(own)));
    assert_eq!(signed.verify(&ReleaseKey::of(&pair).into()), Ok(()));

    sign(&[], 2, "--replace replaces it");
    assert_eq!(described(folder), signed);
    sign(&["--replace"], 0, &format!("in place of version {own}"));
    assert_eq!(described(folder).minimum, None);
}

fn wait_for_version(it: &Agent<'_>, version: Version) {
    let version = format!("\"{version}\"");
    eventually("the agent runs this version", || {
        it.view().to_string().contains(&version).then_some(())
    });
}

#[test]
fn agents_go_back_to_an_older_program_that_the_release_key_permits() {
    let (folder, key) = folder_with_key();
    let own = Version::own();
    let newer = later(9);
    fs::write(folder.path().join("old"), program()).unwrap();
    fs::write(folder.path().join("new"), program_of_version(newer)).unwrap();
    let run = |command: &str, file: &str, code: i32, part: &str| {
        agent_program(folder.path(), &arguments(command, file, &[]), code, part);
    };
    run("roll-back", "old", 2, "has no program for");
    run("sign", "new", 0, "");
    assert_eq!(described(folder.path()).version, newer);

    let prepared = Prepared::new();
    let backend = HeldBackend::start();
    let release = Release {
        prepared: &prepared,
        key,
    };
    let offer = || {
        let out = folder.path().join("out");
        let (program, _) = program_files(&out);
        release.put(&described(folder.path()), &fs::read(program).unwrap());
        prepared.serve_with(&prepared.config())
    };
    let gateway = offer();
    let it = Agent::of(&prepared, &gateway);
    let config = it.configure(&release.configuration(&backend.url));
    let mut agent = it.start(&config);
    wait_for_stored(&agent, &described(folder.path()));
    wait_for_version(&it, newer);
    // The trial is over with the end of the agent: the version is the lowest that may run.
    agent.stop();
    drop(gateway);
    let mut record = update_record(&prepared);
    record["floor"] = json!(newer);
    fs::write(prepared.path("agent/update.json"), record.to_string()).unwrap();

    let is_done = format!("in place of version {newer}");
    run("roll-back", "old", 0, &is_done);
    let roll_back = described(folder.path());
    assert_eq!((roll_back.version, roll_back.replaces), (own, Some(newer)));
    run("roll-back", "old", 2, "which is not newer");
    let gateway = offer();
    let it = Agent::of(&prepared, &gateway);
    let agent = it.start(&config);
    wait_for_stored(&agent, &roll_back);
    wait_for_version(&it, own);
    let audit = administer(&prepared, &gateway, &["audit", "list"]);
    let audit = String::from_utf8(audit).unwrap();
    assert!(audit.contains("agent_program.roll_back"), "{audit}");
}
