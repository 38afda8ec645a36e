//! Sizes of files, folders, functions and lines.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{rust_files, workspace};

/// Longest file, in lines.
const LINES_MAX: usize = 600;

/// Widest line, in characters.
const COLUMNS_MAX: usize = 100;

/// Longest function, in lines.
const FUNCTION_LINES_MAX: usize = 70;

/// Functions that are longer, and why.
const LONG_FUNCTIONS: [(&str, &str, &str); 9] = [
    (
        "gateway/base/src/error.rs",
        "outcome",
        "one row for each error",
    ),
    (
        "gateway/base/src/error/tests.rs",
        "status_gw_status_and_code_match_the_documentation",
        "one row for each error",
    ),
    (
        "gateway/data-plane/src/worker/mod.rs",
        "handle",
        "one arm for each message",
    ),
    (
        "gateway/telemetry/src/request_log/archive/settings.rs",
        "every_wrong_value_is_reported_with_its_key",
        "one row for each key",
    ),
    (
        "gateway/region/src/simulation/schedule.rs",
        "push_random",
        "one arm for each fault",
    ),
    (
        "gateway/region/src/simulation/world/faults.rs",
        "fault",
        "one arm for each fault",
    ),
    (
        "gateway/region/src/simulation/world/records.rs",
        "commit_revocation",
        "the steps of one change in their order",
    ),
    (
        "gateway/simulation/src/world/faults.rs",
        "try_happen",
        "one arm for each fault",
    ),
    (
        "shared/src/tunnel/endpoint/tests/model.rs",
        "apply",
        "one arm for each operation",
    ),
];

#[test]
fn files_are_short() {
    let long: Vec<String> = rust_files(&workspace())
        .into_iter()
        .map(|(path, text)| (path, text.lines().count()))
        .filter(|(_, lines)| *lines > LINES_MAX)
        .map(|(path, lines)| format!("{} has {lines} lines", path.display()))
        .collect();
    assert!(
        long.is_empty(),
        "longer than {LINES_MAX} lines:\n{}",
        long.join("\n")
    );
}

#[test]
fn lines_are_narrow() {
    let mut wide = Vec::new();
    for (path, text) in rust_files(&workspace()) {
        let lines = text.lines().enumerate();
        let beyond = lines.filter(|(_, line)| line.chars().count() > COLUMNS_MAX);
        wide.extend(beyond.map(|(number, _)| format!("{}:{}", path.display(), number + 1)));
    }
    assert!(
        wide.is_empty(),
        "wider than {COLUMNS_MAX} columns:\n{}",
        wide.join("\n")
    );
}

/// Most source files that lie in one folder of a crate. Fuzz targets are programs, one file each.
const FILES_IN_FOLDER_MAX: usize = 14;

#[test]
fn folders_have_few_files() {
    let mut folders: BTreeMap<PathBuf, usize> = BTreeMap::new();
    for (path, _) in rust_files(&workspace()) {
        *folders
            .entry(path.parent().unwrap().to_owned())
            .or_default() += 1;
    }
    folders.remove(Path::new("gateway/fuzz/fuzz_targets"));
    let full: Vec<String> = folders
        .into_iter()
        .filter(|(_, files)| *files > FILES_IN_FOLDER_MAX)
        .map(|(folder, files)| format!("{} has {files} files", folder.display()))
        .collect();
    assert!(
        full.is_empty(),
        "more than {FILES_IN_FOLDER_MAX} files:\n{}",
        full.join("\n")
    );
}

/// The name of the function that a line begins.
pub(super) fn function_name(line: &str) -> Option<&str> {
    let (before, rest) = line.trim_start().split_once("fn ")?;
    let is_beginning = before.split_whitespace().all(|word| {
        word.starts_with("pub") || ["const", "async", "unsafe", "extern", "\"C\""].contains(&word)
    });
    let end = rest.find(|char: char| !char.is_alphanumeric() && char != '_')?;
    (is_beginning && end > 0).then_some(&rest[..end])
}

/// Functions in a file that rustfmt has formatted, with their lines. Those without a body, or in
/// one line, are left out.
fn functions(code: &str) -> Vec<(&str, usize)> {
    let lines: Vec<&str> = code.lines().collect();
    let mut functions = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let Some(name) = function_name(line) else {
            continue;
        };
        let head = lines[at..]
            .iter()
            .find(|line| line.ends_with(['{', '}', ';']));
        let closing = format!("{}}}", &line[..line.len() - line.trim_start().len()]);
        let end = lines[at..].iter().position(|line| *line == closing);
        if let Some(end) = end
            && head.is_some_and(|head| head.ends_with('{'))
        {
            functions.push((name, end + 1));
        }
    }
    functions
}

#[test]
fn functions_are_found_with_their_lines() {
    let code = "impl A {\n    pub(crate) async fn b(\n        &self,\n    ) -> C {\n        d\n    \
                }\n\n    fn e();\n}\n\nfn f() {}\n\n// fn g() {\n\
                const fn h<T>() {\n    if true {\n    }\n}\n";
    assert_eq!(functions(code), [("b", 5), ("h", 4)]);
}

#[test]
fn functions_are_short() {
    let mut long = Vec::new();
    for (path, text) in rust_files(&workspace()) {
        for (name, lines) in functions(&text) {
            if lines > FUNCTION_LINES_MAX {
                long.push((path.display().to_string(), name.to_owned()));
            }
        }
    }
    long.sort();
    let mut listed = LONG_FUNCTIONS.map(|(file, name, _)| (file.to_owned(), name.to_owned()));
    listed.sort();
    assert_eq!(
        long, listed,
        "functions of more than {FUNCTION_LINES_MAX} lines, and those that LONG_FUNCTIONS lists"
    );
}
