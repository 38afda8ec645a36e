//! Requirements (MUST, MUST NOT, SHALL, REQUIRED) of the RFCs of HTTP that concern an intermediary,
//! and what shows that each is met.
//!
//! `gateway/tests/rfc` has a file for each RFC, in TOML, with an entry for each requirement in the
//! order of the RFC:
//!
//! - `id`: number of the RFC, section, and number in the section;
//! - `requirement`: one sentence, not the text of the RFC;
//! - `test`: one test or a list, each `FILE::FUNCTION`;
//! - `not_applicable`: why the requirement concerns neither the gateway nor the agent;
//! - `library`: the library that meets the requirement out of sight of tests, and how;
//! - `deviation`: what happens instead, and why; a test, if there is one, shows that.
//!
//! Each entry has a test or a reason.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use super::sizes::function_name;
use super::workspace;

/// Reasons that an entry may have, at most one.
const REASONS: [&str; 3] = ["not_applicable", "library", "deviation"];

/// Fields of an entry; a text is a list of one.
type Entry = BTreeMap<String, Vec<String>>;

/// Parses the part of TOML that the files use: a text or a list of texts for each key, without
/// escapes.
fn entries(toml: &str) -> Result<Vec<Entry>, String> {
    let mut entries: Vec<Entry> = Vec::new();
    // The list that has begun on an earlier line.
    let mut list: Option<(String, Vec<String>)> = None;
    for (at, line) in toml.lines().enumerate() {
        let invalid = || format!("line {}: {line}", at + 1);
        let text = |quoted: &str| {
            let text = quoted.strip_prefix('"')?.strip_suffix('"')?;
            (!text.is_empty() && !text.contains(['"', '\\'])).then(|| text.to_owned())
        };
        let (key, values) = if let Some((key, mut values)) = list.take() {
            if line != "]" {
                let item = line.trim().strip_suffix(',').ok_or_else(invalid)?;
                values.push(text(item).ok_or_else(invalid)?);
                list = Some((key, values));
                continue;
            }
            (key, values)
        } else if line == "[[requirement]]" {
            entries.push(Entry::new());
            continue;
        } else if line.is_empty() || line.starts_with('#') {
            continue;
        } else {
            let (key, value) = line.split_once(" = ").ok_or_else(invalid)?;
            if value == "[" {
                list = Some((key.to_owned(), Vec::new()));
                continue;
            }
            (key.to_owned(), vec![text(value).ok_or_else(invalid)?])
        };
        let entry = entries.last_mut().ok_or_else(invalid)?;
        if entry.insert(key, values).is_some() {
            return Err(invalid());
        }
    }
    match list {
        Some((key, _)) => Err(format!("the list {key} does not end")),
        None => Ok(entries),
    }
}

/// Functions of a file with the attribute `#[test]`.
fn tests_of(code: &str) -> BTreeSet<&str> {
    let mut tests = BTreeSet::new();
    let mut is_test = false;
    for line in code.lines().map(str::trim) {
        if line == "#[test]" {
            is_test = true;
        } else if let Some(name) = function_name(line) {
            if is_test {
                tests.insert(name);
            }
            is_test = false;
        }
    }
    tests
}

/// The RFC, the section and the number in `id`.
fn parts_of(id: &str) -> Option<(&str, Vec<u32>, u32)> {
    let mut parts = id.split('-');
    let (rfc, section, number) = (parts.next()?, parts.next()?, parts.next()?);
    let section: Result<Vec<u32>, _> = section.split('.').map(str::parse).collect();
    match parts.next() {
        None => Some((rfc, section.ok()?, number.parse().ok()?)),
        Some(_) => None,
    }
}

/// Mistakes of an entry, apart from its id.
fn mistakes_of(entry: &Entry, has_test: &mut impl FnMut(&str) -> bool) -> Vec<String> {
    let mut mistakes: Vec<String> = entry
        .keys()
        .filter(|key| {
            !["id", "requirement", "test"].contains(&key.as_str())
                && !REASONS.contains(&key.as_str())
        })
        .map(|key| format!("unknown field {key}"))
        .collect();
    if !entry.contains_key("requirement") {
        mistakes.push("no requirement".to_owned());
    }
    let tests = entry.get("test").map_or(&[][..], Vec::as_slice);
    let reasons: Vec<&str> = REASONS
        .into_iter()
        .filter(|reason| entry.contains_key(*reason))
        .collect();
    if tests.is_empty() && reasons.is_empty() {
        mistakes.push("neither a test nor a reason".to_owned());
    }
    if reasons.len() > 1 || !tests.is_empty() && reasons.contains(&"not_applicable") {
        mistakes.push(format!("contradicting fields {reasons:?}"));
    }
    let missing = tests.iter().filter(|test| !has_test(test));
    mistakes.extend(missing.map(|test| format!("no test {test}")));
    mistakes
}

