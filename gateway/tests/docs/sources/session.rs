//! Runs the commands of a page as they are printed: all blocks in one shell, one after another, as
//! if a reader pasted them.
//!
//! The shell has a network and folders of its own (`machine/enter.sh`), so that the names, ports
//! and paths of a page are those of the test. A page needs no substitutions; these programs are
//! replaced: `cargo`, `sudo` and `systemctl`.

use std::fmt::Write;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::repository;
use crate::sources::markdown::Block;

/// Commands that run before the first block of a page.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Given {
    /// A backend, and a certificate for the region.
    Machine,
    /// Also a gateway with an account and two services.
    Gateway,
    /// Also an agent of both services.
    Agent,
}

const ENTER: &str = include_str!("../machine/enter.sh");
const GATEWAY: &str = include_str!("../machine/gateway.sh");
const AGENT: &str = include_str!("../machine/agent.sh");
const BACKEND: &str = include_str!("../machine/backend.py");
const REPLACED: [(&str, &str); 3] = [
    ("cargo", include_str!("../machine/cargo")),
    ("sudo", include_str!("../machine/sudo")),
    ("systemctl", include_str!("../machine/systemctl")),
];

/// Runs `COMMAND` until it has printed how to stop it, runs the commands that it has printed with
/// their output in `$HOME/demo`, and stops it as Ctrl-C does. A gateway that has its ports stops
/// for that time, and so do its agents' tunnels.
const DEMO: &str = r#"
[[ ! -e $MACHINE/units/gw-gateway ]] || { systemctl stop gw-gateway; paused=1; }
exec 3< <(exec COMMAND)
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
[[ ! ${paused:-} ]] || { systemctl start gw-gateway; wait_for served; }
"#;

/// The one command of a block that runs a demo.
fn demo(block: &Block) -> Option<&str> {
    let mut commands = block
        .text
        .lines()
        .filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
    let command = commands.next()?.split(" #").next()?;
    let is_demo = command.contains("gw-gateway") && command.split(' ').any(|word| word == "demo");
    (is_demo && commands.next().is_none()).then_some(command)
}

/// An agent in the foreground ends by Ctrl-C.
fn in_foreground(line: &str) -> bool {
    let line = line.trim_start_matches("sudo ");
    ["gw-agent run ", "gw-agent http "]
        .iter()
        .any(|command| line.starts_with(command))
        && !line.ends_with('&')
}

/// The commands of an `sh` block.
fn commands(block: &Block) -> String {
    let lines = block.text.lines().map(|line| {
        format!(
            "{}{line}\n",
            if in_foreground(line) {
                "foreground "
            } else {
                ""
            }
        )
    });
    demo(block).map_or_else(
        || lines.collect(),
        |command| DEMO.replace("COMMAND", command),
    )
}

