//! Commands that no test can run are checked: blocks marked `sh norun`, and commands in sentences.
//!
//! Command lines of Gw's own programs are parsed by the programs. Units, packages, manifests and
//! files must exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::commands::pages;
use crate::not_run::NOT_RUN;
use crate::support::markdown::{Block, code, split};
use crate::support::words::simple_commands;
use crate::{configuration, read, repository};

/// Words that stand for values, with one.
const PLACEHOLDERS: [(&str, &str); 5] = [
    ("ACCOUNT", "acme"),
    ("AGENT", "ag_0123456789abcdefghij"),
    ("DIR", "folder"),
    ("ID", "019aa5c2-7e30-7c3b-8f11-2d5a4c9e1b07"),
    ("URL", "http://127.0.0.1:8080"),
];

/// Programs of others. Their own options are not checked.
const OTHERS: [&str; 33] = [
    "age",
    "cat",
    "cd",
    "certbot",
    "chown",
    "cp",
    "createdb",
    "createuser",
    "dropdb",
    "echo",
    "editor",
    "export",
    "grpcurl",
    "install",
    "jq",
    "openssl",
    "pg_basebackup",
    "pg_ctlcluster",
    "pg_dump",
    "pg_restore",
    "printf",
    "psql",
    "rm",
    "scp",
    "set",
    "sha256sum",
    "skopeo",
    "socat",
    "ssh",
    "tee",
    "tsig-keygen",
    "umask",
    "websocat",
];

/// The program of a line of shell, without its folder.
pub(crate) fn first_word(line: &str) -> &str {
    let line = line.trim_start().trim_start_matches("$ ");
    let mut words = line
        .split_whitespace()
        .skip_while(|word| is_assignment(word));
    words.next().unwrap_or_default().rsplit('/').next().unwrap()
}

fn is_assignment(word: &str) -> bool {
    word.split_once('=').is_some_and(|(name, _)| {
        !name.is_empty()
            && name
                .bytes()
                .all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_')
    })
}

/// Returns the faults of a simple command, given as words.
fn mistake(words: &[String]) -> Option<String> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let unknown = words
        .iter()
        .find_map(|word| unknown_variable(word).or_else(|| missing_file(word)));
    unknown.or_else(|| mistake_of_program(&words))
}

fn mistake_of_program(words: &[&str]) -> Option<String> {
    let words: Vec<&str> = words
        .iter()
        .copied()
        .skip_while(|word| is_assignment(word))
        .collect();
    let (program, arguments) = words.split_first()?;
    match *program {
        "sudo" => {
            let mut words = arguments;
            while let [option, rest @ ..] = words
                && option.starts_with('-')
            {
                words = if ["-u", "--user"].contains(option) {
                    &rest[1..]
                } else {
                    rest
                };
            }
            mistake_of_program(words)
        }
        "gw-gateway" | "gw-agent" => refusal(&built(program), arguments),
        "target/release/gw-loadtest" => refusal(&built("gw-loadtest"), arguments),
        "./test" | "packaging/build" | "packaging/sign" => {
            refusal(&repository().join(program), arguments)
        }
        "systemctl" => {
            let units = arguments
                .iter()
                .skip(1)
                .filter(|word| !word.starts_with('-'));
            let files = units.map(|unit| {
                if unit.contains('.') {
                    (*unit).to_owned()
                } else {
                    format!("{unit}.service")
                }
            });
            missing(
                "unit",
                files.filter(|file| !repository().join("packaging/systemd").join(file).exists()),
            )
        }
        "apt" => {
            let packages = arguments
                .iter()
                .filter_map(|word| word.strip_prefix("./")?.split('_').next());
            missing(
                "package",
                packages.filter(|name| !["gw-gateway", "gw-agent"].contains(name)),
            )
        }
        "cargo" => {
            let packages = arguments
                .windows(2)
                .filter(|pair| pair[0] == "-p")
                .map(|pair| pair[1]);
            let names = read("Cargo.lock");
            missing(
                "package",
                packages.filter(|name| !names.contains(&format!("name = \"{name}\""))),
            )
        }
        "docker" => docker(arguments),
        "podman" => podman(arguments),
        "kubectl" => kubectl(arguments),
        // Any command.
        "…" => None,
        // It exists, as a file of the repository.
        _ if program.starts_with(".ci/") => None,
        _ if OTHERS.contains(program) => None,
        _ => Some(format!("no test knows the program {program}")),
    }
}

fn missing(kind: &str, mut names: impl Iterator<Item = impl AsRef<str>>) -> Option<String> {
    names
        .next()
        .map(|name| format!("no such {kind}: {}", name.as_ref()))
}

pub(crate) fn built(program: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_BIN_EXE_gw-gateway")).with_file_name(program);
    assert!(
        path.exists(),
        "build the whole workspace: cargo build --workspace --bins"
    );
    path
}