/// Whether the test `FILE::FUNCTION` exists.
fn exists(test: &str) -> bool {
    let Some((file, function)) = test.split_once("::") else {
        return false;
    };
    fs::read_to_string(workspace().join(file)).is_ok_and(|code| tests_of(&code).contains(function))
}

#[test]
fn every_requirement_of_an_rfc_has_a_test_or_a_reason() {
    let mut mistakes = Vec::new();
    let mut rfcs = BTreeSet::new();
    for file in fs::read_dir(workspace().join("gateway/tests/rfc")).unwrap() {
        let path = file.unwrap().path();
        let rfc = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let entries = entries(&fs::read_to_string(&path).unwrap())
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let mut last = (Vec::new(), 0);
        for entry in &entries {
            let id = entry.get("id").map_or("", |id| &id[0]);
            match parts_of(id) {
                Some((of, section, number)) if rfc == format!("rfc{of}") => {
                    let place = (section, number);
                    if place <= last {
                        mistakes.push(format!("{id}: double, or not in the order of the RFC"));
                    }
                    last = place;
                }
                _ => mistakes.push(format!(
                    "{rfc}: {id:?} is not {rfc}'s number, section and number"
                )),
            }
            let of_entry = mistakes_of(entry, &mut exists);
            mistakes.extend(of_entry.iter().map(|mistake| format!("{id}: {mistake}")));
        }
        rfcs.insert(rfc);
    }
    assert!(
        mistakes.is_empty(),
        "in gateway/tests/rfc:\n{}",
        mistakes.join("\n")
    );
    let expected = ["rfc8441", "rfc9110", "rfc9112", "rfc9113"];
    assert_eq!(rfcs.iter().collect::<Vec<_>>(), expected);
}

#[test]
fn mistakes_in_requirements_are_found() {
    let found = |fields: &str| {
        let toml = format!("# A\n\n[[requirement]]\nid = \"1-1-1\"\n{fields}");
        let entry = entries(&toml).unwrap().remove(0);
        mistakes_of(&entry, &mut |test| test == "a.rs::b")
    };
    let none: [&str; 0] = [];
    assert_eq!(found("requirement = \"R.\"\ntest = \"a.rs::b\"\n"), none);
    let listed = "requirement = \"R.\"\ntest = [\n    \"a.rs::b\",\n]\ndeviation = \"D.\"\n";
    assert_eq!(found(listed), none);
    assert_eq!(
        found("requirement = \"R.\"\n"),
        ["neither a test nor a reason"]
    );
    assert_eq!(
        found("requirement = \"R.\"\ntest = \"a.rs::c\"\n"),
        ["no test a.rs::c"]
    );
    assert_eq!(
        found("reason = \"R.\"\ntest = \"a.rs::b\"\nnot_applicable = \"N.\"\n"),
        [
            "unknown field reason",
            "no requirement",
            "contradicting fields [\"not_applicable\"]"
        ]
    );
    for invalid in [
        "id = \"1\"",
        "[[requirement]]\nid = 1",
        "[[requirement]]\nid = \"a\\\"b\"",
        "[[requirement]]\nid = \"1\"\nid = \"2\"",
        "[[requirement]]\ntest = [\n    \"a\",",
        "[[requirement]]\ntest = [\n    \"a\"\n]",
    ] {
        assert!(entries(invalid).is_err(), "{invalid}");
    }
    assert_eq!(parts_of("9113-6.5.2-1"), Some(("9113", vec![6, 5, 2], 1)));
    assert_eq!(parts_of("9113-6.x-1"), None);
    let code = "#[test]\n#[ignore]\nfn a() {}\nfn b() {}\n    #[test]\n    fn c() {\n";
    assert_eq!(tests_of(code), BTreeSet::from(["a", "c"]));
}
