//! The interface of both programs is that of the files in `gateway/tests/golden`, so that a commit
//! shows in its diff what it changes for users.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use crate::configuration::{self, Agent};
use crate::openapi;
use crate::sources::markdown::{code, rows, section};
use crate::sources::served::served;
use crate::usage::commands;
use crate::{read, repository};

/// Variable of the environment with which the tests write the files instead of comparing them.
const UPDATE: &str = "GW_TEST_UPDATE_GOLDEN";

const FOLDER: &str = "gateway/tests/golden";

/// Asserts that a file of the folder has this text.
fn assert_golden(file: &str, text: &str) {
    let path = format!("{FOLDER}/{file}");
    if env::var_os(UPDATE).is_some() {
        fs::create_dir_all(repository().join(FOLDER)).unwrap();
        fs::write(repository().join(&path), text).unwrap();
        return;
    }
    let golden = read(&path);
    let difference = golden
        .lines()
        .map(Some)
        .chain([None])
        .zip(text.lines().map(Some).chain([None]))
        .zip(1..)
        .find(|((expected, found), _)| expected != found);
    if let Some(((expected, found), line)) = difference {
        panic!(
            "{path}:{line} has\n  {}\nand the programs have\n  {}\n\
             If users should see the change, write the files with {UPDATE}=1 cargo test -p \
             gw-gateway --test docs golden, and commit them.",
            expected.unwrap_or("its end"),
            found.unwrap_or("no more"),
        );
    }
}

fn built(program: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_BIN_EXE_gw-gateway")).with_file_name(program);
    assert!(
        path.exists(),
        "build the whole workspace: cargo build --workspace --bins"
    );
    path
}

/// The output of a program without environment, lines without spaces at their ends.
fn output(program: &str, words: &[String], option: &str) -> String {
    let output = Command::new(built(program))
        .args(words)
        .arg(option)
        .env_clear()
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {words:?}: {stderr}");
    let stdout = String::from_utf8(output.stdout).unwrap();
    stdout
        .lines()
        .map(|line| format!("{}\n", line.trim_end()))
        .collect()
}

/// Appends the help of a command and of all below it.
fn write_help(program: &str, words: &[String], hidden: &[&str], text: &mut String) {
    let line = [&[program.to_owned()], words].concat().join(" ");
    let help = output(program, words, "--help");
    writeln!(text, "$ {line} --help\n{help}").unwrap();
    let listed = commands(&output(program, words, "-h"));
    for name in listed
        .iter()
        .map(String::as_str)
        .chain(hidden.iter().copied())
    {
        write_help(program, &[words, &[name.to_owned()]].concat(), &[], text);
    }
}

#[test]
fn the_help_of_every_command_is_that_of_the_golden_files() {
    for (program, hidden) in [
        ("gw-gateway", ["demo-part", "manual"].as_slice()),
        ("gw-agent", &["manual"]),
    ] {
        let mut text = String::new();
        write_help(program, &[], hidden, &mut text);
        assert!(text.matches("\nUsage: ").count() > 4, "{text}");
        assert_golden(&format!("{program}.help.txt"), &text);
    }
}

#[test]
fn the_openapi_document_is_that_of_the_golden_file() {
    assert_golden("openapi.txt", &openapi::lines(&served().openapi));
}

/// `docs/metrics.md` has every metric, as another test shows; the golden file has their order and
/// help.
#[test]
fn the_metrics_are_those_of_the_golden_file() {
    let mut text = String::new();
    for (program, metrics) in [
        ("gw-gateway", &served().gateway_metrics),
        ("gw-agent", &served().agent_metrics),
    ] {
        writeln!(text, "## {program}").unwrap();
        for line in metrics.lines().filter(|line| line.starts_with("# ")) {
            writeln!(text, "{line}").unwrap();
        }
    }
    assert_golden("metrics.txt", &text);
}

/// A value that no key takes.
const WRONG: &str = "1979-05-27";

/// Appends a key with its default on the page, and with the error about a wrong value, which says
/// what the key takes.
fn write_key(text: &mut String, page: &str, key: &str, error: &str) {
    let name = key.rsplit_once('/').map_or(key, |(_, name)| name);
    let rows = rows(page, "key");
    let row = rows
        .iter()
        .find(|cells| code(&cells[0]).any(|it| it == name));
    let default = &row.unwrap_or_else(|| panic!("no row: {key}"))[2];
    let lines = error.lines().map(str::trim);
    let about: Vec<&str> = lines
        .filter(|line| line.contains(&format!("{name}:")) || line.contains(WRONG))
        .collect();
    assert!(!about.is_empty(), "{key} takes a date: {error}");
    writeln!(
        text,
        "{key}, by default: {default}\n  {}",
        about.join("\n  ")
    )
    .unwrap();
}

/// The defaults are those of `docs/configuration.md`, which another test compares with the program.
#[test]
fn the_configuration_is_that_of_the_golden_file() {
    let page = read(configuration::PAGE);
    let of_gateway = section(&page, "Gateway");
    let mut text = "## gateway.toml\n".to_owned();
    for key in configuration::gateway_keys() {
        let mut lines: Vec<&str> = configuration::REQUIRED.lines().collect();
        lines.retain(|line| !line.starts_with(&format!("{key} = ")));
        let wrong = format!("{}\n{key} = {WRONG}", lines.join("\n"));
        let error = configuration::parse(&wrong).unwrap_err();
        write_key(&mut text, of_gateway, &key, &error);
    }
    text += "## agent.toml\n";
    let (of_agent, of_backend) = section(&page, "Agent")
        .split_once("### Backend tables")
        .unwrap();
    let agent = Agent::new();
    let mut write = |page, key: &str, wrong: &str| {
        let error = agent.load(wrong, |_| None).unwrap_err();
        write_key(&mut text, page, key, &error);
    };
    for key in configuration::agent_keys() {
        // The page names the keys of `traces` without the table.
        let name = key.replace("traces.", "traces/");
        write(of_agent, &name, &format!("{key} = {WRONG}"));
    }
    for key in configuration::backend_keys() {
        let wrong = format!("backend = {{ {key} = {WRONG} }}");
        write(of_backend, &format!("backends.NAME/{key}"), &wrong);
    }
    text += "## Variables\n";
    for name in configuration::all_variables() {
        text += &format!("{name}\n");
    }
    assert_golden("configuration.txt", &text);
}
