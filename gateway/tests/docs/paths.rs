//! Files and folders that a page names between backticks exist, and have the names that follow
//! them: `file.rs` (`name`).
//!
//! A path begins at the folder of the repository, so that a move of files finds all that is to be
//! changed. Pages of a folder may name its files as they are seen from there.

use std::fs;
use std::path::Path;

use crate::links::pages;
use crate::repository;
use crate::sources::markdown::split;

/// It names files of earlier versions.
const LEFT_OUT: &str = "CHANGELOG.md";

/// Names at the top of the repository, but for what builds leave there.
fn top() -> Vec<String> {
    let entries = fs::read_dir(repository()).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name != "target").collect()
}

/// The spans that follow a path in `rest`: pieces between backticks, of which those at odd places
/// are spans.
fn names<'a>(rest: &[&'a str]) -> Vec<&'a str> {
    let mut names = Vec::new();
    let mut expected = " (";
    for pair in rest.chunks_exact(2) {
        if pair[0] != expected {
            break;
        }
        names.push(pair[1]);
        expected = ", ";
    }
    names
}

/// Returns a line for each path on a page of this text that does not exist, and for each name that
/// its file lacks. `folder` is that of the page.
fn missing(folder: &Path, text: &str, top: &[String]) -> Vec<String> {
    let mut missing = Vec::new();
    for (line, prose) in split(text).0 {
        let pieces: Vec<&str> = prose.split('`').collect();
        for at in (1..pieces.len()).step_by(2) {
            let path = pieces[at].split(' ').next().unwrap();
            let first = path.split_once('/').map(|(first, _)| first);
            let is_path = first.is_some_and(|first| top.iter().any(|name| name == first));
            if !is_path && !path.ends_with(".rs") {
                continue;
            }
            let places = [repository().join(path), folder.join(path)];
            let Some(place) = places.iter().find(|place| place.exists()) else {
                missing.push(format!("{line}: {path}"));
                continue;
            };
            let names = names(&pieces[at + 1..]).into_iter();
            let content = fs::read_to_string(place).unwrap_or_default();
            let unknown = names.filter(|name| !content.contains(name));
            missing.extend(unknown.map(|name| format!("{line}: {name} in {path}")));
        }
    }
    missing
}

#[test]
fn every_path_on_a_page_exists() {
    let top = top();
    let mut wrong = Vec::new();
    for page in pages(&repository()) {
        if !page.ends_with(LEFT_OUT) {
            let text = fs::read_to_string(&page).unwrap();
            let missing = missing(page.parent().unwrap(), &text, &top);
            wrong.extend(missing.iter().map(|it| format!("{}:{it}", page.display())));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_path_or_a_name_that_does_not_exist_is_found() {
    let text = "`gateway/src/main.rs` `gateway/none` `none.rs`\n\
                `main.rs --help` `a/none` `target/x`\n\
                `gateway/Cargo.toml` (`gw-gateway`, `gw-none`) and `gw-more`\n";
    let folder = repository().join("gateway/src");
    assert_eq!(
        missing(&folder, text, &top()),
        [
            "1: gateway/none",
            "1: none.rs",
            "3: gw-none in gateway/Cargo.toml"
        ]
    );
}
