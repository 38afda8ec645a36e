//! House rules that lints cannot check: import order between modules, size of files, plain language of comments.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests stop at the first surprise"
)]

#[path = "tidy/groups.rs"]
mod groups;
#[path = "tidy/log_fields.rs"]
mod log_fields;
#[path = "tidy/rfc.rs"]
mod rfc;
#[path = "tidy/unknown_members.rs"]
mod unknown_members;
#[path = "tidy/waits.rs"]
mod waits;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Longest file, in lines.
const LINES_MAX: usize = 600;

/// Longest function, in lines.
const FUNCTION_LINES_MAX: usize = 70;

/// Functions that are longer, and why.
const LONG_FUNCTIONS: [(&str, &str, &str); 11] = [
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
    (
        "shared/src/http/write.rs",
        "received_framing_fields_do_not_reach_a_written_response",
        "one row for each field",
    ),
    (
        "shared/src/http/head/http2.rs",
        "http2_requests_are_checked_like_http1_requests",
        "one row for each request",
    ),
];

/// Modules of each crate, topmost first. A module imports only from modules behind it in the list.
const CRATES: [(&str, &[&str]); 11] = [
    (
        "gateway/src",
        &["main", "cli", "lib", "demo", "process", "limits"],
    ),
    (
        "gateway/control-plane/src",
        &[
            "lib",
            "fuzz_support",
            "certificates",
            "admin",
            "admin_client",
            "members",
            "backup",
            "control",
            "cluster",
            "http_server",
            "limits",
        ],
    ),
    (
        "gateway/data-plane/src",
        &[
            "lib",
            "support",
            "worker",
            "ingress",
            "downstream",
            "route",
            "apex",
            "relay",
            "request_scope",
            "upstream",
            "tunnel",
            "http1",
            "http2",
            "connections",
            "caller_session",
            "peer",
            "memory",
            "pipe",
            "http_message",
            "current",
            "lifecycle",
            "limits",
        ],
    ),
    (
        "gateway/interface/src",
        &[
            "lib",
            "workers",
            "control_plane",
            "node_connections",
            "replay",
            "config",
            "rate_limit",
            "auth",
            "limits",
        ],
    ),
    (
        "gateway/telemetry/src",
        &[
            "lib",
            "timeseries",
            "trace",
            "request_log",
            "shared_counters",
            "counters",
            "outcome",
            "limits",
        ],
    ),
    (
        "gateway/store/src",
        &[
            "lib",
            "source",
            "postgres",
            "sqlite",
            "contents",
            "audit_chain",
            "usage",
            "sealed",
            "sealing",
            "revocation",
            "records",
            "limits",
            "failure",
        ],
    ),
    (
        "gateway/acme/src",
        &[
            "lib", "admit", "order", "hook", "dns", "tls_alpn", "http", "schedule", "state",
            "proof", "settings", "error", "limits",
        ],
    ),
    (
        "gateway/base/src",
        &[
            "lib",
            "client_address",
            "tls",
            "process",
            "mailbox",
            "error",
            "limits",
            "service",
            "agent_releases",
            "page",
            "clock",
            "strict_json",
            "sqlite_file",
            "principal",
        ],
    ),
    (
        "gateway/region/src",
        &[
            "lib",
            "simulation",
            "announcement",
            "keys",
            "key",
            "peering",
            "signals",
            "status",
            "membership",
            "owners",
            "timing",
            "engine",
            "random",
        ],
    ),
    (
        "agent/src",
        &[
            "main",
            "cli",
            "lib",
            "support",
            "doctor",
            "process",
            "lifecycle",
            "update",
            "admin",
            "tunnel",
            "config",
            "forward",
            "backend",
            "telemetry",
            "program",
            "identity",
            "apex_client",
            "clock",
            "services",
            "succession",
            "backoff",
            "tls",
            "proxy",
        ],
    ),
    (
        "shared/src",
        &[
            "lib",
            "doctor",
            "telemetry",
            "tunnel",
            "identity",
            "net",
            "http2",
            "http",
            "runtime",
            "process",
            "config",
            "command",
            "error_body",
            "error_code",
            "text",
            "files",
            "version",
            "id",
            "clock",
        ],
    ),
];

