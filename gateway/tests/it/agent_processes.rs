//! The processes of `gw-agent run`: replaced for a new configuration, a new program, or a restart by the service manager,
//! without a failed request.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use aws_lc_rs::signature::Ed25519KeyPair;
use gw_gateway::agent_releases::program_files;
use gw_shared::identity::program::{ReleaseKey, SignedProgram, TARGET};
use gw_shared::version::Version;
use serde_json::Value;

use crate::support::held_backend::HeldBackend;
use crate::support::prepared::Prepared;
use crate::support::process::{Running, Served, gw_agent, send_signal, workers};
use crate::support::{backend, eventually};

/// The agent of `prepared` at a gateway, with a configuration file.
struct Agent<'a> {
    prepared: &'a Prepared,
    gateway: &'a Served,
}

impl Agent<'_> {
    fn configure(&self, text: &str) -> PathBuf {
        let path = self.prepared.path("agent.toml");
        fs::write(&path, text).unwrap();
        path
    }

    fn command(&self, config: &Path) -> Command {
        self.prepared.set_agent_port(self.gateway.address.port());
        let mut command = gw_agent();
        command.arg("run").arg("--config").arg(config).arg("--state-dir").arg(self.prepared.path("agent"));
        let log = OpenOptions::new().create(true).append(true).open(self.prepared.path("agent.log")).unwrap();
        command.stdin(Stdio::null()).stderr(log);
        command
    }

    /// Waits until the agent has logged `text`.
    fn wait_for_log(&self, text: &str) {
        eventually(text, || fs::read_to_string(self.prepared.path("agent.log")).unwrap().contains(text).then_some(()));
    }

    fn start(&self, config: &Path) -> Running {
        let agent = Running::new(self.command(config).spawn().unwrap());
        self.prepared.wait_for_tunnel(self.gateway.address);
        agent
    }

    /// Sends requests while `act` runs; panics if one of them fails.
    fn while_calling<T>(&self, act: impl FnOnce() -> T) -> T {
        struct StopOnDrop<'a>(&'a AtomicBool);
        impl Drop for StopOnDrop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let (stop, prepared, address) = (AtomicBool::new(false), self.prepared, self.gateway.address);
        thread::scope(|scope| {
            let callers: Vec<_> = ["/slow", "/"]
                .into_iter()
                .map(|target| {
                    let stop = &stop;
                    scope.spawn(move || {
                        let mut caller = prepared.connect(address);
                        let mut answered = 0;
                        while answered == 0 || !stop.load(Ordering::Relaxed) {
                            caller.send(prepared.get(target));
                            let response = caller.response();
                            let text = String::from_utf8_lossy(&response.body);
                            assert!(response.status.is_success(), "{target}: {} {text}", response.status);
                            answered += 1;
                        }
                    })
                })
                .collect();
            // After a failure, too.
            let stopping = StopOnDrop(&stop);
            let result = act();
            drop(stopping);
            callers.into_iter().for_each(|caller| caller.join().unwrap());
            result
        })
    }

    fn eventually_answered_with(&self, status: u16) {
        eventually("the new backend answers", || {
            let mut caller = self.prepared.connect(self.gateway.address);
            caller.send(self.prepared.get("/"));
            (caller.response().status == status).then_some(())
        });
    }

    /// What the administration API says of the agent.
    fn view(&self) -> Value {
        let out = Command::new(env!("CARGO_BIN_EXE_gw-gateway"))
            .args(["agent", "list", "demo", "--json", "--admin-url"])
            .arg(format!("http://{}", self.gateway.admin_address))
            .env("GW_ADMIN_TOKEN_FILE", self.prepared.path("data/admin.token"))
            .output()
            .unwrap();
        assert!(out.status.success(), "{out:?}");
        let page: Value = serde_json::from_slice(&out.stdout).unwrap();
        page["items"][0].clone()
    }
}

/// Waits until the supervisor has one worker, other than `before`.
fn replaced(supervisor: u32, before: u32) -> u32 {
    eventually("the worker is replaced", || match workers(supervisor).as_slice() {
        [worker] if *worker != before => Some(*worker),
        _ => None,
    })
}

fn only_worker(supervisor: u32) -> u32 {
    eventually("there is one worker", || <[u32; 1]>::try_from(workers(supervisor)).ok())[0]
}

/// A backend that answers each request with this status.
fn backend_with(status: u16) -> String {
    backend::start(move |mut peer| {
        while peer.request().is_ok() {
            peer.send(format!("HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n"));
        }
    })
}

fn configuration(url: &str) -> String {
    format!("backend = \"{url}\"\n")
}

