//! The restrictions of the units.

use std::fs;
use std::process::Command;

use crate::{programs, repository, run};

const SERVICES: [&str; 3] = ["gw-gateway", "gw-agent", "gw-agent-enroll"];

/// Highest rating of `systemd-analyze security`, in tenths.
const THRESHOLD: u32 = 20;

#[test]
fn systemd_rates_the_units_as_safe() {
    if !programs::usable(&["systemd-analyze"]) {
        return;
    }
    for service in SERVICES {
        let unit = repository().join(format!("packaging/systemd/{service}.service"));
        let rate = |threshold: u32| {
            let mut command = Command::new("systemd-analyze");
            command
                .args(["security", "--offline=yes", "--no-pager"])
                .arg(format!("--threshold={threshold}"))
                .arg(&unit);
            command
        };
        run(&mut rate(THRESHOLD));
        // The threshold is one.
        let output = rate(1).output().unwrap();
        assert!(!output.status.success(), "{service}: {output:?}");
    }
}

#[test]
fn the_units_have_the_restrictions_of_the_security_model() {
    let page = fs::read_to_string(repository().join("docs/security.md")).unwrap();
    let (_, section) = page.split_once("### Hardening of the units").unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| "));
    let cells = rows.filter_map(|row| row.trim_end_matches(" |").rsplit_once(" | "));
    let directives: Vec<&str> = cells
        .flat_map(|(_, lines)| lines.split('`').skip(1).step_by(2))
        .filter(|code| code.contains('='))
        .collect();
    assert!(directives.len() > 20, "{directives:?}");
    for service in SERVICES {
        let unit = repository().join(format!("packaging/systemd/{service}.service"));
        let text = fs::read_to_string(unit).unwrap();
        for directive in &directives {
            let has = |line: &str| match directive.strip_suffix('=') {
                // With a value, which is in the other column.
                Some(_) => line.starts_with(directive),
                None => line == *directive,
            };
            assert!(text.lines().any(has), "{service}: no line {directive}");
        }
    }
}