/// Pronouns that hide the client, the agent or the worker that is meant.
const RIDDLES: [&str; 7] = [
    "who", "whom", "whoever", "nobody", "somebody", "anybody", "anew",
];

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the crate is in a workspace")
        .to_owned()
}

/// Rust files below `folder`, with their paths relative to it. Copies of other projects' crates are left out.
fn rust_files(folder: &Path) -> Vec<(PathBuf, String)> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in
            fs::read_dir(&next).unwrap_or_else(|error| panic!("{}: {error}", next.display()))
        {
            let path = entry.unwrap().path();
            if path.is_dir() {
                let name = path.file_name().unwrap().to_str().unwrap();
                if !["target", "vendor", "node_modules"].contains(&name) && !name.starts_with('.') {
                    folders.push(path);
                }
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                files.push((path.strip_prefix(folder).unwrap().to_owned(), text));
            }
        }
    }
    files.sort();
    assert!(!files.is_empty(), "no Rust files in {}", folder.display());
    files
}

/// The module of the crate that a file belongs to; `None` for files of tests.
fn module_of(path: &Path) -> Option<String> {
    let parts: Vec<&str> = path
        .iter()
        .map(|part| part.to_str().unwrap().trim_end_matches(".rs"))
        .collect();
    let is_test = parts
        .iter()
        .any(|part| *part == "tests" || part.starts_with("fake_"));
    (!is_test).then(|| parts[0].to_owned())
}

/// Code without comments and without the `mod tests` at its end.
fn product_code(text: &str) -> String {
    let end = text.find("#[cfg(test)]\nmod ").unwrap_or(text.len());
    let lines = text[..end]
        .lines()
        .map(|line| line.split_once("//").map_or(line, |(code, _)| code));
    lines.collect::<Vec<_>>().join("\n")
}

/// Names of the crate's modules that `code` mentions as `crate::name` or in `crate::{…}`.
fn imports(code: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        if code[..at].ends_with(|char: char| char.is_alphanumeric() || char == '_' || char == '$') {
            continue;
        }
        let rest = &code[at + "crate::".len()..];
        match rest.strip_prefix('{') {
            Some(group) => {
                let mut depth = 0;
                let mut at_item = true;
                for (index, char) in group.char_indices() {
                    match char {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => at_item = true,
                        _ if at_item && (char.is_alphanumeric() || char == '_') => {
                            names.insert(first_name(&group[index..]));
                            at_item = false;
                        }
                        _ => {}
                    }
                }
            }
            None => {
                names.insert(first_name(rest));
            }
        }
    }
    names
}

fn first_name(text: &str) -> String {
    text.chars()
        .take_while(|char| char.is_alphanumeric() || *char == '_')
        .collect()
}

#[test]
fn imports_are_found_in_every_form() {
    let code = "use crate::a::B;\nuse crate::{c, d::{e, f}, G};\nlet x = crate::h::i();\nuse gw_shared::j;\nmycrate::k();";
    let found: Vec<String> = imports(code).into_iter().collect();
    assert_eq!(found, ["G", "a", "c", "d", "h"]);
    assert_eq!(
        product_code("a // crate::b\n#[cfg(test)]\nmod tests {\n"),
        "a "
    );
}

#[test]
fn modules_import_only_from_modules_behind_them() {
    let mut mistakes = Vec::new();
    for (folder, order) in CRATES {
        let position = |module: &str| order.iter().position(|other| *other == module);
        for (path, text) in rust_files(&workspace().join(folder)) {
            let Some(module) = module_of(&path) else {
                continue;
            };
            let Some(own) = position(&module) else {
                mistakes.push(format!(
                    "{folder}/{}: module {module} is not in the list",
                    path.display()
                ));
                continue;
            };
            for name in imports(&product_code(&text)) {
                // Names in the root of the crate are re-exports of `lib`, for users of the crate.
                let is_module = name.starts_with(|char: char| char.is_lowercase());
                if is_module && name != module && position(&name).is_none_or(|other| other < own) {
                    mistakes.push(format!(
                        "{folder}/{}: {module} imports {name}",
                        path.display()
                    ));
                }
            }
        }
    }
    assert!(
        mistakes.is_empty(),
        "against the import order:\n{}",
        mistakes.join("\n")
    );
}

