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

/// The agent's program as one of the version with another patch: its text is of the same length.
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

/// Exit code and output of `gw-gateway agent-program`.
fn agent_program(folder: &Path, arguments: &[&str]) -> (i32, String) {
    let output = gw_gateway()
        .arg("agent-program")
        .args(arguments)
        .current_dir(folder)
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    (
        output.status.code().unwrap(),
        String::from_utf8(text).unwrap(),
    )
}

/// A folder with `release.key`, and the key.
fn folder_with_key() -> (tempfile::TempDir, Ed25519KeyPair) {
    let folder = tempfile::tempdir().unwrap();
    let (code, text) = agent_program(folder.path(), &["new-key", "release.key"]);
    assert_eq!(code, 0, "{text}");
    let document = fs::read(folder.path().join("release.key")).unwrap();
    (folder, Ed25519KeyPair::from_pkcs8(&document).unwrap())
}

/// Arguments of `command` for the program `file`.
fn arguments<'a>(command: &'a str, file: &'a str) -> [&'a str; 6] {
    [command, "--key", "release.key", "--out", "out", file]
}

fn described(folder: &Path) -> SignedProgram {
    let (program, description) = program_files(&folder.join("out"));
    let signed: SignedProgram = serde_json::from_slice(&fs::read(description).unwrap()).unwrap();
    assert_eq!(signed.verify_content(&fs::read(program).unwrap()), Ok(()));
    signed
}

#[test]
fn only_the_file_of_an_agent_is_signed_as_what_it_is() {
    let (folder, pair) = folder_with_key();
    let folder = folder.path();
    let write = |name: &str, content: &[u8]| fs::write(folder.join(name), content).unwrap();
    let refused = |file: &str, part: &str| {
        let (code, text) = agent_program(folder, &arguments("sign", file));
        assert!(code == 2 && text.contains(part), "{code}: {text}");
        assert!(!folder.join("out").exists());
    };
    write("script", b"#!/bin/sh\n");
    refused("script", "script: it is not a program (no ELF header)");
    write("true", &fs::read("/bin/true").unwrap());
    refused("true", "true: it is no gw-agent");
    let mut foreign = program();
    foreign[18..20].copy_from_slice(&40_u16.to_le_bytes());
    write("arm", &foreign);
    refused("arm", "for another machine");
    // Built with the key of another release.
    let other = ReleaseKey::of(&Ed25519KeyPair::generate().unwrap()).to_string();
    let mut with_key = program();
    let [marker] = positions(&with_key, MARKER)[..] else {
        panic!("one marker in the program")
    };
    let keys = marker + MARKER.len() + Version::own().to_string().len() + 1;
    with_key[keys..keys + other.len()].copy_from_slice(other.as_bytes());
    write("other", &with_key);
    refused(
        "other",
        &format!("accept programs by the release key {other}"),
    );
    write("gw-agent", &program());
    let (code, text) = agent_program(
        folder,
        &[
            &arguments("sign", "gw-agent")[..],
            &["--minimum", "999.0.0"],
        ]
        .concat(),
    );
    assert!(
        code == 2 && text.contains("--minimum: 999.0.0 is above"),
        "{text}"
    );

    let own = Version::own();
    let minimum = own.to_string();
    let (code, text) = agent_program(
        folder,
        &[&arguments("sign", "gw-agent")[..], &["--minimum", &minimum]].concat(),
    );
    assert_eq!(code, 0, "{text}");
    assert!(
        text.contains(&format!("Signed: gw-agent {own} for {TARGET}")),
        "{text}"
    );
    let signed = described(folder);
    assert_eq!((signed.version, signed.minimum), (own, Some(own)));
    assert_eq!(signed.verify(&ReleaseKey::of(&pair).into()), Ok(()));

    a_signed_program_is_replaced_on_demand_only(folder, &signed);
}

fn a_signed_program_is_replaced_on_demand_only(folder: &Path, signed: &SignedProgram) {
    let (code, text) = agent_program(folder, &arguments("sign", "gw-agent"));
    assert!(
        code == 2 && text.contains("--replace replaces it"),
        "{text}"
    );
    assert_eq!(described(folder), *signed);
    let (code, text) = agent_program(
        folder,
        &[&arguments("sign", "gw-agent")[..], &["--replace"]].concat(),
    );
    assert!(
        code == 0 && text.contains(&format!("in place of version {}", signed.version)),
        "{text}"
    );
    assert_eq!(described(folder).minimum, None);
}

fn wait_for_version(it: &Agent<'_>, version: Version) {
    eventually("the agent runs this version", || {
        let view = it.view();
        view.to_string()
            .contains(&format!("\"{version}\""))
            .then_some(())
    });
}

#[test]
fn agents_go_back_to_an_older_program_that_the_release_key_permits() {
    let (folder, key) = folder_with_key();
    let own = Version::own();
    let newer = later(9);
    fs::write(folder.path().join("old"), program()).unwrap();
    fs::write(folder.path().join("new"), program_of_version(newer)).unwrap();
    let run = |command, file| {
        let (code, text) = agent_program(folder.path(), &arguments(command, file));
        (code == 0, text)
    };
    let (is_done, text) = run("roll-back", "old");
    assert!(!is_done && text.contains("has no program for"), "{text}");
    assert!(run("sign", "new").0);
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
    let it = Agent {
        prepared: &prepared,
        gateway: &gateway,
    };
    let config = it.configure(&release.configuration(&backend.url));
    let mut agent = it.start(&config);
    wait_for_stored(&agent, &described(folder.path()));
    wait_for_version(&it, newer);
    // The trial is over with the end of the agent: the version is the lowest that may run.
    agent.signal("TERM");
    assert_eq!(agent.exit_code(), Some(0));
    drop(gateway);
    let state = prepared.path("agent/update.json");
    let mut record: Value = serde_json::from_slice(&fs::read(&state).unwrap()).unwrap();
    record["floor"] = json!(newer);
    fs::write(&state, record.to_string()).unwrap();

    let (is_done, text) = run("roll-back", "old");
    assert!(
        is_done && text.contains(&format!("in place of version {newer}")),
        "{text}"
    );
    let roll_back = described(folder.path());
    assert_eq!((roll_back.version, roll_back.replaces), (own, Some(newer)));
    let (is_done, text) = run("roll-back", "old");
    assert!(!is_done && text.contains("which is not newer"), "{text}");
    let gateway = offer();
    let it = Agent {
        prepared: &prepared,
        gateway: &gateway,
    };
    let agent = it.start(&config);
    wait_for_stored(&agent, &roll_back);
    wait_for_version(&it, own);
    let audit = administer(&prepared, &gateway, &["audit", "list"]);
    let audit = String::from_utf8(audit).unwrap();
    assert!(audit.contains("agent_program.roll_back"), "{audit}");
}