/// The commands of a `console` block, which follow a `$`, with checks of their output: it has a
/// line that begins with the first column of each printed line.
fn console(block: &Block) -> String {
    let mut script = String::new();
    for line in block.text.lines() {
        if let Some(command) = line.strip_prefix("$ ") {
            // Not in a subshell: the command may set variables.
            writeln!(
                script,
                "{{ {command}\n}} >\"$HOME/console\"\ncat \"$HOME/console\""
            )
            .unwrap();
        } else if line.trim() != "…" {
            let first = line.trim().split("  ").next().unwrap();
            let missing = format!("echo \"no line begins with '{first}'\" >&2; exit 1");
            writeln!(
                script,
                "grep --quiet '^ *{first}  ' \"$HOME/console\" || {{ {missing}; }}"
            )
            .unwrap();
        }
    }
    script
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

/// Writes an authority, a certificate of it for eu1.example.com and the names below, and its key.
fn write_certificate(folder: &Path) {
    let mut authority = CertificateParams::default();
    authority
        .distinguished_name
        .push(DnType::CommonName, "an authority");
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let names = ["eu1.example.com", "*.eu1.example.com"].map(str::to_owned);
    let certificate = CertificateParams::new(names)
        .unwrap()
        .signed_by(&key, &authority)
        .unwrap();
    fs::write(folder.join("ca.pem"), authority.pem()).unwrap();
    fs::write(
        folder.join("fullchain.pem"),
        certificate.pem() + &authority.pem(),
    )
    .unwrap();
    fs::write(folder.join("key.pem"), key.serialize_pem()).unwrap();
}

/// The script with these blocks.
fn script(page: &str, given: Given, blocks: &[&Block]) -> String {
    let mut script = format!("set -euo pipefail\n{ENTER}");
    if given != Given::Machine {
        script += GATEWAY;
    }
    if given == Given::Agent {
        script += AGENT;
    }
    for block in blocks {
        writeln!(script, "echo \"{page}:{}\" >&2", block.line).unwrap();
        script += &if block.info == "console" {
            console(block)
        } else {
            commands(block)
        };
    }
    if given != Given::Machine {
        script += "echo 'after the page' >&2\ngw-gateway account show acme\n";
    }
    script
}

/// Puts the built programs, replacements of others, and files of the repository where a page finds
/// them.
fn put_programs(built: &Path, bin: &Path, checkout: &Path) {
    for program in ["gw-gateway", "gw-agent"] {
        symlink(built.join(program), bin.join(program)).unwrap();
    }
    for (name, text) in REPLACED {
        fs::write(bin.join(name), text).unwrap();
        fs::set_permissions(bin.join(name), Permissions::from_mode(0o755)).unwrap();
    }
    // A page may use files of the repository, and the programs where a build leaves them.
    for name in ["LICENSE-MIT", "LICENSE-APACHE", "README.md", "packaging"] {
        symlink(repository().join(name), checkout.join(name)).unwrap();
    }
    fs::create_dir(checkout.join("target")).unwrap();
    for profile in ["release", "demo"] {
        symlink(bin, checkout.join("target").join(profile)).unwrap();
    }
}

/// Checks what the commands that a demo prints have answered.
fn check_printed_by_demo(page: &str, home: &Path, command: &str) {
    let printed = fs::read_to_string(home.join("demo")).unwrap();
    // The echoed request and an event, or the answer of the page's backend.
    let answers: &[&str] = match command.contains("--backend") {
        true => &["GET /\n"],
        false => &["/hello?name=you", "data: "],
    };
    // The refusal of a request without a key, a token, the list of agents, the metrics.
    let others = ["GW_AUTH_REQUIRED", "access_token", "ag_", "gw_build_info"];
    for part in answers.iter().chain(&others) {
        assert!(
            printed.contains(part),
            "{page}: the printed commands of the demo: no {part} in\n{printed}"
        );
    }
}

/// Runs `blocks` of `page`, which are `sh` or `console`.
pub(crate) fn run(page: &str, given: Given, blocks: &[&Block]) {
    let script = script(page, given, blocks);
    let folder = tempfile::tempdir().unwrap();
    let [bin, checkout, home, given, machine] =
        ["bin", "checkout", "home", "given", "machine"].map(|name| folder.path().join(name));
    for folder in [&bin, &checkout, &home, &given, &machine] {
        fs::create_dir(folder).unwrap();
    }
    write_certificate(&given);
    fs::write(given.join("backend.py"), BACKEND).unwrap();
    let built = Path::new(env!("CARGO_BIN_EXE_gw-gateway"))
        .parent()
        .unwrap();
    assert!(
        built.join("gw-agent").exists(),
        "build the whole workspace: cargo test --workspace"
    );
    put_programs(built, &bin, &checkout);
    let search = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let log = folder.path().join("log");
    let out = File::create(&log).unwrap();
    let mut command = Command::new("timeout");
    command.args([
        "120",
        "unshare",
        "--user",
        "--map-root-user",
        "--net",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
    ]);
    command
        .args(["bash", "-c", &script])
        .env_clear()
        .env("PATH", search)
        .env("HOME", &home)
        .env("GIVEN", &given)
        .env("MACHINE", &machine)
        .env("PROGRAMS", built)
        .envs(std::env::var("GW_DRIVER").map(|it| ("GW_DRIVER", it)));
    command
        .current_dir(&checkout)
        .stdin(Stdio::null())
        .stdout(out.try_clone().unwrap())
        .stderr(out)
        .process_group(0);
    let mut group = Group(command.spawn().unwrap());
    let status = group.0.wait().unwrap();
    drop(group);
    let log = String::from_utf8_lossy(&fs::read(log).unwrap()).into_owned();
    assert!(status.success(), "{page}: {status}\n{log}");
    // curl succeeds with responses that are errors.
    assert!(
        !log.contains("{\"error\":"),
        "{page}: an error of the gateway:\n{log}"
    );
    if let Some(command) = blocks.iter().find_map(|block| demo(block)) {
        check_printed_by_demo(page, &home, command);
    }
}
