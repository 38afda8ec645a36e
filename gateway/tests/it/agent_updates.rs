//! Updates of the agent's program: offered by the gateway, signed with a release key, run without a failed request.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use aws_lc_rs::signature::Ed25519KeyPair;
use gw_gateway::agent_releases::program_files;
use gw_shared::identity::program::{ReleaseKey, SignedProgram, TARGET};
use gw_shared::version::Version;

use crate::support::eventually;
use crate::support::held_backend::HeldBackend;
use crate::support::prepared::Prepared;
use crate::support::process::{gw_agent, workers};
use crate::support::supervised_agent::{Agent, configuration, only_worker};

/// A release key, and programs signed with it that the gateway of `prepared` offers.
struct Release<'a> {
    prepared: &'a Prepared,
    key: Ed25519KeyPair,
}

impl Release<'_> {
    /// Offers `content` as the program of the next patch version.
    fn offer(&self, content: &[u8]) -> SignedProgram {
        let mut version = Version::own();
        version.patch += 1;
        let signed = SignedProgram::sign(version, TARGET, content, &self.key);
        self.put(&signed, content);
        signed
    }

    fn put(&self, signed: &SignedProgram, content: &[u8]) {
        let folder = self.prepared.path("data/agent-programs");
        fs::create_dir_all(&folder).unwrap();
        let (program, description) = program_files(&folder, TARGET);
        fs::write(program, content).unwrap();
        fs::write(description, serde_json::to_vec(signed).unwrap()).unwrap();
    }

    /// The configuration of an agent that updates itself.
    fn configuration(&self, url: &str) -> String {
        format!("{}update = \"auto\"\nupdate_key = \"{}\"\n", configuration(url), ReleaseKey::of(&self.key))
    }
}

/// The agent's own program, as a stand-in for that of a later version.
fn program() -> Vec<u8> {
    fs::read(gw_agent().get_program()).unwrap()
}

fn executable(worker: u32) -> PathBuf {
    fs::read_link(format!("/proc/{worker}/exe")).unwrap()
}

#[test]
fn an_agent_updates_itself_without_a_failed_request() {
    let (prepared, backend) = (Prepared::new(), HeldBackend::start());
    let release = Release { prepared: &prepared, key: Ed25519KeyPair::generate().unwrap() };
    let signed = release.offer(&program());
    let gateway = prepared.serve_with(&prepared.config());
    let it = Agent { prepared: &prepared, gateway: &gateway };
    let mut agent = it.start(&it.configure(&configuration(&backend.url)));
    let programs = prepared.path("agent/programs");
    // A reload turns updates on.
    let config = it.configure(&release.configuration(&backend.url));
    let updated = it.while_calling(|| {
        agent.signal("HUP");
        eventually("the program in the state folder runs", || {
            let [worker] = <[u32; 1]>::try_from(workers(agent.id())).ok()?;
            executable(worker).starts_with(&programs).then_some(worker)
        })
    });
    let file = executable(updated);
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o700);
    assert!(file.to_str().unwrap().contains(&signed.version.to_string()), "{file:?}");
    eventually("the agent reports that it takes updates", || (it.view()["update"]["state"] == "ready").then_some(()));

    // The next start uses the program, unless it was changed.
    agent.signal("TERM");
    assert_eq!(agent.exit_code(), Some(0));
    let mut agent = it.start(&config);
    assert_eq!(executable(only_worker(agent.id())), file);
    agent.signal("TERM");
    assert_eq!(agent.exit_code(), Some(0));
    let mut changed = fs::read(&file).unwrap();
    *changed.last_mut().unwrap() ^= 1;
    fs::remove_file(&file).unwrap();
    fs::write(&file, changed).unwrap();
    // A changed program is not used, but downloaded again.
    let agent = it.start(&config);
    it.wait_for_log("using the installed one");
    eventually("the program is downloaded again", || {
        let [worker] = <[u32; 1]>::try_from(workers(agent.id())).ok()?;
        (executable(worker) == file).then_some(())
    });
}

#[test]
fn a_program_that_does_not_serve_is_given_up_without_a_failed_request() {
    let (prepared, backend) = (Prepared::new(), HeldBackend::start());
    let release = Release { prepared: &prepared, key: Ed25519KeyPair::generate().unwrap() };
    release.offer(b"#!/bin/sh\nexit 7\n");
    let gateway = prepared.serve_with(&prepared.config());
    let it = Agent { prepared: &prepared, gateway: &gateway };
    let agent = it.start(&it.configure(&release.configuration(&backend.url)));
    let worker = only_worker(agent.id());
    let update = it.while_calling(|| {
        eventually("the agent reports the failure", || {
            Some(it.view()["update"].clone()).filter(|update| update["state"] == "failed")
        })
    });
    assert!(update["error"].as_str().unwrap().contains("exit code 7"), "{update}");
    assert_eq!(only_worker(agent.id()), worker, "the same worker goes on");
    assert_eq!(fs::read_dir(prepared.path("agent/programs")).unwrap().count(), 0, "the program is removed");
    it.while_calling(|| {});
}

#[test]
fn programs_by_another_key_are_refused() {
    let (prepared, backend) = (Prepared::new(), HeldBackend::start());
    let release = Release { prepared: &prepared, key: Ed25519KeyPair::generate().unwrap() };
    let other = Release { prepared: &prepared, key: Ed25519KeyPair::generate().unwrap() };
    other.offer(&program());
    let gateway = prepared.serve_with(&prepared.config());
    let it = Agent { prepared: &prepared, gateway: &gateway };
    let agent = it.start(&it.configure(&release.configuration(&backend.url)));
    let update = eventually("the agent reports the failure", || {
        Some(it.view()["update"].clone()).filter(|update| update["state"] == "failed")
    });
    assert!(update["error"].as_str().unwrap().contains("signature"), "{update}");
    assert_eq!(executable(only_worker(agent.id())), PathBuf::from(gw_agent().get_program()));
    assert!(!prepared.path("agent/programs").exists(), "nothing was stored");
}
