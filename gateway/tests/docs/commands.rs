//! The commands of the README and of the quickstart work as they are printed.
//!
//! All `sh` blocks of a page run in one shell, one after another, as if a reader pasted them. The shell has a network
//! of its own, so that every port of the page is free. Marked `sh,norun`, a block is left out.

use std::fmt::Write;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::markdown::{Block, split};
use crate::{programs, read, repository};

/// Stands for cargo: the programs are built already.
const CARGO: &str = r#"#!/bin/sh
case "$*" in
"build --release" | "build --release --locked") ;;
"run --release --bin gw-gateway -- "*) shift 5; exec gw-gateway "$@" ;;
"run --release --locked --bin gw-gateway -- "*) shift 6; exec gw-gateway "$@" ;;
*) echo "cargo $*: a test does not run this; mark the block sh,norun" >&2; exit 1 ;;
esac
"#;

/// Brings the loopback interface up: SIOCSIFFLAGS with IFF_UP and IFF_RUNNING.
const NETWORK: &str = "python3 -c 'import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack(\"16sh14x\", b\"lo\", 0x41))'";

/// Runs `COMMAND` until it has printed how to stop it, runs the commands that it has printed with their output in
/// `$HOME/demo`, and stops it as Ctrl-C does.
const DEMO: &str = r#"exec 3< <(exec COMMAND)
demo=$!
printed=
while IFS= read -r line <&3; do
    # A stream without end is left after its first event.
    if [[ $line == *" -N "* ]]; then line+=" | grep -m1 ^data:"; fi
    if [[ $line == "  "* ]]; then printed+=$line$'\n'; fi
    if [[ $line == *Ctrl-C* ]]; then break; fi
done
bash -eu <<<"$printed" >"$HOME/demo"
kill -INT $demo
wait $demo
"#;

/// The one command of a block that runs a demo.
fn demo(block: &Block) -> Option<&str> {
    let mut commands = block.text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
    let command = commands.next()?.split(" #").next()?;
    let is_demo = command.contains("gw-gateway") && command.split(' ').any(|word| word == "demo");
    (is_demo && commands.next().is_none()).then_some(command)
}

/// A program and every process that it starts; they end with this.
struct Group(Child);

impl Drop for Group {
    fn drop(&mut self) {
        let id = Pid::from_child(&self.0);
        let _ = kill_process_group(id, Signal::KILL);
        drop(self.0.wait());
    }
}

/// Runs the `sh` blocks of `page`, and returns how many there are.
fn run(page: &str) -> usize {
    let (_, blocks) = split(&read(page));
    let hidden: Vec<_> = blocks.iter().filter(|block| ["bash", "shell", "console"].contains(&&*block.info)).collect();
    assert!(hidden.is_empty(), "{page}: commands are in blocks marked sh: {hidden:?}");
    let blocks: Vec<&Block> = blocks.iter().filter(|block| block.info == "sh").collect();
    let mut script = format!("set -euo pipefail\n{NETWORK}\n");
    for block in &blocks {
        writeln!(script, "echo \"{page}:{}\" >&2", block.line).unwrap();
        match demo(block) {
            Some(command) => script.push_str(&DEMO.replace("COMMAND", command)),
            None => script.push_str(&block.text),
        }
    }

    let folder = tempfile::tempdir().unwrap();
    let [bin, checkout, home] = ["bin", "checkout", "home"].map(|name| folder.path().join(name));
    for folder in [&bin, &checkout, &home] {
        fs::create_dir(folder).unwrap();
    }
    let built = Path::new(env!("CARGO_BIN_EXE_gw-gateway")).parent().unwrap();
    assert!(built.join("gw-agent").exists(), "build the whole workspace: cargo test --workspace");
    for program in ["gw-gateway", "gw-agent"] {
        symlink(built.join(program), bin.join(program)).unwrap();
    }
    fs::write(bin.join("cargo"), CARGO).unwrap();
    fs::set_permissions(bin.join("cargo"), Permissions::from_mode(0o755)).unwrap();
    // A page may use files of the repository, and the programs where a release build leaves them.
    for name in ["LICENSE-MIT", "LICENSE-APACHE", "README.md", "packaging"] {
        symlink(repository().join(name), checkout.join(name)).unwrap();
    }
    fs::create_dir(checkout.join("target")).unwrap();
    symlink(&bin, checkout.join("target/release")).unwrap();

    let search = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let log = folder.path().join("log");
    let out = File::create(&log).unwrap();
    let mut command = Command::new("timeout");
    command.args(["120", "unshare", "--user", "--map-root-user", "--net", "bash", "-c", &script]);
    command
        .env_clear()
        .env("PATH", search)
        .env("HOME", &home)
        .envs(std::env::var("GW_DRIVER").map(|it| ("GW_DRIVER", it)));
    command.current_dir(&checkout).stdin(Stdio::null()).stdout(out.try_clone().unwrap()).stderr(out).process_group(0);
    let mut group = Group(command.spawn().unwrap());
    let status = group.0.wait().unwrap();
    drop(group);
    let log = String::from_utf8_lossy(&fs::read(log).unwrap()).into_owned();
    assert!(status.success(), "{page}: {status}\n{log}");
    // curl succeeds with responses that are errors.
    assert!(!log.contains("{\"error\":"), "{page}: an error of the gateway:\n{log}");
    if blocks.iter().any(|block| demo(block).is_some()) {
        let printed = fs::read_to_string(home.join("demo")).unwrap();
        // The echoed request, an event, the refusal of a request without a key, a token, the list of agents, the metrics.
        for part in ["/hello?name=you", "data: ", "GW_AUTH_REQUIRED", "access_token", "ag_", "gw_build_info"] {
            assert!(printed.contains(part), "{page}: the printed commands of the demo: no {part} in\n{printed}");
        }
    }
    blocks.len()
}

const PROGRAMS: [&str; 4] = ["curl", "jq", "python3", "unshare"];

#[test]
fn the_commands_of_the_readme_work() {
    if programs::usable(&PROGRAMS) {
        let blocks = run("README.md");
        assert!(blocks >= 1, "{blocks}");
    }
}

#[test]
fn the_commands_of_the_quickstart_work() {
    if programs::usable(&PROGRAMS) {
        let blocks = run("docs/quickstart.md");
        assert!(blocks >= 6, "{blocks}");
    }
}
