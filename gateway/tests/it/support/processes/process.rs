//! Gateway and agent processes.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::support::admin_api::Api;
use crate::support::metrics::Metrics;
use crate::support::{SOON, eventually};

pub(crate) fn gw_gateway() -> Command {
    Command::new(env!("CARGO_BIN_EXE_gw-gateway"))
}

/// Command for the agent's program, which a build of the workspace puts beside the gateway's.
pub(crate) fn gw_agent() -> Command {
    let path = Path::new(env!("CARGO_BIN_EXE_gw-gateway")).with_file_name("gw-agent");
    assert!(
        path.exists(),
        "gw-agent is not built: run cargo build --workspace --bins"
    );
    Command::new(path)
}

/// A child process that is killed on drop.
pub(crate) struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

impl Running {
    pub(crate) fn new(child: Child) -> Self {
        Self(child)
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    pub(crate) fn signal(&self, signal: &str) {
        assert!(send_signal(self.0.id(), signal));
    }

    /// Ends the process with SIGTERM. It must succeed.
    #[track_caller]
    pub(crate) fn stop(&mut self) {
        self.signal("TERM");
        assert_eq!(self.exit_code(), Some(0));
    }

    /// Resident memory of the process, in bytes.
    pub(crate) fn resident(&self) -> usize {
        let status = fs::read_to_string(format!("/proc/{}/status", self.id())).unwrap();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .unwrap();
        line.trim()
            .trim_end_matches(" kB")
            .parse::<usize>()
            .unwrap()
            * 1024
    }

    pub(crate) fn exit_code(&mut self) -> Option<i32> {
        eventually("the process has ended", || self.0.try_wait().unwrap()).code()
    }
}

/// Sends `signal`, a name without `SIG`; returns whether the process exists.
pub(crate) fn send_signal(id: u32, signal: &str) -> bool {
    let signal = match signal {
        "ABRT" => Signal::ABORT,
        "HUP" => Signal::HUP,
        "INT" => Signal::INT,
        "KILL" => Signal::KILL,
        "CONT" => Signal::CONT,
        "STOP" => Signal::STOP,
        "TERM" => Signal::TERM,
        "USR1" => Signal::USR1,
        "USR2" => Signal::USR2,
        other => panic!("add SIG{other} to this list"),
    };
    kill_process(Pid::from_raw(id.try_into().unwrap()).unwrap(), signal).is_ok()
}

/// Whether a process has ended. Another process than its parent may leave it a zombie.
pub(crate) fn has_ended(id: u32) -> bool {
    fs::read_to_string(format!("/proc/{id}/stat")).map_or(true, |stat| stat.contains(") Z "))
}

/// Ids of the children of a process, such as the workers of an agent's supervisor.
pub(crate) fn children(parent: u32) -> Vec<u32> {
    let path = format!("/proc/{parent}/task/{parent}/children");
    let children = fs::read_to_string(path).unwrap_or_default();
    children
        .split_whitespace()
        .map(|id| id.parse().unwrap())
        .collect()
}

/// Reserves the port of a running gateway, so that no other program can bind it after the gateway
/// ends. The socket does not listen: without the gateway, connections are refused.
pub(crate) fn hold(address: SocketAddr) -> socket2::Socket {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.set_reuse_address(true).unwrap();
    socket.set_reuse_port(true).unwrap();
    socket.bind(&address.into()).unwrap();
    socket
}

/// A minimal configuration of a gateway on `port`.
pub(crate) fn config_text(data_dir: &Path, port: u16) -> String {
    format!(
        "region = \"eu1\"\ndomain = \"gw.localhost\"\ndata_dir = \"{}\"\n\
         listen = \"127.0.0.1:{port}\"\nadmin_listen = \"127.0.0.1:0\"\nworkers = 2\n\
         log_format = \"json\"\nburst = 1000000\nrefill_per_minute = 1000000\n",
        data_dir.display()
    )
}

/// `gw-gateway serve` with this configuration file.
pub(crate) fn serve_command(config: &Path) -> Command {
    let mut command = gw_gateway();
    command.arg("serve").arg("--config").arg(config);
    command
}

/// Starts a demo on free ports with `command`, which is `gw-gateway demo` with any options. Returns
/// the process and the JSON that it prints.
pub(crate) fn start_demo(command: &mut Command) -> (Running, Value) {
    command
        .args(["--json", "--port", "0", "--admin-port", "0"])
        .stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    (Running::new(child), serde_json::from_str(&line).unwrap())
}

/// A gateway process that listens.
pub(crate) struct Served {
    pub(crate) process: Running,
    pub(crate) address: SocketAddr,
    pub(crate) admin_address: SocketAddr,
    /// Log lines written after the start, by this process and by its successors.
    pub(crate) log: Log,
}

impl Served {
    pub(crate) fn metrics(&self) -> Metrics {
        Api::at(self.admin_address, "").metrics()
    }

