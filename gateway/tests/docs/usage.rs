//! The list of commands and options in docs/administration.md is complete, and so is its list of
//! paths.

use std::collections::BTreeSet;
use std::process::Command;

use gw_base::service::service_settings::{SETTINGS, ServiceSettings};
use gw_control_plane::control::ServiceChanges;
use serde_json::{Value, json};

use crate::sources::markdown::{code, rows, section, split};
use crate::sources::served::served;
use crate::{assert_same, read};

const PAGE: &str = "docs/administration.md";

/// Options of every command; the page describes them once.
const OF_EVERY_COMMAND: [&str; 6] = [
    "--json",
    "--help",
    "--admin-url",
    "--admin-ca",
    "--admin-token-file",
    "--config",
];

fn help(words: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_gw-gateway"))
        .args(words)
        .arg("-h")
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "gw-gateway {words:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// Names at the beginning of the lines of a section of a help text.
pub(crate) fn commands(help: &str) -> BTreeSet<String> {
    let lines = help.split("Commands:\n").nth(1).unwrap_or_default().lines();
    let names = lines.map_while(|line| line.strip_prefix("  ")?.split(' ').next());
    names
        .filter(|name| *name != "help")
        .map(str::to_owned)
        .collect()
}

/// All `--options` in a text, but those of every command.
fn options(text: &str) -> BTreeSet<String> {
    let words = text.split(|it: char| !(it.is_ascii_lowercase() || it == '-'));
    let options = words.filter(|word| word.starts_with("--") && !OF_EVERY_COMMAND.contains(word));
    options.map(str::to_owned).collect()
}

/// Forms of a command, such as `list ACCOUNT`: one in a line, or several with ` | ` between. A line
/// that begins with `[` goes on with the form before.
fn forms(lines: &[&str]) -> Vec<String> {
    let mut forms = Vec::<String>::new();
    for line in lines {
        for (number, part) in line.split(" | ").enumerate() {
            match forms.last_mut() {
                Some(form) if number == 0 && part.starts_with('[') => *form += part,
                _ => forms.push(part.trim().to_owned()),
            }
        }
    }
    forms
}

#[test]
fn the_page_has_every_command_and_option_and_no_other() {
    let page = read(PAGE);
    let (_, blocks) = split(&page);
    let usage = blocks
        .iter()
        .find(|block| block.info == "text usage")
        .unwrap();
    let mut entries = Vec::<(&str, Vec<&str>)>::new();
    for line in usage.text.lines() {
        match line.strip_prefix("gw-gateway ") {
            Some(rest) => {
                let (names, first) = rest
                    .split_once("  ")
                    .unwrap_or_else(|| rest.split_once(' ').unwrap());
                entries.push((names, vec![first.trim()]));
            }
            None => entries.last_mut().unwrap().1.push(line.trim()),
        }
    }
    let mut documented = BTreeSet::new();
    for (names, lines) in entries {
        for name in names.split(", ") {
            documented.insert(name.to_owned());
            let verbs = commands(&help(&[name]));
            let forms = forms(&lines);
            let mut found = Vec::new();
            for form in &forms {
                let verb = form.split(' ').next().unwrap();
                let words: &[&str] = if verbs.is_empty() {
                    &[name]
                } else {
                    &[name, verb]
                };
                found.extend((!verbs.is_empty()).then(|| verb.to_owned()));
                let has = options(&help(words));
                let documented = options(form);
                let at = format!("{PAGE}: {}", words.join(" "));
                if form.ends_with('…') {
                    assert!(documented.is_subset(&has), "{at}: {documented:?}");
                } else {
                    assert_same(&at, documented, &has);
                }
            }
            assert_same(&format!("{PAGE}: {name}"), found, &verbs);
        }
    }
    let others = ["serve", "doctor", "demo"].map(str::to_owned);
    assert_same(
        PAGE,
        documented.into_iter().chain(others),
        &commands(&help(&[])),
    );
}

#[test]
fn the_page_has_every_path_and_method_and_no_other() {
    let mut expected = BTreeSet::new();
    for (path, methods) in served().openapi["paths"].as_object().unwrap() {
        let methods = methods
            .as_object()
            .unwrap()
            .keys()
            .map(|method| method.to_ascii_uppercase());
        let methods = methods.filter(|method| {
            method.chars().all(|it| it.is_ascii_uppercase()) && method != "PARAMETERS"
        });
        expected.extend(methods.map(|method| format!("{method} {path}")));
    }

    let page = read(PAGE);
    let mut documented = BTreeSet::new();
    for cells in rows(section(&page, "API"), "path") {
        for path in code(&cells[0]) {
            // `…/x` stands for the paths of the row before.
            let path = path.replace('…', "/accounts/{account}");
            // Methods; then a path whose methods they are, if it is not the path of the row.
            for part in cells[1]
                .split("; ")
                .flat_map(|part| part.split(": ").take(1))
            {
                let methods = part
                    .split('`')
                    .next()
                    .unwrap()
                    .split([',', ' '])
                    .filter(|it| !it.is_empty());
                let paths: Vec<String> = code(part)
                    .filter(|it| it.contains('/'))
                    .map(|it| {
                        if it.starts_with('…') {
                            it.replace('…', &path)
                        } else {
                            it.to_owned()
                        }
                    })
                    .collect();
                for method in methods {
                    let paths = if paths.is_empty() {
                        std::slice::from_ref(&path)
                    } else {
                        &paths
                    };
                    documented.extend(paths.iter().map(|path| format!("{method} {path}")));
                }
            }
        }
    }
    assert_same(PAGE, documented, &expected);
}

#[test]
fn the_page_has_every_setting_of_a_service_with_its_default() {
    let page = read(PAGE);
    let rows = rows(
        section(&page, "Accounts and services"),
        "setting of a service",
    );
    let documented: Vec<(&str, &str)> = rows
        .iter()
        .flat_map(|cells| code(&cells[0]).map(|name| (name, cells[1].as_str())))
        .collect();
    let names: Vec<&str> = SETTINGS.iter().map(|setting| setting.name).collect();
    assert_eq!(
        documented.iter().map(|(name, _)| *name).collect::<Vec<_>>(),
        names
    );
    let defaults = json!(ServiceChanges::from(&ServiceSettings::default()));
    for (name, default) in documented {
        let expected = match &defaults[name] {
            Value::String(text) => text.clone(),
            Value::Bool(is_on) => is_on.to_string(),
            // Both modes, and the rate of the configuration.
            _ => continue,
        };
        assert_eq!(default, format!("`{expected}`"), "{name}");
    }
}
