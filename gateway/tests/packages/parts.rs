//! The crates that packaging/sbom/sbom.py writes into a program and into a CycloneDX document.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use memchr::memmem;
use serde_json::Value;

use crate::{programs, repository, run};

/// `NAME-VERSION` of the crates from the registry that are in this build. Panic messages name their
/// source files, and debug information names their folders.
fn crates_in(program: &[u8]) -> BTreeSet<String> {
    let found = memmem::find_iter(program, b"/registry/src/").filter_map(|at| {
        let path = &program[at..program.len().min(at + 200)];
        let end = path.iter().position(|byte| !byte.is_ascii_graphic());
        let mut parts = path[..end?].split(|byte| *byte == b'/').skip(4);
        Some(String::from_utf8_lossy(parts.next()?).into_owned())
    });
    found.collect()
}

fn name_and_version(described: &Value) -> String {
    let text = |key: &str| described[key].as_str().unwrap();
    format!("{}-{}", text("name"), text("version"))
}

fn components(document: &Value, scope: &str) -> BTreeSet<String> {
    let all = document["components"].as_array().unwrap().iter();
    all.filter(|component| component["scope"] == scope)
        .map(name_and_version)
        .collect()
}

/// The document that sbom.py writes about the program, which gets the section.
fn describe(program: &Path, out: &Path) -> Value {
    run(Command::new("python3")
        .arg(repository().join("packaging/sbom/sbom.py"))
        .args(["--target", "x86_64-unknown-linux-gnu", "--out"])
        .arg(out)
        .arg("gw-gateway")
        .arg(program)
        .env("SOURCE_DATE_EPOCH", "1800000000"));
    serde_json::from_slice(&fs::read(out).unwrap()).unwrap()
}

/// The section for scanners, unpacked.
fn section(program: &Path, folder: &Path) -> Value {
    let section = folder.join("section");
    run(Command::new("objcopy")
        .arg("--dump-section")
        .arg(format!(".dep-v0={}", section.display()))
        .arg(program)
        .arg(folder.join("copy")));
    let unpack =
        "import sys, zlib; print(zlib.decompress(open(sys.argv[1], 'rb').read()).decode())";
    let text = run(Command::new("python3").args(["-c", unpack]).arg(&section));
    serde_json::from_str(&text).unwrap()
}

/// Crates from the registry have the checksum of the lock file; the patched ones say of which
/// release they are copies.
fn assert_origins(document: &Value) {
    let all = document["components"].as_array().unwrap();
    let of = |name: &str| all.iter().find(|it| it["name"] == name).unwrap();
    let lock = fs::read_to_string(repository().join("Cargo.lock")).unwrap();
    let lock: toml::Table = lock.parse().unwrap();
    let mut locked = lock["package"].as_array().unwrap().iter();
    let rustls = locked
        .find(|it| it["name"].as_str() == Some("rustls"))
        .unwrap();
    assert_eq!(
        of("rustls")["hashes"][0]["content"],
        rustls["checksum"].as_str().unwrap()
    );
    for name in ["h2", "http"] {
        let sum = format!("shared/vendor/{name}.sha256");
        let sum = fs::read_to_string(repository().join(sum)).unwrap();
        let patched = of(name);
        let ancestor = &patched["pedigree"]["ancestors"][0];
        assert!(sum.starts_with(ancestor["hashes"][0]["content"].as_str().unwrap()));
        assert_eq!(ancestor["purl"], patched["purl"]);
        assert!(patched["pedigree"]["patches"][0]["diff"]["text"]["content"].is_string());
    }
}

#[test]
fn a_program_and_its_document_name_the_crates_that_it_is_made_of() {
    if !programs::usable(&["objcopy", "python3"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("gw-gateway");
    fs::copy(env!("CARGO_BIN_EXE_gw-gateway"), &program).unwrap();
    let content = fs::read(&program).unwrap();
    let document = describe(&program, &folder.path().join("first.json"));
    let again = describe(&program, &folder.path().join("second.json"));
    assert_eq!(document, again);
    assert_eq!(document["metadata"]["timestamp"], "2027-01-15T08:00:00Z");
    assert_origins(&document);

    // What the compiler has left in the program is in the document.
    let inside = components(&document, "required");
    let seen = crates_in(&content);
    assert!(seen.len() > 20, "{seen:?}");
    assert_eq!(seen.difference(&inside).next(), None);
    let for_build = components(&document, "excluded");
    assert!(
        for_build.iter().any(|name| name.starts_with("syn-")),
        "{for_build:?}"
    );

    // The section for scanners has the same crates, and the program still runs.
    let data = section(&program, folder.path());
    let packages = data["packages"].as_array().unwrap();
    let (built, linked): (Vec<&Value>, Vec<&Value>) =
        packages.iter().partition(|it| it["kind"] == "build");
    let names = |list: &[&Value]| -> BTreeSet<String> {
        let all = list.iter().filter(|it| it["root"].is_null());
        all.map(|it| name_and_version(it)).collect()
    };
    assert_eq!(names(&linked), inside);
    assert_eq!(names(&built), for_build);
    let root = packages.iter().find(|it| it["root"] == true).unwrap();
    assert_eq!(root["name"], "gw-gateway");
    run(Command::new(&program).arg("--version"));
}
