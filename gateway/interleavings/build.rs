//! Writes copies of the files to explore, with the checker's types in place of those of the
//! standard library and of other crates: one as the product has it, and one for each fault in
//! `mutants.rs`.

mod mutants;

use std::error::Error;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs};

use mutants::{MUTANTS, Mutant};

/// Modules to explore, and their files from the folder of this crate. Each has scenarios in
/// `tests/interleavings/scenarios`.
const SOURCES: [(&str, &str); 2] = [
    ("mailbox", "../base/src/mailbox.rs"),
    ("pipe", "../data-plane/src/pipe.rs"),
];

/// Paths in the copies that stand for others.
const PATHS: [(&str, &str); 5] = [
    ("std::sync::atomic::", "loom::sync::atomic::"),
    ("atomic_waker::", "crate::model::waker::"),
    ("crossbeam_channel", "crate::model::queue"),
    ("gw_shared::runtime", "crate::model::runtime"),
    ("gw_base::mailbox", "super::mailbox"),
];

/// Start of the unit tests, which the copies lack.
const UNIT_TESTS: &str = "\n#[cfg(test)]\nmod tests {\n";

fn main() -> Result<(), Box<dyn Error>> {
    let output = PathBuf::from(env::var("OUT_DIR")?);
    let here = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=mutants.rs");
    let mut modules = String::new();
    write!(
        modules,
        "pub(crate) mod product {{\n{}}}\n\nmod mutants {{\n",
        copy(&here, &output.join("product"), None)?
    )?;
    for mutant in &MUTANTS {
        let Mutant {
            name,
            module,
            scenario,
            ..
        } = mutant;
        let copied = copy(&here, &output.join(name), Some(mutant))?;
        write!(
            modules,
            "pub(crate) mod {name} {{\n{copied}#[test]\n\
             fn is_found() {{ crate::explore::find({module}::scenarios::{scenario}) }}\n}}\n"
        )?;
    }
    modules.push_str("}\n");
    fs::write(output.join("copies.rs"), modules)?;
    Ok(())
}

/// Writes a copy of all sources to `folder`, with the fault of `mutant`. Returns the declarations
/// of their modules.
fn copy(here: &Path, folder: &Path, mutant: Option<&Mutant>) -> Result<String, Box<dyn Error>> {
    fs::create_dir_all(folder)?;
    let mut modules = String::new();
    for (module, source) in SOURCES {
        let source = here.join(source);
        println!("cargo::rerun-if-changed={}", source.display());
        let text = fs::read_to_string(&source)
            .map_err(|error| format!("cannot read {}: {error}", source.display()))?;
        let edits = mutant
            .filter(|mutant| mutant.module == module)
            .map_or(&[][..], |mutant| mutant.edits);
        let copied = copied(&text, edits)
            .map_err(|error| format!("cannot explore {}: {error}", source.display()))?;
        let scenarios = here.join(format!("tests/interleavings/scenarios/{module}.rs"));
        let path = folder.join(format!("{module}.rs"));
        fs::write(
            &path,
            format!("{copied}\n#[path = {scenarios:?}]\npub(crate) mod scenarios;\n"),
        )?;
        writeln!(modules, "#[path = {path:?}]\npub(crate) mod {module};")?;
    }
    Ok(modules)
}

/// The text with the checker's types and the edits, without its unit tests.
fn copied(text: &str, edits: &[(&str, &str)]) -> Result<String, String> {
    let (code, _) = text
        .split_once(UNIT_TESTS)
        .ok_or_else(|| format!("it has no {UNIT_TESTS:?}, at which the copy ends"))?;
    let mut code = code.to_owned();
    for (from, to) in edits {
        if code.matches(from).count() != 1 {
            return Err(format!(
                "{from:?} of mutants.rs must occur once: change the mutant with the code"
            ));
        }
        code = code.replace(from, to);
    }
    for (from, to) in PATHS {
        code = code.replace(from, to);
    }
    // What the checker does not control is neither interleaved nor checked.
    let unknown = code.lines().find(|line| {
        let line = line.replace("std::sync::Arc", "");
        ["std::sync::", "std::thread", "tokio::", "futures_util::"]
            .iter()
            .any(|path| line.contains(path))
    });
    match unknown {
        Some(line) => Err(format!("build.rs has no type of the checker for {line:?}")),
        None => Ok(code),
    }
}
