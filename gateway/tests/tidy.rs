//! House rules that lints cannot check: import order between modules, size of files, plain language
//! of comments.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests stop at the first surprise"
)]

#[path = "tidy/groups.rs"]
mod groups;
#[path = "tidy/inside.rs"]
mod inside;
#[path = "tidy/log_fields.rs"]
mod log_fields;
#[path = "tidy/rfc.rs"]
mod rfc;
#[path = "tidy/sizes.rs"]
mod sizes;
#[path = "tidy/unknown_members.rs"]
mod unknown_members;
#[path = "tidy/waits.rs"]
mod waits;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Modules of each crate, topmost first. A module imports only from modules behind it in the list.
const CRATES: [(&str, &[&str]); 13] = [
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
        "gateway/local-region/src",
        &[
            "lib", "region", "node", "postgres", "store", "balancer", "part", "folder", "ports",
            "programs", "events", "error",
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
        "gateway/bed/src",
        &[
            "lib", "threads", "memory", "http2", "agent", "tunnel", "tls", "http1", "body", "dns",
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
            "testing",
        ],
    ),
    (
        "shared/src",
        &[
            "lib",
            "testing",
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

/// Rust files below `folder`, with their paths relative to it. Copies of other projects' crates are
/// left out.
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
    let code = "use crate::a::B;\nuse crate::{c, d::{e, f}, G};\nlet x = crate::h::i();\n\
                use gw_shared::j;\nmycrate::k();";
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
