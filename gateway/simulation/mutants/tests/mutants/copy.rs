//! A copy of the sources with all mutants in it, each off until [`VARIABLE`] names it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::edits::Edited;
use super::{Failure, in_simulation};

/// Environment variable that turns a mutant on. Its name does not begin with `GW_`: the programs
/// complain of variables of theirs that they do not know.
pub(crate) const VARIABLE: &str = "MUTANT_IN_USE";

/// What the simulation is built from beside its crates, from the root of the repository.
const SOURCES: [&str; 3] = ["Cargo.toml", "rust-toolchain.toml", "docs/errors.md"];

/// The file of the copy in which the switch is, and the switch.
const SWITCH: (&str, &str) = (
    "shared/src/lib.rs",
    "
extern crate self as gw_shared;

/// Whether this mutant is on.
pub fn mutant(name: &str) -> bool {
    static ON: std::sync::LazyLock<Option<String>> =
        std::sync::LazyLock::new(|| std::env::var(\"MUTANT_IN_USE\").ok());
    ON.as_deref() == Some(name)
}
",
);

/// The program of the copy.
const PROGRAM: &str = "gw-simulation-mutants";

/// A manifest of the copy, and the lines that are added to it. They name the program differently
/// from the real one.
const MANIFEST: (&str, &str) = (
    "gateway/simulation/Cargo.toml",
    "
[[bin]]
name = \"gw-simulation-mutants\"
path = \"src/main.rs\"
",
);

/// Copies and builds the simulation. Returns the program. Its dependencies are those of `cargo
/// simulate`, in the same folder.
pub(crate) fn build(root: &Path) -> Result<PathBuf, Failure> {
    let target = target(root)?;
    let copy = target.join("mutants");
    let sources = crates(root)?.into_iter().chain(SOURCES.map(PathBuf::from));
    copy_sources(root, &copy, sources, &in_simulation(root)?)?;
    let built = Command::new(env!("CARGO"))
        .args(["build", "--locked", "--bin", PROGRAM, "--target-dir"])
        .arg(&target)
        .arg("--manifest-path")
        .arg(copy.join(MANIFEST.0))
        .status()?;
    if !built.success() {
        return Err("the copy with the mutants cannot be built".into());
    }
    Ok(target.join("debug").join(PROGRAM))
}

/// Copies all files of the repository, with these edits. Returns the folder.
pub(crate) fn whole(root: &Path, edited: &Edited) -> Result<PathBuf, Failure> {
    let copy = target(root)?.join("mutants-of-tests");
    let files = Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(root)
        .output()?;
    let files = String::from_utf8(files.stdout)?;
    let files = files.split_terminator('\0').map(PathBuf::from);
    copy_sources(root, &copy, files, edited)?;
    Ok(copy)
}

fn target(root: &Path) -> io::Result<PathBuf> {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => std::path::absolute(folder),
        None => Ok(root.join("target")),
    }
}

fn copy_sources(
    root: &Path,
    copy: &Path,
    sources: impl Iterator<Item = PathBuf>,
    edited: &Edited,
) -> io::Result<()> {
    let content = |file: &Path| {
        let name = file.to_str().unwrap_or_default();
        let mut content = match edited.get(name) {
            Some(text) => text.clone().into_bytes(),
            None => fs::read(root.join(file))?,
        };
        for (additional, text) in [SWITCH, MANIFEST] {
            if name == additional {
                content.extend_from_slice(text.as_bytes());
            }
        }
        Ok(content)
    };
    for source in sources {
        copy_tree(root, copy, &source, &content)?;
    }
    Ok(())
}

/// Folders of the crates of the repository that the simulation is built from, and of its workspace.
fn crates(root: &Path) -> Result<Vec<PathBuf>, Failure> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--locked", "--format-version", "1"])
        .arg("--manifest-path")
        .arg(root.join(MANIFEST.0))
        .output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into());
    }
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let root = root.canonicalize()?;
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let manifests = packages
        .filter(|package| package["source"].is_null())
        .filter_map(|package| package["manifest_path"].as_str());
    let mut folders = Vec::new();
    for manifest in manifests {
        let manifest = Path::new(manifest).strip_prefix(&root)?;
        folders.extend(manifest.parent().map(Path::to_owned));
    }
    Ok(folders)
}

/// Copies a file or a folder, without folders of build results. Files that are not in `root` any
/// more stay.
fn copy_tree(
    root: &Path,
    copy: &Path,
    source: &Path,
    content: &dyn Fn(&Path) -> io::Result<Vec<u8>>,
) -> io::Result<()> {
    if !root.join(source).is_dir() {
        return write_if_changed(&copy.join(source), &content(source)?);
    }
    fs::create_dir_all(copy.join(source))?;
    for entry in fs::read_dir(root.join(source))? {
        let name = entry?.file_name();
        if name != "target" {
            copy_tree(root, copy, &source.join(name), content)?;
        }
    }
    Ok(())
}

/// Leaves the time of a file that has this content, by which cargo knows that it need not be
/// compiled.
fn write_if_changed(path: &Path, content: &[u8]) -> io::Result<()> {
    if fs::read(path).is_ok_and(|known| known == content) {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(path, content)
}
