//! Machines of a region: Linux network namespaces, joined by a bridge.

use std::fs::{self, File};
use std::io::Write;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, geteuid, kill_process};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::NODES;
use crate::failure::{Failure, ensure};
use crate::machine::process::{self, output};

/// Begins the names of all namespaces of this program. Those of an earlier run that was killed are
/// removed.
const PREFIX: &str = "gwlt-";
const ENGINES: usize = 2;
const MACHINES: usize = NODES + ENGINES + 1;
const FIRST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 250, 0, 10);
/// Held while the namespaces are in use.
const LOCK: &str = "/run/gw-loadtest.lock";
/// Link-layer address that no machine has.
const UNREACHABLE: &str = "02:67:77:ff:ff:ff";

/// A machine with a namespace of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Machine {
    Node(usize),
    /// A server of PostgreSQL.
    Engine(usize),
    /// All agents, and the balancers in front of the nodes.
    Agents,
}

/// The machines and the network between them.
pub(super) struct World {
    /// Namespace in which this program was started.
    home: File,
    namespaces: Vec<File>,
    _lock: File,
}

impl Machine {
    fn all() -> impl Iterator<Item = Self> {
        (0..NODES)
            .map(Self::Node)
            .chain((0..ENGINES).map(Self::Engine))
            .chain([Self::Agents])
    }

    fn number(self) -> usize {
        match self {
            Self::Node(node) => node,
            Self::Engine(engine) => NODES + engine,
            Self::Agents => MACHINES - 1,
        }
    }

    fn namespace(self) -> String {
        format!("{PREFIX}{}", self.number())
    }

    pub(super) fn address(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(FIRST_ADDRESS.to_bits() + self.number() as u32)
    }

    fn link_address(self) -> String {
        format!("02:67:77:00:00:{:02x}", self.number())
    }
}

impl World {
    /// Makes the machines. Needs root.
    pub(super) fn start() -> Result<Self, Failure> {
        ensure(geteuid().is_root(), || {
            "network namespaces need root".to_owned()
        })?;
        let lock = File::create(LOCK)?;
        lock.try_lock().map_err(|_| {
            Failure::new("another load test uses the network namespaces: wait for its end")
        })?;
        remove_namespaces()?;
        let hub = hub();
        ip("", &format!("netns add {hub}"))?;
        ip(&hub, "link add br0 type bridge\nlink set br0 up")?;
        for machine in Machine::all() {
            let name = machine.namespace();
            let number = machine.number();
            ip(
                "",
                &format!(
                    "netns add {name}\nlink add v{number} netns {hub} type veth peer name eth0 \
                     address {} netns {name}",
                    machine.link_address()
                ),
            )?;
            ip(&hub, &format!("link set v{number} master br0 up"))?;
            ip(
                &name,
                &format!(
                    "link set lo up\naddr add {}/24 dev eth0\nlink set eth0 up",
                    machine.address()
                ),
            )?;
            // Static entries, so that one of them can be made wrong.
            let neighbours = Machine::all().filter(|other| *other != machine);
            let entries: Vec<String> = neighbours
                .map(|other| neighbour(other, &other.link_address()))
                .collect();
            ip(&name, &entries.join("\n"))?;
        }
        let namespaces: Result<_, _> = Machine::all()
            .map(|machine| File::open(path(&machine.namespace())))
            .collect();
        Ok(Self {
            home: File::open("/proc/self/ns/net")?,
            namespaces: namespaces?,
            _lock: lock,
        })
    }

    /// Runs `work` on a machine. Programs, threads and sockets that it starts belong to the
    /// machine.
    pub(super) fn on<T>(
        &self,
        machine: Machine,
        work: impl FnOnce() -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        enter(&self.namespaces[machine.number()])?;
        let result = work();
        enter(&self.home)?;
        result
    }

    /// Drops all packets from one machine to another.
    pub(super) fn cut(&self, from: Machine, to: Machine) -> Result<(), Failure> {
        ip(&from.namespace(), &neighbour(to, UNREACHABLE))
    }

    pub(super) fn heal(&self, from: Machine, to: Machine) -> Result<(), Failure> {
        ip(&from.namespace(), &neighbour(to, &to.link_address()))
    }

    /// Drops all packets to and from a machine, without a sign that it could see.
    pub(super) fn unplug(&self, machine: Machine) -> Result<(), Failure> {
        ip(&hub(), &format!("link set v{} nomaster", machine.number()))
    }

    pub(super) fn plug_in(&self, machine: Machine) -> Result<(), Failure> {
        ip(
            &hub(),
            &format!("link set v{} master br0", machine.number()),
        )
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // A namespace that is left is removed by the next run.
        let _ = remove_namespaces();
    }
}

fn hub() -> String {
    format!("{PREFIX}hub")
}

fn path(namespace: &str) -> String {
    format!("/run/netns/{namespace}")
}

fn neighbour(machine: Machine, link_address: &str) -> String {
    format!(
        "neigh replace {} lladdr {link_address} dev eth0 nud permanent",
        machine.address()
    )
}

fn enter(namespace: &File) -> Result<(), Failure> {
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
        .map_err(|error| Failure::during("entering a network namespace", error))
}

/// Removes all namespaces of this program, and ends the processes in them.
fn remove_namespaces() -> Result<(), Failure> {
    let names = fs::read_dir("/run/netns").into_iter().flatten().flatten();
    let names: Vec<String> = names
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    for name in names.iter().filter(|name| name.starts_with(PREFIX)) {
        let pids =
            output(Command::new(process::find("ip", "iproute2")?).args(["netns", "pids", name]))?;
        let pids = String::from_utf8_lossy(&pids);
        for pid in pids
            .lines()
            .filter_map(|line| Pid::from_raw(line.trim().parse().ok()?))
        {
            // Fails if it has ended already.
            let _ = kill_process(pid, Signal::KILL);
        }
        ip("", &format!("netns del {name}"))?;
    }
    Ok(())
}

/// Runs commands of `ip`, in a namespace unless it is empty.
fn ip(namespace: &str, commands: &str) -> Result<(), Failure> {
    let mut command = Command::new(process::find("ip", "iproute2")?);
    if !namespace.is_empty() {
        command.args(["-n", namespace]);
    }
    command.args(["-batch", "-"]);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let failed =
        |error: &dyn std::fmt::Display| Failure::during(format_args!("ip {commands}"), error);
    let mut child = command.spawn().map_err(|error| failed(&error))?;
    if let Some(mut stdin) = child.stdin.take() {
        writeln!(stdin, "{commands}")?;
    }
    let output = child.wait_with_output()?;
    ensure(output.status.success(), || {
        failed(&String::from_utf8_lossy(&output.stderr)).to_string()
    })
}
