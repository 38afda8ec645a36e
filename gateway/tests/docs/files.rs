//! Examples of files on the pages are accepted by the programs that read them. Those of Gw: see
//! configuration.rs.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use crate::commands::pages;
use crate::sources::markdown::{Block, split};
use crate::{programs, read, repository};

/// All blocks with this info string: the page, its text before the block, the block.
fn blocks(info: &str) -> Vec<(String, String, Block)> {
    let mut found = Vec::new();
    for page in pages() {
        let text = read(&page);
        for block in split(&text)
            .1
            .into_iter()
            .filter(|block| block.info == info)
        {
            let before: Vec<&str> = text.lines().take(block.line).collect();
            found.push((page.clone(), before.join("\n"), block));
        }
    }
    assert!(!found.is_empty(), "no {info}");
    found
}

/// Asserts that a program ended well, and reported nothing where `silent`.
fn assert_accepted(at: &str, output: &Output, silent: bool) {
    let said = [&*output.stdout, &output.stderr]
        .map(String::from_utf8_lossy)
        .concat();
    assert!(
        output.status.success() && (!silent || said.is_empty()),
        "{at}: {said}"
    );
}

#[test]
fn json_can_be_parsed() {
    for (page, _, block) in blocks("json") {
        let parsed = serde_json::from_str::<serde_json::Value>(&block.text);
        assert!(parsed.is_ok(), "{page}:{}: {parsed:?}", block.line);
    }
}

/// The only YAML on the pages is of Prometheus.
#[test]
fn prometheus_accepts_yaml() {
    if !programs::usable(&["promtool"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prometheus.yml");
    for (page, _, block) in blocks("yaml") {
        fs::write(&file, &block.text).unwrap();
        let output = Command::new("promtool")
            .args(["check", "config"])
            .arg(&file)
            .output()
            .unwrap();
        assert_accepted(&format!("{page}:{}", block.line), &output, false);
    }
}

/// A unit, or a part of the unit that `systemctl edit` before the block names.
#[test]
fn systemd_accepts_units() {
    if !programs::usable(&["systemd-analyze"]) {
        return;
    }
    for (page, before, block) in blocks("ini") {
        let at = format!("{page}:{}", block.line);
        let folder = tempfile::tempdir().unwrap();
        let unit = if block.text.contains("[Unit]") {
            let unit = folder.path().join("gw-example.service");
            fs::write(&unit, with_programs(&block.text)).unwrap();
            unit
        } else {
            let (_, edited) = before
                .rsplit_once("systemctl edit ")
                .unwrap_or_else(|| panic!("{at}: of which unit?"));
            let name = format!("{}.service", edited.split(['`', '\n']).next().unwrap());
            let unit = folder.path().join(&name);
            fs::write(
                &unit,
                with_programs(&read(&format!("packaging/systemd/{name}"))),
            )
            .unwrap();
            let part = folder.path().join(format!("{name}.d"));
            fs::create_dir(&part).unwrap();
            fs::write(part.join("override.conf"), &block.text).unwrap();
            unit
        };
        assert_accepted(&at, &verify(&unit), true);
    }
}

#[test]
fn systemd_accepts_the_units_of_packages() {
    if !programs::usable(&["systemd-analyze"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(repository().join("packaging/systemd")).unwrap() {
        let name = entry.unwrap().file_name();
        let text = read(&format!("packaging/systemd/{}", name.to_str().unwrap()));
        fs::write(folder.path().join(&name), with_programs(&text)).unwrap();
    }
    for unit in [
        "gw-gateway.service",
        "gw-agent.service",
        "gw-agent-enroll.service",
    ] {
        assert_accepted(unit, &verify(&folder.path().join(unit)), true);
    }
}

/// With the programs where they are built: `systemd-analyze` looks for them.
fn with_programs(unit: &str) -> String {
    let built = Path::new(env!("CARGO_BIN_EXE_gw-gateway"))
        .parent()
        .unwrap()
        .display()
        .to_string();
    unit.replace("/usr/local/bin/gw-", "/usr/bin/gw-")
        .replace("/usr/bin/gw-", &format!("{built}/gw-"))
}

fn verify(unit: &Path) -> Output {
    Command::new("systemd-analyze")
        .args(["verify", "--man=no"])
        .arg(unit)
        .output()
        .unwrap()
}