#[test]
fn a_reload_uses_the_new_configuration_without_a_failed_request() {
    let (prepared, held) = (Prepared::new(), HeldBackend::start());
    let gateway = prepared.serve_with(&prepared.config());
    let it = Agent { prepared: &prepared, gateway: &gateway };
    let mut agent = it.start(&it.configure(&configuration(&held.url)));
    let first = only_worker(agent.id());
    let mut caller = prepared.connect(gateway.address);
    caller.send(prepared.get("/held"));
    held.wait_for_held();

    it.while_calling(|| {
        it.configure(&configuration(&backend_with(203)));
        agent.signal("HUP");
        it.eventually_answered_with(203);
    });
    // The first worker finishes the request that it has, after further replacements too.
    for _ in 0..2 {
        let before = workers(agent.id());
        agent.signal("HUP");
        eventually("the worker is replaced again", || match workers(agent.id()).as_slice() {
            [one, other] if *one == first && !before.contains(other) => Some(()),
            _ => None,
        });
    }
    held.release();
    assert_eq!(caller.response().status, 200);
    let second = replaced(agent.id(), first);

    it.while_calling(|| {
        it.configure("backend = 7\n");
        agent.signal("HUP");
        it.wait_for_log("the agent is not replaced");
        it.configure(&configuration(&backend_with(204)));
        agent.signal("USR2");
        it.eventually_answered_with(204);
    });
    let third = replaced(agent.id(), second);
    agent.signal("TERM");
    assert_eq!(agent.exit_code(), Some(0));
    assert!(!Path::new(&format!("/proc/{third}")).exists());
}

#[test]
fn a_restart_of_a_lone_agent_fails_no_request() {
    let (prepared, held) = (Prepared::new(), HeldBackend::start());
    let gateway = prepared.serve_with(&prepared.config());
    let it = Agent { prepared: &prepared, gateway: &gateway };
    let config = it.configure(&configuration(&held.url));
    let mut before = it.start(&config);
    let worker = only_worker(before.id());
    let mut caller = prepared.connect(gateway.address);
    caller.send(prepared.get("/held"));
    held.wait_for_held();

    let mut after = it.while_calling(|| {
        // What the unit of systemd does for a restart.
        before.signal("USR1");
        assert_eq!(before.exit_code(), Some(0));
        let after = Running::new(it.command(&config).spawn().unwrap());
        eventually("the second process has its tunnel", || {
            let log = fs::read_to_string(prepared.path("agent.log")).unwrap();
            (log.matches("tunnel ready").count() == 2).then_some(())
        });
        after
    });
    assert!(Path::new(&format!("/proc/{worker}")).exists(), "the first worker has a request");
    held.release();
    assert_eq!(caller.response().status, 200);
    eventually("the first worker ends", || (!Path::new(&format!("/proc/{worker}/exe")).exists()).then_some(()));
    it.while_calling(|| {});
    after.signal("TERM");
    assert_eq!(after.exit_code(), Some(0));
}

#[test]
fn a_second_signal_ends_the_worker_with_its_requests() {
    let (prepared, held) = (Prepared::new(), HeldBackend::start());
    let gateway = prepared.serve_with(&prepared.config());
    let it = Agent { prepared: &prepared, gateway: &gateway };
    let mut agent = it.start(&it.configure(&configuration(&held.url)));
    let worker = only_worker(agent.id());
    let mut caller = prepared.connect(gateway.address);
    caller.send(prepared.get("/held"));
    held.wait_for_held();
    agent.signal("TERM");
    it.wait_for_log("a second signal aborts them");
    agent.signal("TERM");
    assert_eq!(agent.exit_code(), Some(1));
    assert!(!send_signal(worker, "CONT"), "no worker is left");
    assert_eq!(caller.response().code(), "GW_RELAY_ERROR");
}

#[test]
fn a_worker_ends_with_its_requests_when_the_supervisor_is_killed() {
    let (prepared, held) = (Prepared::new(), HeldBackend::start());
    let gateway = prepared.serve_with(&prepared.config());
    let it = Agent { prepared: &prepared, gateway: &gateway };
    let config = it.configure(&configuration(&held.url));
    let agent = it.start(&config);
    let worker = only_worker(agent.id());
    let mut caller = prepared.connect(gateway.address);
    caller.send(prepared.get("/held"));
    held.wait_for_held();
    agent.signal("KILL");
    drop(agent);
    // The state folder is free at once.
    let _agent = it.start(&config);
    held.release();
    assert_eq!(caller.response().status, 200);
    eventually("the worker ends", || (!send_signal(worker, "CONT")).then_some(()));
}

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
