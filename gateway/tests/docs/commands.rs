//! Every command of the README and of docs/ is run, or marked where a test cannot run it.
//!
//! | info string | block |
//! |---|---|
//! | `sh` | commands that a test runs: see session.rs |
//! | `console` | commands behind `$`, and their output |
//! | `sh norun` | commands that need the network, another machine or a package |
//! | `text usage` | the commands of a program with their options: see usage.rs |
//! | `toml`, `ini`, `json`, `yaml` | files: see configuration.rs and files.rs |
//! | `text` | anything else; commands in it are indented: output of programs |

use std::fs;

use crate::sources::markdown::{Block, split};
use crate::sources::session::{Given, run};
use crate::{programs, read, repository};

macro_rules! pages {
    ($($test:ident: $page:literal, $given:ident;)*) => {
        const RUN: &[&str] = &[$($page),*];
        $(
            #[test]
            fn $test() {
                run_page($page, Given::$given);
            }
        )*
    };
}

pages! {
    the_commands_of_the_readme_work: "README.md", Machine;
    the_commands_about_administration_work: "docs/administration.md", Gateway;
    the_commands_about_agents_work: "docs/agent.md", Gateway;
    the_commands_about_authentication_work: "docs/authentication.md", Gateway;
    the_commands_about_backup_work: "docs/backup.md", Gateway;
    the_commands_about_documents_work: "docs/declarative.md", Gateway;
    the_commands_about_deployment_work: "docs/deployment.md", Machine;
    the_commands_about_packages_work: "docs/packages.md", Gateway;
    the_commands_of_the_quickstart_work: "docs/quickstart.md", Machine;
    the_commands_of_the_recipes_work: "docs/recipes.md", Agent;
    the_commands_about_the_request_log_work: "docs/request-log.md", Agent;
    the_commands_about_troubleshooting_work: "docs/troubleshooting.md", Agent;
    the_commands_about_upgrades_work: "docs/upgrade.md", Agent;
}

fn is_run(block: &Block) -> bool {
    ["sh", "console"].contains(&&*block.info)
}

fn run_page(page: &str, given: Given) {
    if !programs::usable(&["curl", "jq", "python3", "unshare"]) {
        return;
    }
    let (_, blocks) = split(&read(page));
    let blocks: Vec<&Block> = blocks.iter().filter(|block| is_run(block)).collect();
    assert!(!blocks.is_empty(), "{page} has no commands");
    run(page, given, &blocks);
}

/// The README and the pages of docs/, by their paths.
pub(crate) fn pages() -> Vec<String> {
    let names = fs::read_dir(repository().join("docs"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    let pages = names
        .map(|name| format!("docs/{}", name.to_str().unwrap()))
        .filter(|name| name.ends_with(".md"));
    let mut pages: Vec<String> = pages.chain(["README.md".to_owned()]).collect();
    pages.sort();
    pages
}

/// Programs whose commands must not hide in blocks of other kinds.
const PROGRAMS: [&str; 16] = [
    "apt",
    "apt-get",
    "cargo",
    "curl",
    "docker",
    "git",
    "gw-agent",
    "gw-gateway",
    "gw-loadtest",
    "jq",
    "kubectl",
    "openssl",
    "sqlite3",
    "ssh",
    "sudo",
    "systemctl",
];

/// The program of a line of shell, without its folder.
fn first_word(line: &str) -> &str {
    let line = line.trim_start().trim_start_matches("$ ");
    let is_assignment = |word: &&str| word.contains('=') && !word.starts_with('-');
    let mut words = line.split_whitespace().skip_while(is_assignment);
    words.next().unwrap_or_default().rsplit('/').next().unwrap()
}

#[test]
fn every_block_with_commands_is_run_or_marked() {
    let mut wrong = Vec::new();
    for page in pages() {
        for block in split(&read(&page)).1 {
            let at = format!("{page}:{}", block.line);
            match block.info.as_str() {
                "sh" | "console" if !RUN.contains(&&*page) => {
                    wrong.push(format!("{at}: no test runs this page"));
                }
                "sh" | "console" | "sh norun" | "text usage" | "toml" | "ini" | "json" | "yaml" => {
                }
                "text" => {
                    let mut lines = block.text.lines();
                    if let Some(line) = lines
                        .find(|line| !line.starts_with(' ') && PROGRAMS.contains(&first_word(line)))
                    {
                        wrong.push(format!("{at}: a block of commands is marked sh: {line}"));
                    }
                }
                other => wrong.push(format!("{at}: no test knows blocks marked {other:?}")),
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
