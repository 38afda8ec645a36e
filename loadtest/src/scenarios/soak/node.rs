//! The process of a node, which another process may replace.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;

use crate::admin_api::AdminApi;
use crate::failure::{Failure, wait_until};
use crate::machine::process::{self, Process};
use crate::machine::procfs;

/// URL of the admin listener, on the machine of the node.
pub(super) const ADMIN_URL: &str = "http://127.0.0.1:9080";
const SETTLED_WITHIN: Duration = Duration::from_secs(60);

pub(super) struct Node {
    /// The process that this program has started; `None` once it has ended.
    child: Option<Process>,
    /// The process that has replaced it.
    successor: Option<u32>,
    /// Folder of its data; the names of configuration and log begin with its name.
    data: PathBuf,
    pub(super) api: AdminApi,
}

impl Node {
    /// A node that does not run yet, with this configuration.
    pub(super) fn new(data: PathBuf, configuration: &str) -> Result<Self, Failure> {
        fs::write(data.with_extension("toml"), configuration)?;
        Ok(Self {
            child: None,
            successor: None,
            data,
            api: AdminApi::new(ADMIN_URL, ""),
        })
    }

    pub(super) fn config(&self) -> PathBuf {
        self.data.with_extension("toml")
    }

    pub(super) fn is_running(&self) -> bool {
        self.pid().is_some_and(procfs::runs)
    }

    fn pid(&self) -> Option<u32> {
        let child = self.child.as_ref().map(Process::pid);
        self.successor.or(child)
    }

    pub(super) fn start(&mut self, program: &Path) -> Result<(), Failure> {
        let mut serve = process::command(program, &[])?;
        serve.args(["serve", "--config"]).arg(self.config());
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.data.with_extension("log"))?;
        serve.stdin(Stdio::null()).stdout(log.try_clone()?);
        self.child = Some(Process::spawn("gw-gateway", serve.stderr(log))?);
        // The first start of the first node makes the token.
        let path = self.data.join("admin.token");
        let mut token = String::new();
        let otherwise = || format!("{} does not exist", path.display());
        wait_until(SETTLED_WITHIN, otherwise, || {
            token = fs::read_to_string(&path).unwrap_or_default();
            Ok(!token.is_empty())
        })?;
        self.api = AdminApi::new(ADMIN_URL, token.trim());
        Ok(())
    }

    /// Stops it in order.
    pub(super) fn stop(&mut self) -> Result<(), Failure> {
        self.end_successor(Signal::TERM)?;
        self.child.take().map_or(Ok(()), Process::stop)
    }

    pub(super) fn kill(&mut self) -> Result<(), Failure> {
        self.end_successor(Signal::KILL)?;
        self.child.take().map_or(Ok(()), Process::kill)
    }

    fn end_successor(&mut self, signal: Signal) -> Result<(), Failure> {
        let Some(pid) = self.successor.take() else {
            return Ok(());
        };
        procfs::signal_all(&[pid], signal);
        let otherwise = || format!("process {pid} does not end");
        wait_until(SETTLED_WITHIN, otherwise, || Ok(!procfs::runs(pid)))
    }

    /// Freezes (`Signal::STOP`) or continues (`Signal::CONT`) it.
    pub(super) fn signal(&self, signal: Signal) {
        let pids = self.pid().map(procfs::tree);
        procfs::signal_all(&pids.unwrap_or_default(), signal);
    }

    /// Replaces the process, and waits until the old one has ended.
    pub(super) fn replace(&mut self) -> Result<(), Failure> {
        let old = self
            .pid()
            .ok_or_else(|| Failure::new("the node does not run"))?;
        procfs::signal_all(&[old], Signal::USR2);
        let mut successor = None;
        let otherwise = || format!("{} is not replaced", self.data.display());
        wait_until(SETTLED_WITHIN, otherwise, || {
            successor = procfs::tree(old).get(1).copied().or(successor);
            Ok(!procfs::runs(old))
        })?;
        // Collects the exit status.
        self.child = None;
        self.successor = successor;
        successor
            .map(drop)
            .ok_or_else(|| Failure::new("a node has ended without a successor"))
    }
}
