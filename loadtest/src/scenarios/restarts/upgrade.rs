//! A gateway goes to the next release line, and its agents update themselves.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use super::installation::{AGENT, GATEWAY, Installation};
use super::report;
use crate::callers::{CALLERS, Callers};
use crate::enrolled::output;
use crate::failure::{Failure, ensure};
use crate::report::say;

const RATE: u32 = 400;
const AGENTS: usize = 20;
const UPDATED_WITHIN: Duration = Duration::from_secs(120);
const TICK: Duration = Duration::from_millis(100);

pub(super) fn run(gateway: &Path, next: &Path, requests: usize) -> Result<(), Failure> {
    let mut installation = Installation::start(gateway)?;
    let next_gateway = next.join(GATEWAY);
    let release_key = installation.path("release.key");
    let public = output(
        Command::new(&next_gateway)
            .args(["agent-program", "new-key"])
            .arg(&release_key),
    )?;
    let public = String::from_utf8_lossy(&public).trim().to_owned();
    installation.enroll(
        AGENTS,
        &format!("update = \"auto\"\nupdate_key = {public:?}\n"),
    )?;
    let agents = (0..AGENTS)
        .map(|number| installation.start_agent(number))
        .collect::<Result<Vec<_>, _>>()?;
    installation.wait_for_tunnels(AGENTS as u64)?;
    let callers = Callers::start(&installation.target, CALLERS, RATE);
    let wait_for = |sent: usize| {
        while callers.sent() < sent {
            std::thread::sleep(TICK);
        }
    };
    wait_for(requests / 4);
    let version = version_of(&next_gateway)?;
    let mut sign = Command::new(&next_gateway);
    sign.args(["agent-program", "sign", "--key"])
        .arg(&release_key)
        .arg("--out");
    output(
        sign.arg(installation.path("agent-programs"))
            .arg(next.join(AGENT)),
    )?;
    installation.install(GATEWAY, &next_gateway)?;
    let began = Instant::now();
    installation.replace_gateway()?;
    let updated = |installation: &Installation| -> Result<usize, Failure> {
        let agents = installation.administer(&["agent", "list", "demo"])?;
        let agents = agents["items"].as_array().cloned().unwrap_or_default();
        Ok(agents
            .iter()
            .filter(|agent| agent["version"] == version.as_str())
            .count())
    };
    while updated(&installation)? < AGENTS {
        ensure(began.elapsed() < UPDATED_WITHIN, || {
            format!("not all agents run {version} after {UPDATED_WITHIN:?}")
        })?;
        std::thread::sleep(TICK);
    }
    say(format_args!(
        "restarts: {AGENTS} agents run {version} after {:.1} s",
        began.elapsed().as_secs_f64()
    ));
    wait_for(requests);
    let outcome = callers.stop()?;
    report(&format!("gateway and {AGENTS} agents upgraded"), &outcome);
    ensure(outcome.failed.is_empty(), || "requests failed".to_owned())?;
    installation.stop(agents)
}

/// Version of a program.
fn version_of(program: &Path) -> Result<String, Failure> {
    let said = output(Command::new(program).arg("--version"))?;
    let said = String::from_utf8_lossy(&said);
    said.split_whitespace()
        .nth(1)
        .map(str::to_owned)
        .ok_or_else(|| Failure::new(format!("no version in {said}")))
}
