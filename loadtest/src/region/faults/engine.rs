//! A server of PostgreSQL on a machine of its own.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::world::{Machine, World};
use crate::enrolled::output;
use crate::failure::{Failure, ensure};
use crate::process::{self, Process};

const INSTALLED: &str = "/usr/lib/postgresql";
const USER: &str = "postgres";
const READY_WITHIN: Duration = Duration::from_secs(30);
const TICK: Duration = Duration::from_millis(50);

pub(super) struct Engine {
    machine: Machine,
    programs: PathBuf,
    data: PathBuf,
    process: Option<Process>,
}

impl Engine {
    /// Makes an empty database in a folder, and starts the server.
    pub(super) fn start(world: &World, machine: Machine, folder: &Path) -> Result<Self, Failure> {
        let mut engine = Self::new(machine, folder)?;
        let mut init = engine.program("initdb")?;
        init.args([
            "-U",
            "gw",
            "-A",
            "trust",
            "-N",
            "-E",
            "UTF8",
            "--locale=C",
            "-D",
        ])
        .arg(&engine.data);
        output(&mut init)?;
        let access = engine.data.join("pg_hba.conf");
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
        primary: &Self,
    ) -> Result<Self, Failure> {
        let mut engine = Self::new(machine, folder)?;
        let mut copy = engine.program("pg_basebackup")?;
        copy.args([
            "-U",
            "gw",
            "--checkpoint=fast",
            "--write-recovery-conf",
            "--host",
        ]);
        copy.arg(primary.machine.address().to_string())
            .arg("--pgdata")
            .arg(&engine.data);
        world.on(machine, || output(&mut copy))?;
        engine.run(world)?;
        Ok(engine)
    }

    fn new(machine: Machine, folder: &Path) -> Result<Self, Failure> {
        fs::create_dir(folder)?;
        output(Command::new("chown").arg(USER).arg(folder))?;
        fs::set_permissions(folder, fs::Permissions::from_mode(0o700))?;
        Ok(Self {
            machine,
            programs: programs()?,
            data: folder.join("data"),
            process: None,
        })
    }

    /// Starts the server and waits until it answers.
    pub(super) fn run(&mut self, world: &World) -> Result<(), Failure> {
        let mut run = self.program("postgres")?;
        run.arg("-D").arg(&self.data).args([
            "-c",
            "listen_addresses=*",
            "-c",
            "unix_socket_directories=",
        ]);
        run.args(["-c", "shared_buffers=16MB", "-c", "log_min_messages=fatal"]);
        run.stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        self.process = Some(world.on(self.machine, || Process::spawn("postgres", &mut run))?);
        let deadline = Instant::now() + READY_WITHIN;
        while self.sql(world, "SELECT 1").is_err() {
            ensure(Instant::now() < deadline, || {
                "PostgreSQL does not answer".to_owned()
            })?;
            std::thread::sleep(TICK);
        }
        Ok(())
    }

    pub(super) fn sql(&self, world: &World, statement: &str) -> Result<String, Failure> {
        let mut client = Command::new(process::find("psql", "postgresql-client")?);
        client.args([
            "-XAtq",
            "-v",
            "ON_ERROR_STOP=1",
            "-U",
            "gw",
            "-d",
            "postgres",
            "-h",
        ]);
        client
            .arg(self.machine.address().to_string())
            .args(["-c", statement]);
        let said = world.on(self.machine, || output(&mut client))?;
        Ok(String::from_utf8_lossy(&said).trim().to_owned())
    }

    /// Waits until this standby has what `primary` has now.
    pub(super) fn wait_for(&self, primary: &Self, world: &World) -> Result<(), Failure> {
        let position = primary.sql(world, "SELECT pg_current_wal_lsn()")?;
        let deadline = Instant::now() + READY_WITHIN;
        while self.sql(
            world,
            &format!("SELECT pg_last_wal_replay_lsn() >= '{position}'"),
        )? != "t"
        {
            ensure(Instant::now() < deadline, || {
                "the standby does not follow".to_owned()
            })?;
            std::thread::sleep(TICK);
        }
        Ok(())
    }

    pub(super) fn machine(&self) -> Machine {
        self.machine
    }

    /// Stops (`Signal::STOP`) or continues (`Signal::CONT`) all its processes.
    pub(super) fn signal(&self, signal: Signal) {
        self.process
            .iter()
            .for_each(|process| process.send_all(signal));
    }

    /// Ends the server in order; running sessions end.
    pub(super) fn stop(&mut self) -> Result<(), Failure> {
        self.process
            .take()
            .map_or(Ok(()), |process| process.stop_with(Signal::INT))
    }

    pub(super) fn kill(&mut self) -> Result<(), Failure> {
        self.process.take().map_or(Ok(()), Process::kill)
    }

    /// Makes a standby the primary.
    pub(super) fn promote(&self, world: &World) -> Result<(), Failure> {
        let promoted = self.sql(world, "SELECT pg_promote()")?;
        ensure(promoted == "t", || {
            "the standby was not promoted".to_owned()
        })
    }

    /// A program of PostgreSQL, as its user. The kernel ends it with this program.
    fn program(&self, name: &str) -> Result<Command, Failure> {
        let mut command = Command::new(process::find("setpriv", "util-linux")?);
        command.args([
            "--pdeathsig",
            "KILL",
            "--reuid",
            USER,
            "--regid",
            USER,
            "--clear-groups",
            "--",
        ]);
        command.arg(self.programs.join(name)).current_dir("/");
        Ok(command)
    }
}

/// Folder of the newest version.
fn programs() -> Result<PathBuf, Failure> {
    let versions = fs::read_dir(INSTALLED).into_iter().flatten().flatten();
    let folders = versions
        .map(|version| version.path().join("bin"))
        .filter(|bin| bin.join("initdb").is_file());
    folders
        .max()
        .ok_or_else(|| Failure::new("PostgreSQL is not installed: apt-get install postgresql"))
}
