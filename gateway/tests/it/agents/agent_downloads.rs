//! Downloads of agent programs by modified agents.

use std::fs;
use std::path::{Path, PathBuf};

use aws_lc_rs::signature::Ed25519KeyPair;
use gw_shared::identity::program::{SignedProgram, TARGET};
use gw_shared::tunnel::handshake;
use gw_shared::version::Version;
use http::Method;

use crate::support::agents::{in_process, modified_agent};
use crate::support::gateway::Gateway;
use crate::support::peers::caller::Caller;
use crate::support::processes::prepared;
use crate::support::processes::process::config_text;

/// More bytes than the kernel takes for a peer that does not read.
const PROGRAM: usize = 24 << 20;
/// Agents of the attack: more than a worker sends programs at once.
const AGENTS: usize = 40;

/// A gateway with one worker and a program for agents.
struct Setup {
    folder: tempfile::TempDir,
    gateway: Gateway,
    sha256: String,
}

impl Setup {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let programs = folder.path().join("programs");
        fs::create_dir(&programs).unwrap();
        let content = vec![7; PROGRAM];
        let key = Ed25519KeyPair::generate().unwrap();
        let signed = SignedProgram::sign(Version::own(), TARGET, &content, &key);
        let program = programs.join(format!("gw-agent-{TARGET}"));
        let description = serde_json::to_vec(&signed).unwrap();
        fs::write(program.with_extension("json"), description).unwrap();
        fs::write(program, content).unwrap();
        let config = config_text(&folder.path().join("data"), 0);
        let config = config.replace("workers = 2", "workers = 1");
        let programs = format!("agent_programs = \"{}\"\n", programs.display());
        Self {
            folder,
            gateway: Gateway::start(&(config + &programs)),
            sha256: signed.sha256,
        }
    }

    /// The state folder of a new agent of the service `api` of this account.
    fn enroll(&self, account: &str, number: usize) -> PathBuf {
        let state = self.folder.path().join(format!("{account}{number}"));
        self.gateway.enroll(account, &["api"], &state);
        state
    }

    /// Asks for the program as the agent with this state.
    fn ask(&self, account: &str, state: &Path) -> Caller {
        let host = format!("{account}--api.eu1.gw.localhost");
        let about = prepared::about(self.gateway.address(), "", self.gateway.ca_file());
        let mut peer = modified_agent::connection(&about, &host, in_process::identity(state));
        peer.send(handshake::program_request(&host, &self.sha256, None));
        peer
    }

    /// Whether the agent gets the whole program.
    fn gets_program(&self, account: &str, state: &Path) -> bool {
        let response = self.ask(account, state).response();
        response.status == 200 && response.body.len() == PROGRAM
    }
}

#[test]
fn agents_of_one_account_do_not_keep_programs_from_those_of_others() {
    let setup = Setup::new();
    for account in ["mallory", "acme", "zeta"] {
        setup.gateway.api().create_service(account, "api");
    }
    let attackers: Vec<PathBuf> = (0..AGENTS)
        .map(|number| setup.enroll("mallory", number))
        .collect();
    let mut held: Vec<Caller> = attackers
        .iter()
        .map(|state| setup.ask("mallory", state))
        .collect();
    let statuses = held
        .iter_mut()
        .map(|attacker| attacker.response_head(&Method::GET).unwrap().status);
    assert_eq!(statuses.filter(|status| *status == 200).count(), 32);
    for account in ["acme", "zeta"] {
        let agent = setup.enroll(account, 0);
        assert!(setup.gets_program(account, &agent), "{account}");
    }
    drop(held);
}

#[test]
fn an_agent_has_one_download() {
    let setup = Setup::new();
    setup.gateway.api().create_service("acme", "api");
    let agent = setup.enroll("acme", 0);
    let mut first = setup.ask("acme", &agent);
    assert_eq!(first.response_head(&Method::GET).unwrap().status, 200);
    assert!(setup.gets_program("acme", &agent));
    // The first download ends after the bytes that were on their way.
    let mut received = 0;
    while let Ok(count @ 1..) = std::io::Read::read(&mut first.stream, &mut [0; 64 * 1024]) {
        received += count;
    }
    assert!(received < PROGRAM, "{received}");
}