/// The error of a program about its arguments. It reads them up to `--help`.
fn refusal(program: &Path, arguments: &[&str]) -> Option<String> {
    // An optional part of a command is between brackets. `…` stands for the value of an option, or
    // for more arguments.
    let arguments = arguments.iter().map(|word| word.trim_matches(['[', ']']));
    let mut given: Vec<&str> = Vec::new();
    for word in arguments {
        let is_value = given.last().is_some_and(|before| before.starts_with("--"));
        let word = if word.starts_with("ag_") {
            "AGENT"
        } else {
            word
        };
        match PLACEHOLDERS.iter().find(|(name, _)| *name == word) {
            Some((_, value)) => given.push(value),
            None if word == "…" => given.extend(is_value.then_some("api")),
            None => given.push(word),
        }
    }
    let output = Command::new(program)
        .args(given)
        .arg("--help")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    (!output.status.success()).then(|| String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Services and profiles are those of packaging/compose.yaml.
fn docker(arguments: &[&str]) -> Option<String> {
    let compose = read("packaging/compose.yaml");
    let ["compose", arguments @ ..] = arguments else {
        return Some("not docker compose".to_owned());
    };
    let mut words = arguments.iter().copied();
    let mut verb = None;
    while let Some(word) = words.next() {
        match word {
            "--profile" => {
                let profile = words.next().unwrap();
                if !compose.contains(&format!("profiles: [{profile}]")) {
                    return Some(format!("no such profile: {profile}"));
                }
            }
            "-e" => drop(words.next()),
            _ if word.starts_with('-') => {}
            "up" | "run" => verb = Some(word),
            service => {
                let exists = compose.contains(&format!("\n  {service}:\n"));
                let arguments: Vec<&str> = words.collect();
                return match verb {
                    None => Some(format!("no test knows docker compose {service}")),
                    Some(_) if !exists => Some(format!("no such service: {service}")),
                    // The program of the image begins with its name.
                    Some("run") => refusal(&built(&format!("gw-{service}")), &arguments),
                    Some(_) => None,
                };
            }
        }
    }
    Some("no service".to_owned())
}

/// `podman exec` names a container and a program in it. Behind an image are arguments of its
/// program.
fn podman(arguments: &[&str]) -> Option<String> {
    match arguments {
        ["load", ..] => None,
        ["exec", _, command @ ..] => mistake_of_program(command),
        ["run", arguments @ ..] => {
            let Some(at) = arguments
                .iter()
                .position(|word| word.starts_with("localhost/"))
            else {
                return Some("no image".to_owned());
            };
            match arguments[at]["localhost/".len()..].split(':').next() {
                Some(name @ ("gw-gateway" | "gw-agent")) => {
                    refusal(&built(name), &arguments[at + 1..])
                }
                _ => Some(format!("no such image: {}", arguments[at])),
            }
        }
        _ => Some("no test knows this command of podman".to_owned()),
    }
}

/// Folders have a kustomization; namespaces, secrets and workloads are in the manifests.
fn kubectl(arguments: &[&str]) -> Option<String> {
    let manifests = texts(&repository().join("packaging/kubernetes"));
    let has = |line: &str| {
        manifests
            .lines()
            .any(|it| it.trim_start_matches([' ', '-']) == line)
    };
    let mut mistakes = arguments.windows(2).filter_map(|pair| {
        let kind = pair[0];
        let name = pair[1].trim_start_matches("service/");
        let exists = match kind {
            "--kustomize" => repository().join(name).join("kustomization.yaml").exists(),
            "--namespace" | "namespace" => has(&format!("namespace: {name}")),
            "tls" | "generic" => has(&format!("secretName: {name}")),
            "statefulset" | "port-forward" => has(&format!("name: {name}")),
            _ => true,
        };
        (!exists).then(|| format!("no such thing in the manifests: {kind} {name}"))
    });
    mistakes.next()
}

/// All files below a folder, one after another.
fn texts(folder: &Path) -> String {
    let entries = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let texts = entries.map(|path| {
        if path.is_dir() {
            texts(&path)
        } else {
            fs::read_to_string(path).unwrap()
        }
    });
    texts.collect()
}

/// A variable of Gw that no program and no unit reads.
fn unknown_variable(word: &str) -> Option<String> {
    let is_part = |it: char| it.is_ascii_uppercase() || it.is_ascii_digit() || it == '_';
    let name = &word[..word.find(|it| !is_part(it)).unwrap_or(word.len())];
    let read = || {
        configuration::all_variables().contains(name)
            || texts(&repository().join("packaging")).contains(name)
    };
    let by_commands = [
        "GW_ADMIN_URL",
        "GW_ADMIN_CA",
        "GW_ADMIN_TOKEN",
        "GW_ADMIN_TOKEN_FILE",
        "GW_ENROLLMENT_TOKEN",
    ]
    .contains(&name);
    (name.starts_with("GW_") && !by_commands && !read()).then(|| format!("no program reads {name}"))
}

/// A path in the repository, or in the folders of an installation, that does not exist.
fn missing_file(word: &str) -> Option<String> {
    let in_repository = [
        ".ci/",
        "packaging/",
        "gateway/",
        "agent/",
        "shared/",
        "loadtest/",
        "docs/",
    ];
    let exists = if in_repository.iter().any(|folder| word.starts_with(folder)) {
        repository().join(word).exists()
    } else if word.starts_with("/etc/default/") {
        repository()
            .join("packaging/deb")
            .join(format!("{}.default", word.rsplit('/').next().unwrap()))
            .exists()
    } else if word.starts_with("/etc/gw/") || word.starts_with("/var/lib/gw") {
        texts(&repository().join("packaging")).contains(word)
    } else {
        true
    };
    (!exists).then(|| format!("no such file: {word}"))
}

/// Faults of the commands of a block, with their lines.
fn mistakes(page: &str, block: &Block) -> Vec<String> {
    let at = format!("{page}:{}", block.line);
    let syntax = Command::new("bash")
        .args(["-n", "-c", &block.text])
        .output()
        .unwrap();
    assert!(
        syntax.status.success(),
        "{at}: {}",
        String::from_utf8_lossy(&syntax.stderr)
    );
    let commands = simple_commands(&block.text);
    assert!(!commands.is_empty(), "{at}: no commands");
    let mistakes = commands
        .iter()
        .filter_map(|words| Some(format!("{at}: {}: {}", words.join(" "), mistake(words)?)));
    mistakes.collect()
}

#[test]
fn blocks_that_are_not_run_are_right() {
    let mut listed: BTreeSet<(&str, &str)> =
        NOT_RUN.map(|(page, beginning, _)| (page, beginning)).into();
    let mut wrong = Vec::new();
    for page in pages() {
        for block in split(&read(&page))
            .1
            .iter()
            .filter(|block| block.info == "sh norun")
        {
            wrong.extend(mistakes(&page, block));
            let entry = listed
                .iter()
                .find(|(of, beginning)| *of == page && block.text.starts_with(beginning))
                .copied();
            if !entry.is_some_and(|entry| listed.remove(&entry)) {
                wrong.push(format!(
                    "{page}:{}: not in the list of blocks that are not run",
                    block.line
                ));
            }
        }
    }
    assert!(
        wrong.is_empty() && listed.is_empty(),
        "{}\nlisted without a block: {listed:?}",
        wrong.join("\n")
    );
}

#[test]
fn commands_in_sentences_are_right() {
    let mut checked = 0;
    let mut wrong = Vec::new();
    for page in pages() {
        let text = read(&page);
        for (line, prose) in split(&text).0 {
            for command in code(prose).filter(|it| it.contains(' ') && is_command(it)) {
                let found = simple_commands(command);
                let mistakes = found.iter().filter_map(|words| mistake(words));
                wrong
                    .extend(mistakes.map(|mistake| format!("{page}:{line}: {command}: {mistake}")));
                checked += 1;
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(checked >= 20, "{checked}");
}

fn is_command(span: &str) -> bool {
    [
        "gw-gateway",
        "gw-agent",
        "systemctl",
        "sudo",
        "kubectl",
        "packaging/build",
    ]
    .contains(&span.split(' ').next().unwrap())
}

#[test]
fn a_wrong_command_is_found() {
    let wrong = [
        "gw-gateway key create acme --scope api",
        "sudo -u gw-agent gw-agent start",
        "systemctl start gw-gatway",
        "apt install ./gw_*.deb",
        "cargo build -p gw-relay",
        "docker compose up gw",
        "docker compose run agent enrol",
        "podman run localhost/gw-relay:1",
        "podman run --detach localhost/gw-agent:1 https 8000",
        "podman exec gw-gateway gw-gateway service make acme api",
        "kubectl apply --kustomize packaging/kubernetes",
        "kubectl --namespace gateway get pods",
        "packaging/build rpm",
        "GW_BACKENDS=http://127.0.0.1:1 gw-agent run",
        "cat packaging/none.yaml",
        "cat /etc/gw/gateway.yaml",
        "nonsense",
    ];
    for command in wrong {
        let words = simple_commands(command);
        assert!(mistake(&words[0]).is_some(), "{command}");
    }
    let right = "sudo --user gw-agent GW_BACKEND=http://127.0.0.1:1 gw-agent run --config \
                 /etc/gw/agent.toml";
    assert_eq!(mistake(&simple_commands(right)[0]), None);
}
