//! CONTRIBUTING.md lists every program of the repository that can be started as it is.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::sources::markdown::{code, rows};
use crate::{assert_same, read, repository};

/// Folders that git ignores, and the vendored crate.
const LEFT_OUT: [&str; 6] = [
    ".ci/cache",
    ".git",
    "gateway/fuzz/artifacts",
    "node_modules",
    "shared/vendor/http",
    "target",
];

/// Paths of the files below `folder` that can be executed.
fn executables(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let metadata = fs::symlink_metadata(&path).unwrap();
        if metadata.is_dir() && !LEFT_OUT.iter().any(|name| path.ends_with(name)) {
            executables(&path, found);
        } else if metadata.is_file() && metadata.permissions().mode() & 0o111 != 0 {
            let path = path.strip_prefix(repository()).unwrap();
            found.insert(path.to_str().unwrap().to_owned());
        }
    }
}

#[test]
fn contributing_lists_every_script_and_no_other() {
    let mut scripts = BTreeSet::new();
    executables(&repository(), &mut scripts);
    assert!(scripts.contains(".ci/run"), "{scripts:?}");
    let rows = rows(&read("CONTRIBUTING.md"), "script");
    let listed = rows.iter().flat_map(|cells| code(&cells[0]));
    assert_same(
        "CONTRIBUTING.md",
        listed.map(|path| path.trim_start_matches("./").to_owned()),
        &scripts,
    );
}

/// The texts of the files of the forge, with their paths.
fn workflows(folder: &Path) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(workflows(&path));
        } else {
            found.push((
                path.display().to_string(),
                fs::read_to_string(path).unwrap(),
            ));
        }
    }
    found
}

#[test]
fn the_forge_runs_programs_that_exist() {
    let mut called = BTreeSet::new();
    for (file, text) in workflows(&repository().join(".github")) {
        let runs = text
            .lines()
            .filter_map(|line| line.split_once("run: ")?.1.split(' ').next());
        for program in runs.filter(|program| program.contains('/')) {
            let is_built = program.starts_with("target/");
            let exists = repository().join(program).exists();
            assert!(is_built || exists, "{file}: no such file: {program}");
            called.insert(program.to_owned());
        }
    }
    for script in [
        "./test",
        ".ci/run",
        ".ci/deny",
        ".ci/vendored",
        ".ci/fuzz",
        ".ci/simulation",
    ] {
        assert!(called.contains(script), "no workflow runs {script}");
    }
}

/// A tag can be moved to another commit or image.
#[test]
fn the_forge_pins_what_it_runs() {
    let is_digest = |text: &str, length| {
        text.len() == length
            && text
                .bytes()
                .all(|it| matches!(it, b'0'..=b'9' | b'a'..=b'f'))
    };
    let mut pinned = 0;
    for (file, text) in workflows(&repository().join(".github")) {
        for line in text.lines() {
            let (key, value) = line
                .trim_start_matches(['-', ' '])
                .split_once(": ")
                .unwrap_or_default();
            let is_pinned = match key {
                "uses" if value.starts_with("./") => continue,
                // The comment has the version.
                "uses" => value.split_once('@').is_some_and(|(_, commit)| {
                    commit
                        .split_once(" # v")
                        .is_some_and(|(commit, _)| is_digest(commit, 40))
                }),
                "image" | "container" => value
                    .split_once("@sha256:")
                    .is_some_and(|(_, digest)| is_digest(digest, 64)),
                _ => continue,
            };
            assert!(is_pinned, "{file}: not pinned: {line}");
            pinned += 1;
        }
        let pipes = |line: &&str| line.contains("curl ") && line.contains("| sh");
        assert_eq!(text.lines().find(pipes), None, "{file}");
    }
    assert!(pinned > 0);
}

/// An update of these would undo a patch, or a choice that Cargo.toml explains.
#[test]
fn updates_leave_patched_and_pinned_crates_alone() {
    let manifest: toml::Table = read("Cargo.toml").parse().unwrap();
    let patched = manifest["patch"]["crates-io"].as_table().unwrap().keys();
    let dependencies = manifest["workspace"]["dependencies"].as_table().unwrap();
    let pinned = dependencies.iter().filter(|(_, dependency)| {
        let version = dependency.get("version").unwrap_or(dependency).as_str();
        version.is_some_and(|version| version.starts_with('='))
    });
    let updates = read(".github/dependabot.yml");
    for name in patched.chain(pinned.map(|(name, _)| name)) {
        assert!(
            updates
                .lines()
                .any(|line| line.trim() == format!("- dependency-name: {name}")),
            ".github/dependabot.yml does not ignore {name}"
        );
    }
}
