//! An agent with its supervisor, at a gateway of its own.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use serde_json::Value;

use crate::support::eventually;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::{Running, Served, children, gw_agent, gw_gateway};

/// The agent of `prepared` at a gateway, with a configuration file.
pub(crate) struct Agent<'a> {
    pub(crate) prepared: &'a Prepared,
    pub(crate) gateway: &'a Served,
}

impl<'a> Agent<'a> {
    pub(crate) fn of(prepared: &'a Prepared, gateway: &'a Served) -> Self {
        Self { prepared, gateway }
    }

    pub(crate) fn configure(&self, text: &str) -> PathBuf {
        let path = self.prepared.path("agent.toml");
        fs::write(&path, text).unwrap();
        path
    }

    pub(crate) fn command(&self, config: &Path) -> Command {
        self.prepared.set_agent_port(self.gateway.address.port());
        let mut command = gw_agent();
        command
            .arg("run")
            .arg("--config")
            .arg(config)
            .arg("--state-dir")
            .arg(self.prepared.path("agent"));
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.prepared.path("agent.log"))
            .unwrap();
        // Without core dumps, only root can read which program a process runs.
        command
            .stdin(Stdio::null())
            .stderr(log)
            .env("GW_CORE_DUMPS", "true");
        command
    }

    /// Waits until the agent has logged `text`.
    pub(crate) fn wait_for_log(&self, text: &str) {
        eventually(text, || {
            fs::read_to_string(self.prepared.path("agent.log"))
                .unwrap()
                .contains(text)
                .then_some(())
        });
    }

    pub(crate) fn start(&self, config: &Path) -> Running {
        let agent = Running::new(self.command(config).spawn().unwrap());
        self.prepared.wait_for_tunnel(self.gateway.address);
        agent
    }

    /// Sends requests while `act` runs; panics if one of them fails.
    pub(crate) fn while_calling<T>(&self, act: impl FnOnce() -> T) -> T {
        struct StopOnDrop<'a>(&'a AtomicBool);
        impl Drop for StopOnDrop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let stop = AtomicBool::new(false);
        let prepared = self.prepared;
        let address = self.gateway.address;
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
                            assert!(
                                response.status.is_success(),
                                "{target}: {} {text}",
                                response.status
                            );
                            answered += 1;
                        }
                    })
                })
                .collect();
            // After a failure, too.
            let stopping = StopOnDrop(&stop);
            let result = act();
            drop(stopping);
            callers
                .into_iter()
                .for_each(|caller| caller.join().unwrap());
            result
        })
    }

    pub(crate) fn eventually_answered_with(&self, status: u16) {
        eventually("the new backend answers", || {
            let mut caller = self.prepared.connect(self.gateway.address);
            caller.send(self.prepared.get("/"));
            (caller.response().status == status).then_some(())
        });
    }

    /// What the administration API says of the agent.
    pub(crate) fn view(&self) -> Value {
        let out = administer(self.prepared, self.gateway, &["agent", "list", "demo"]);
        let page: Value = serde_json::from_slice(&out).unwrap();
        page["items"][0].clone()
    }
}

/// The JSON that a command of the administration prints.
pub(crate) fn administer(prepared: &Prepared, gateway: &Served, command: &[&str]) -> Vec<u8> {
    let out = gw_gateway()
        .args(command)
        .args(["--json", "--admin-url"])
        .arg(format!("http://{}", gateway.admin_address))
        .env("GW_ADMIN_TOKEN_FILE", prepared.path("data/admin.token"))
        .output()
        .unwrap();
    assert!(out.status.success(), "{out:?}");
    out.stdout
}

pub(crate) fn only_worker(supervisor: u32) -> u32 {
    eventually("there is one worker", || {
        <[u32; 1]>::try_from(children(supervisor)).ok()
    })[0]
}

/// The configuration of an agent in front of the backend at `url`.
pub(crate) fn configuration(url: &str) -> String {
    format!("backend = \"{url}\"\n")
}
