//! Records of a region: in PostgreSQL, and what nodes know of them.

// Once, slow:
mod acknowledgment;
mod clocks;
mod forgery;
mod pending;
mod records;
mod rekey;
mod replacements;
mod store;
mod unfinished_bodies;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::processes::postgres::Postgres;
use crate::support::processes::process::gw_gateway;

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

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

/// Runs a command of `gw-gateway region` with a configuration file and `more` arguments.
fn region_command(command: &str, config: &Path, more: &[&str]) -> Ended {
    let mut gateway = gw_gateway();
    gateway.args(["region", command, "--config"]);
    let output = gateway.arg(config).args(more).output().unwrap();
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

    /// Asserts that the command has failed, and that its message contains each of `parts`.
    #[track_caller]
    fn assert_failed(&self, parts: &[&str]) {
        assert_eq!(self.code, 1, "{self:?}");
        assert_says(&self.err, parts);
    }
}

/// Writes the configuration of a node with this data folder to a file beside the folder.
fn config_file(postgres: &Postgres, data_dir: &Path) -> PathBuf {
    let path = data_dir.with_file_name("gateway.toml");
    fs::write(&path, postgres.config(data_dir)).unwrap();
    path
}

/// Ends threads that run until this is set, also if the test fails.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
