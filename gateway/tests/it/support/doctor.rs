//! What `doctor` of both programs finds, and what programs say that have nothing to complain of.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::processes::process::{Served, gw_gateway};
use super::processes::successor::admin;

/// Checks whose verdict depends on the machine of the tests.
const OF_MACHINE: [&str; 8] = [
    "reactor",
    "open files",
    "locked memory",
    "net.core.somaxconn",
    "net.ipv4.tcp_max_syn_backlog",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
    "net.ipv4.tcp_mem",
];

pub(crate) const TUNNEL: &str = "tunnel of demo--echo.eu1.gw.localhost";
pub(crate) const BACKEND: &str = "backend of demo--echo.eu1.gw.localhost";
pub(crate) const HEALTH_CHECK: &str = "health check of demo--echo.eu1.gw.localhost";

/// Checks of a gateway on SQLite whose certificate is in files.
pub(crate) const OF_NODE: [&str; 18] = [
    "kernel",
    "clock",
    "net.ipv4.tcp_window_scaling",
    "configuration",
    "data_dir",
    "core dumps",
    "reserve",
    "secrets at rest",
    "request log",
    "listen",
    "admin_listen",
    "certificate: key",
    "certificate: names",
    "certificate: chain",
    "certificate: time",
    "name of the apex",
    "names of tenants",
    "services",
];

/// Those of an agent without a proxy.
pub(crate) const OF_AGENT: [&str; 11] = [
    "kernel",
    "clock",
    "state folder",
    "configuration",
    "core dumps",
    "certificate",
    "gateway's name",
    "gateway",
    "clock of the gateway",
    TUNNEL,
    BACKEND,
];

/// `checks` with more after the check `at`.
pub(crate) fn with<'a>(checks: &[&'a str], at: &str, more: &[&'a str]) -> Vec<&'a str> {
    let at = checks.iter().position(|check| *check == at).unwrap() + 1;
    [&checks[..at], more, &checks[at..]].concat()
}

/// `checks` for a certificate of the development authority.
pub(crate) fn of_development<'a>(checks: &[&'a str]) -> Vec<&'a str> {
    let renamed = checks.iter().map(|check| match *check {
        "certificate: key" => "certificate",
        check => check,
    });
    renamed
        .filter(|check| !check.starts_with("certificate: "))
        .collect()
}

/// `doctor` of a running gateway with this configuration file.
pub(crate) fn doctor_of(config: &Path, served: &Served) -> Command {
    let mut command = gw_gateway();
    command.arg("doctor").arg("--config").arg(config);
    command
        .env("GW_LISTEN", served.address.to_string())
        .env("GW_ADMIN_LISTEN", served.admin_address.to_string());
    command
}

/// Whether a log line complains of more than the machine of the tests.
fn is_complaint(line: &Value) -> bool {
    let text = line.to_string();
    let is_loud = ["WARN", "ERROR"].iter().any(|level| text.contains(level));
    let of_machine = ["sysctl", "io_uring", "open files", "ulimit"];
    is_loud && !of_machine.iter().any(|part| text.contains(part))
}

pub(crate) fn assert_quiet(lines: &[Value]) {
    let complaints: Vec<&Value> = lines.iter().filter(|line| is_complaint(line)).collect();
    assert!(complaints.is_empty(), "{complaints:#?}");
}

pub(crate) fn assert_quiet_gateway(served: &Served) {
    let ready = admin(served.admin_address, "/readyz");
    assert_eq!(ready, (200, "ready\n".to_owned()));
    assert_quiet(&served.log.start);
    assert_quiet(&served.log.until_now());
}

#[derive(Debug)]
pub(crate) struct Finding {
    pub(crate) check: String,
    pub(crate) verdict: String,
    pub(crate) found: String,
    /// Empty if all is well.
    pub(crate) advice: String,
}

/// All checks of one run.
#[derive(Debug)]
pub(crate) struct Findings(Vec<Finding>);

/// Runs `doctor`, a command with all its arguments but `--json`.
pub(crate) fn examine(command: &mut Command) -> Findings {
    if command.get_args().all(|argument| argument != "--json") {
        command.arg("--json");
    }
    let output = command.output().unwrap();
    let found: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!("{error}: {output:?}");
    });
    let checks = found["checks"].as_array().unwrap();
    let findings = checks.iter().map(|finding| {
        let word = |key: &str| finding[key].as_str().unwrap_or_default().to_owned();
        Finding {
            check: word("check"),
            verdict: word("verdict"),
            found: word("found"),
            advice: word("advice"),
        }
    });
    let findings: Vec<Finding> = findings.collect();
    let has_failed = findings.iter().any(|finding| finding.verdict == "failed");
    assert_eq!(output.status.success(), !has_failed, "{found:#}");
    assert_eq!(found["ok"], !has_failed, "{found:#}");
    for finding in &findings {
        let is_ok = finding.verdict == "ok";
        assert_eq!(finding.advice.is_empty(), is_ok, "{finding:?}");
    }
    Findings(findings)
}

impl Findings {
    /// The only finding of a check.
    #[track_caller]
    pub(crate) fn of(&self, check: &str) -> &Finding {
        let mut of = self.0.iter().filter(|finding| finding.check == check);
        let found = of.next().unwrap_or_else(|| panic!("no {check}: {self:#?}"));
        assert!(of.next().is_none(), "{check} is there twice: {self:#?}");
        found
    }

    /// Compares the names of all checks that do not depend on the machine, in their order, with
    /// `expected`, and all verdicts but `ok` with those in `complaints`.
    #[track_caller]
    pub(crate) fn assert(&self, expected: &[&str], complaints: &[(&str, &str)]) {
        let checks: Vec<&str> = self.own().map(|it| it.check.as_str()).collect();
        assert_eq!(checks, expected, "{self:#?}");
        self.assert_complaints(complaints);
    }

    /// Compares all verdicts but `ok` of checks that do not depend on the machine.
    #[track_caller]
    pub(crate) fn assert_complaints(&self, complaints: &[(&str, &str)]) {
        let found: Vec<(&str, &str)> = self
            .own()
            .map(|finding| (finding.check.as_str(), finding.verdict.as_str()))
            .filter(|(_, verdict)| *verdict != "ok")
            .collect();
        assert_eq!(found, complaints, "{self:#?}");
    }

    fn own(&self) -> impl Iterator<Item = &Finding> {
        let is_of_machine = |finding: &Finding| OF_MACHINE.contains(&finding.check.as_str());
        self.0.iter().filter(move |finding| !is_of_machine(finding))
    }
}