    /// Resident memory of the process, in bytes.
    pub(crate) fn resident(&self) -> usize {
        self.process.resident()
    }
}

/// Lines of a log as JSON values; a line that is not JSON is a string.
pub(crate) struct Log {
    /// Lines until the program listened, if a function waited for that.
    pub(crate) start: Vec<Value>,
    lines: Receiver<Value>,
}

impl Log {
    /// Keeps reading the log: a full pipe would block the program.
    fn of(lines: impl Iterator<Item = String> + Send + 'static) -> Self {
        let (sender, lines_read) = mpsc::channel();
        std::thread::spawn(move || {
            for line in lines {
                // Fails when the test has dropped the receiver.
                let _ = sender.send(serde_json::from_str(&line).unwrap_or(Value::String(line)));
            }
        });
        Self {
            start: Vec::new(),
            lines: lines_read,
        }
    }

    /// The first of the following lines that contains `part`.
    #[track_caller]
    pub(crate) fn line_with(&self, part: &str) -> String {
        self.find(|line| Some(line.to_string()).filter(|line| line.contains(part)))
    }

    /// The lines until now that no other call has taken.
    pub(crate) fn until_now(&self) -> Vec<Value> {
        self.lines.try_iter().collect()
    }

    /// The first result of `pick` over the following lines. Panics with the lines if it is not
    /// among them.
    #[track_caller]
    pub(crate) fn find<T>(&self, mut pick: impl FnMut(&Value) -> Option<T>) -> T {
        let mut passed = String::new();
        loop {
            let line = match self.lines.recv_timeout(SOON) {
                Ok(line) => line,
                Err(error) => panic!("the program logs the expected line: {error}\n{passed}"),
            };
            if let Some(found) = pick(&line) {
                return found;
            }
            passed.push_str(&format!("{line}\n"));
        }
    }
}

/// Starts a program. Returns it with the lines of its standard error.
pub(crate) fn start_logged(command: &mut Command) -> (Running, Log) {
    let mut child = command
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines();
    (Running(child), Log::of(lines.map_while(Result::ok)))
}

/// Starts a gateway, directly or through another program, and waits until it logs its addresses.
pub(crate) fn serve(command: &mut Command) -> Served {
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut start = Vec::new();
    let addresses = lines.by_ref().find_map(|line| {
        let line = line.unwrap();
        let line: Value =
            serde_json::from_str(&line).unwrap_or_else(|_| panic!("not a JSON log line: {line}"));
        let address = |name: &str| line[name].as_str()?.parse().ok();
        let addresses = address("address").zip(address("admin_address"));
        start.push(line);
        addresses
    });
    let (address, admin_address) = addresses.expect("the gateway logs its addresses");
    Served {
        process: Running(child),
        address,
        admin_address,
        log: Log {
            start,
            ..Log::of(lines.map_while(Result::ok))
        },
    }
}
