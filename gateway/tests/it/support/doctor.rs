//! What `doctor` of both programs finds.

use std::process::Command;

use serde_json::Value;

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
