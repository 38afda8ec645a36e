//! A server of PostgreSQL on a machine of its own.

use std::fs;
use std::path::Path;
use std::time::Duration;

use gw_local_region::{Listen, Server, Sleep, Starter};
use rustix::process::Signal;

use super::world::{Machine, World};
use crate::failure::{Failure, ensure, wait_until};
use crate::machine::process::output;
use crate::machine::procfs;

const READY_WITHIN: Duration = Duration::from_secs(30);

pub(super) struct Engine {
    machine: Machine,
    server: Server,
}

impl Engine {
    /// Makes an empty database in a folder, and starts the server.
    pub(super) fn start(
        world: &World,
        machine: Machine,
        folder: &Path,
        gateway: &Path,
    ) -> Result<Self, Failure> {
        let mut engine = Self::new(machine, folder, gateway)?;
        engine.server.initialize(&mut Sleep)?;
        let access = engine.server.data().join("pg_hba.conf");
        let rules = "host all all 10.250.0.0/24 trust\nhost replication all 10.250.0.0/24 trust\n";
        fs::write(&access, fs::read_to_string(&access)? + rules)?;
        engine.run(world)?;
        Ok(engine)
    }

    /// Makes a copy of `primary` that follows it, and starts it.
    pub(super) fn standby(
        world: &World,
        machine: Machine,
        folder: &Path,
        gateway: &Path,
        primary: &Self,
    ) -> Result<Self, Failure> {
        let mut engine = Self::new(machine, folder, gateway)?;
        world.on(machine, || {
            Ok(engine.server.copy(&primary.server, &mut Sleep)?)
        })?;
        engine.run(world)?;
        Ok(engine)
    }

    fn new(machine: Machine, folder: &Path, gateway: &Path) -> Result<Self, Failure> {
        let log = folder.with_extension("log");
        let listen = Listen::Addresses(machine.address());
        Ok(Self {
            machine,
            server: Server::new(&Starter::new(gateway), folder, log, listen)?,
        })
    }

    /// Starts the server and waits until it answers.
    pub(super) fn run(&mut self, world: &World) -> Result<(), Failure> {
        world.on(self.machine, || Ok(self.server.start(&mut Sleep)?))
    }

    pub(super) fn sql(&self, world: &World, statement: &str) -> Result<String, Failure> {
        let said = world.on(self.machine, || output(&mut self.server.psql(statement)))?;
        Ok(String::from_utf8_lossy(&said).trim().to_owned())
    }

    /// Waits until this standby has what `primary` has now.
    pub(super) fn wait_for(&self, primary: &Self, world: &World) -> Result<(), Failure> {
        let position = primary.sql(world, "SELECT pg_current_wal_lsn()")?;
        let has_it = format!("SELECT pg_last_wal_replay_lsn() >= '{position}'");
        let otherwise = || "the standby does not follow".to_owned();
        wait_until(READY_WITHIN, otherwise, || {
            Ok(self.sql(world, &has_it)? == "t")
        })
    }

    pub(super) fn machine(&self) -> Machine {
        self.machine
    }

    /// Stops (`Signal::STOP`) or continues (`Signal::CONT`) all its processes.
    pub(super) fn signal(&self, signal: Signal) {
        if let Some(id) = self.server.id() {
            procfs::signal_all(&procfs::tree(id), signal);
        }
    }

    /// Ends the server in order; running sessions end.
    pub(super) fn stop(&mut self) -> Result<(), Failure> {
        Ok(self.server.stop(&mut Sleep)?)
    }

    pub(super) fn kill(&mut self) -> Result<(), Failure> {
        self.signal(Signal::KILL);
        self.server.abort();
        Ok(())
    }

    /// Makes a standby the primary.
    pub(super) fn promote(&self, world: &World) -> Result<(), Failure> {
        let promoted = self.sql(world, "SELECT pg_promote()")?;
        ensure(promoted == "t", || {
            "the standby was not promoted".to_owned()
        })
    }
}