/// Steps of the walks in `docs/code.md` as file and function, by the title of the walk.
fn walks(page: &str) -> Vec<(String, Vec<(String, String)>)> {
    let mut walks = Vec::new();
    let section = page
        .split("\n## Walks\n")
        .nth(1)
        .expect("the page has a section of walks");
    for line in section.split("\n## ").next().unwrap_or_default().lines() {
        if let Some(title) = line.strip_prefix("### ") {
            walks.push((title.to_owned(), Vec::new()));
        } else if line.starts_with(|char: char| char.is_ascii_digit())
            && let Some((_, steps)) = walks.last_mut()
        {
            let mut quoted = line.split('`').skip(1).step_by(2);
            let step = quoted
                .next()
                .zip(quoted.next())
                .unwrap_or_else(|| panic!("no file and function: {line}"));
            steps.push((step.0.to_owned(), step.1.to_owned()));
        }
    }
    walks
}

#[test]
fn walks_through_the_code_are_short_and_name_existing_functions() {
    let walks = walks(&fs::read_to_string(workspace().join("docs/code.md")).unwrap());
    assert_eq!(walks.len(), 11);
    for (title, steps) in walks {
        assert!(
            (5..=12).contains(&steps.len()),
            "{title}: {} steps",
            steps.len()
        );
        for (file, function) in steps {
            let text = fs::read_to_string(workspace().join(&file))
                .unwrap_or_else(|error| panic!("{file}: {error}"));
            let is_there = text.contains(&format!("fn {function}("))
                || text.contains(&format!("fn {function}<"));
            assert!(is_there, "{title}: {file} has no function {function}");
        }
    }
}

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
fn function_name(line: &str) -> Option<&str> {
    let (before, rest) = line.trim_start().split_once("fn ")?;
    let is_beginning = before.split_whitespace().all(|word| {
        word.starts_with("pub") || ["const", "async", "unsafe", "extern", "\"C\""].contains(&word)
    });
    let end = rest.find(|char: char| !char.is_alphanumeric() && char != '_')?;
    (is_beginning && end > 0).then_some(&rest[..end])
}

/// Functions in a file that rustfmt has formatted, with their lines. Those without a body, or in one line, are left out.
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
    let code = "impl A {\n    pub(crate) async fn b(\n        &self,\n    ) -> C {\n        d\n    }\n\n    fn e();\n}\n\n\
                fn f() {}\n\n// fn g() {\nconst fn h<T>() {\n    if true {\n    }\n}\n";
    assert_eq!(functions(code), [("b", 5), ("h", 4)]);
}

#[test]
fn functions_are_short() {
    let mut long = Vec::new();
    // Its modules import each other: the world runs the checks, and these look at the world.
    let others = ["gateway/simulation"];
    for folder in CRATES.map(|(folder, _)| folder).into_iter().chain(others) {
        for (path, text) in rust_files(&workspace().join(folder)) {
            for (name, lines) in functions(&text) {
                if lines > FUNCTION_LINES_MAX {
                    long.push((format!("{folder}/{}", path.display()), name.to_owned()));
                }
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

#[test]
fn comments_name_what_they_mean() {
    let mut riddles = Vec::new();
    for (path, text) in rust_files(&workspace()) {
        for (number, line) in text.lines().enumerate() {
            let Some(comment) = line.trim_start().strip_prefix("//") else {
                continue;
            };
            let comment = comment.trim_start_matches(['/', '!']).trim();
            let mut words = comment
                .split(|char: char| !char.is_alphanumeric())
                .map(str::to_lowercase);
            if comment.starts_with("Of ") || words.any(|word| RIDDLES.contains(&word.as_str())) {
                riddles.push(format!("{}:{}: {comment}", path.display(), number + 1));
            }
        }
    }
    assert!(
        riddles.is_empty(),
        "{} comments are not plain:\n{}",
        riddles.len(),
        riddles.join("\n")
    );
}
