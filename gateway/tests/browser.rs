//! The console in Chromium. The browser driver and the accessibility checker are installed from npm
//! with a lock file into a folder under `target`. Requirements: Node.js with npm, Chromium, bash,
//! curl, and the agent's program.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

#[path = "../../shared/tests/programs/mod.rs"]
mod programs;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/browser");

/// A child process that is killed on drop.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn run(command: &mut Command) {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}\n{}\n{}",
        text(&output.stdout),
        text(&output.stderr)
    );
}

/// `GW_CONSOLE_SCREENSHOTS` names a folder for screenshots of every page.
#[test]
fn an_administrator_uses_every_function_in_chromium() {
    if !programs::usable(&["node", "npm", "chromium", "curl", "openssl"]) {
        return;
    }
    let modules = Path::new(env!("CARGO_TARGET_TMPDIR")).join("browser-node");
    let lock = "package-lock.json";
    let wanted = Path::new(FOLDER).join(lock);
    let installed = modules.join(lock);
    if fs::read(&wanted).ok() != fs::read(&installed).ok() {
        fs::create_dir_all(&modules).unwrap();
        fs::copy(
            Path::new(FOLDER).join("package.json"),
            modules.join("package.json"),
        )
        .unwrap();
        // Removed on failure, because its presence marks a complete installation.
        fs::copy(&wanted, &installed).unwrap();
        let quiet = ["ci", "--silent", "--no-fund", "--no-audit"];
        let done = Command::new("npm")
            .args(quiet)
            .current_dir(&modules)
            .status()
            .unwrap();
        if !done.success() {
            fs::remove_file(&installed).unwrap();
            panic!("npm ci: {done}");
        }
    }
    let gateway = Path::new(env!("CARGO_BIN_EXE_gw-gateway"));
    let agent = gateway.with_file_name("gw-agent");
    assert!(
        agent.exists(),
        "build the whole workspace: cargo test --workspace"
    );
    let folder = tempfile::tempdir().unwrap();
    let mut demo = Command::new(gateway);
    demo.args([
        "demo",
        "--port",
        "0",
        "--admin-port",
        "0",
        "--workers",
        "2",
        "--json",
        "--data-dir",
    ]);
    demo.arg(folder.path().join("demo"))
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut demo = Running(demo.spawn().unwrap());
    let mut about = String::new();
    BufReader::new(demo.0.stdout.take().unwrap())
        .read_line(&mut about)
        .unwrap();
    run(Command::new("node")
        .arg(Path::new(FOLDER).join("console.cjs"))
        .arg(about.trim_end())
        .arg(agent)
        .arg(folder.path())
        .env("NODE_PATH", modules.join("node_modules")));
}
