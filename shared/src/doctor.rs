//! `doctor`: checks a machine and a configuration as the program would use them, and gives advice.

pub mod holder;
pub mod machine;

use std::io::{self, Write};

use serde::Serialize;

use crate::command::Failure;
use crate::text::documentation::located;
use crate::text::{escaped, escaped_json, escaped_message};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Ok,
    /// The program runs, but slower than it could, or soon no more.
    Warning,
    /// The program does not run, or not correctly.
    Failed,
}

/// Result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Subject of the check, in a word or two.
    pub check: String,
    pub verdict: Verdict,
    pub found: String,
    /// What to do about it; `None` if all is well.
    pub advice: Option<String>,
}

/// All findings, in the order of the checks.
#[derive(Debug, Default, Serialize)]
pub struct Examination {
    checks: Vec<Finding>,
}

impl Examination {
    pub fn ok(&mut self, check: impl Into<String>, found: impl Into<String>) {
        self.note(check, Verdict::Ok, found, None);
    }

    pub fn warning(
        &mut self,
        check: impl Into<String>,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) {
        self.note(check, Verdict::Warning, found, Some(&advice.into()));
    }

    pub fn failed(
        &mut self,
        check: impl Into<String>,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) {
        self.note(check, Verdict::Failed, found, Some(&advice.into()));
    }

    fn note(
        &mut self,
        check: impl Into<String>,
        verdict: Verdict,
        found: impl Into<String>,
        advice: Option<&str>,
    ) {
        self.checks.push(Finding {
            check: check.into(),
            verdict,
            found: located(&found.into()),
            advice: advice.map(located),
        });
    }

    pub fn checks(&self) -> &[Finding] {
        &self.checks
    }

    /// Whether no check failed.
    pub fn is_good(&self) -> bool {
        self.checks
            .iter()
            .all(|finding| finding.verdict != Verdict::Failed)
    }

    /// Writes the findings to standard output; an error if a check failed.
    pub fn print(&self, json: bool) -> Result<(), Failure> {
        self.write(&mut io::stdout().lock(), json)
            .map_err(Failure::run)?;
        if self.is_good() {
            Ok(())
        } else {
            Err(Failure::Run(
                "a check failed: see the advice above".to_owned(),
            ))
        }
    }

    /// Writes a line for each finding, followed by its advice; with `json`, one object.
    pub fn write(&self, out: &mut impl Write, json: bool) -> io::Result<()> {
        if json {
            let json =
                serde_json::json!({ "ok": self.is_good(), "checks": self.checks }).to_string();
            return writeln!(out, "{}", escaped_json(&json));
        }
        let width = self
            .checks
            .iter()
            .map(|finding| finding.check.chars().count())
            .max()
            .unwrap_or(0);
        for Finding {
            check,
            verdict,
            found,
            advice,
        } in &self.checks
        {
            let verdict = match verdict {
                Verdict::Ok => "ok",
                Verdict::Warning => "warning",
                Verdict::Failed => "FAILED",
            };
            let check = escaped(check);
            let found = escaped_message(found);
            writeln!(out, "{verdict:<8} {check:<width$}  {found}")?;
            if let Some(advice) = advice {
                writeln!(out, "{:<8} {:<width$}  -> {advice}", "", "")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(json: bool) -> String {
        let mut examination = Examination::default();
        examination.ok("kernel", "6.18");
        examination.warning("open files", "1024", "raise it");
        assert!(examination.is_good());
        examination.failed("port 443", "taken", "free it");
        assert!(!examination.is_good());
        let mut out = Vec::new();
        examination.write(&mut out, json).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn findings_are_lines_followed_by_advice() {
        assert_eq!(
            written(false),
            "ok       kernel      6.18\n\
             warning  open files  1024\n                     -> raise it\n\
             FAILED   port 443    taken\n                     -> free it\n"
        );
    }

    #[test]
    fn json_has_verdicts_and_advice() {
        let found: serde_json::Value = serde_json::from_str(&written(true)).unwrap();
        assert_eq!(found["ok"], false);
        assert_eq!(found["checks"][1]["verdict"], "warning");
        assert!(found["checks"][0]["advice"].is_null());
        assert_eq!(found["checks"][2]["check"], "port 443");
    }
}
