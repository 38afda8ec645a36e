//! The administration API, commands, console and metrics, and what they refuse.

// Once:
mod access_tokens;
mod admin;
mod admin_abuse;
mod admin_tls;
mod cli_commands;
pub(crate) mod console;
mod documents;
mod error_messages;
mod hostile_text;
mod input_validation;
mod metrics;
mod sealed_secrets;
mod secrets;
mod traces;

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::support::processes::process::{Served, config_text, gw_gateway, serve, serve_command};

/// Asserts that `text` contains each of `parts`.
#[track_caller]
fn assert_says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }
}

/// Exit code and output of a command.
#[derive(Debug)]
struct Ended {
    code: i32,
    out: String,
    err: String,
}

/// Runs a command to its end.
fn end(command: &mut Command) -> Ended {
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ended {
        code: output.status.code().unwrap(),
        out: text(output.stdout),
        err: text(output.stderr),
    }
}

impl Ended {
    /// The standard output of a command that succeeds.
    #[track_caller]
    fn done(self) -> String {
        assert_eq!(self.code, 0, "{self:?}");
        self.out
    }

    /// Asserts the exit code of a failure, and that its message contains each of `parts`.
    #[track_caller]
    fn assert_failed(&self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, code, "{self:?}");
        assert_says(&self.err, parts);
    }
}

/// A folder with the configuration of a gateway, whose data folder is `data` in it.
struct Installation(tempfile::TempDir);

impl Installation {
    fn new() -> Self {
        Self::with("")
    }

    /// Appends `more` to the configuration.
    fn with(more: &str) -> Self {
        let installation = Self(tempfile::tempdir().unwrap());
        let text = config_text(&installation.path("data"), 0) + more;
        fs::write(installation.config(), text).unwrap();
        installation
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The configuration file.
    fn config(&self) -> PathBuf {
        self.path("gateway.toml")
    }

    fn serve_command(&self) -> Command {
        serve_command(&self.config())
    }

    fn serve(&self) -> Served {
        serve(&mut self.serve_command())
    }

    /// `gw-gateway doctor` with the configuration file.
    fn doctor(&self) -> Command {
        let mut command = gw_gateway();
        command.arg("doctor").arg("--config").arg(self.config());
        command
    }

    /// `gw-gateway` with the admin token and the address of the running gateway.
    fn administer(&self, served: &Served) -> Command {
        let url = format!("http://{}", served.admin_address);
        let mut command = gw_gateway();
        command.env("GW_ADMIN_URL", url);
        command.env("GW_ADMIN_TOKEN_FILE", self.path("data/admin.token"));
        command
    }
}
