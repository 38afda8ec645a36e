//! The programs, run as processes.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};

use serde_json::Value;

use super::{SOON, eventually};

pub(crate) fn gw_gateway() -> Command {
    Command::new(env!("CARGO_BIN_EXE_gw-gateway"))
}

/// The agent's program, which the workspace's tests build beside the gateway's.
pub(crate) fn gw_agent() -> Command {
    let path = Path::new(env!("CARGO_BIN_EXE_gw-gateway")).with_file_name("gw-agent");
    assert!(path.exists(), "build the whole workspace: cargo test --workspace");
    Command::new(path)
}

/// A process that does not outlive its test.
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

    pub(crate) fn exit_code(&mut self) -> Option<i32> {
        eventually("the process has ended", || self.0.try_wait().unwrap()).code()
    }
}

/// Whether there was such a process.
pub(crate) fn send_signal(id: u32, signal: &str) -> bool {
    Command::new("kill").args(["-s", signal, &id.to_string()]).stderr(Stdio::null()).status().unwrap().success()
}

/// Keeps the port of a gateway that listens on it from other programs, whatever becomes of the gateway. Does not listen:
/// without the gateway connections are refused.
pub(crate) fn hold(address: SocketAddr) -> socket2::Socket {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.set_reuse_address(true).unwrap();
    socket.set_reuse_port(true).unwrap();
    socket.bind(&address.into()).unwrap();
    socket
}

/// The least that a gateway on `port` needs.
pub(crate) fn config_text(data_dir: &Path, port: u16) -> String {
    format!(
        "region = \"eu1\"\ndomain = \"gw.localhost\"\ndata_dir = \"{}\"\nlisten = \"127.0.0.1:{port}\"\n\
         admin_listen = \"127.0.0.1:0\"\nworkers = 2\nlog_format = \"json\"\n\
         burst = 1000000\nrefill_per_minute = 1000000\n",
        data_dir.display()
    )
}

/// `gw-gateway serve` with this configuration.
pub(crate) fn serve_command(config: &Path) -> Command {
    let mut command = gw_gateway();
    command.arg("serve").arg("--config").arg(config);
    command
}

/// A gateway that is up.
pub(crate) struct Served {
    pub(crate) process: Running,
    pub(crate) address: SocketAddr,
    pub(crate) admin_address: SocketAddr,
    /// What it logs from then on, and what those log that take over from it.
    pub(crate) log: Log,
}

/// Lines of a log as JSON; what is not is a text.
pub(crate) struct Log(Receiver<Value>);

impl Log {
    /// The next line that `pick` finds something in.
    pub(crate) fn find<T>(&self, mut pick: impl FnMut(&Value) -> Option<T>) -> T {
        loop {
            let line = self.0.recv_timeout(SOON).expect("the gateway logs it");
            if let Some(found) = pick(&line) {
                return found;
            }
        }
    }
}

/// Starts what ends up as a gateway, and waits until it says where it listens.
pub(crate) fn serve(command: &mut Command) -> Served {
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let addresses = lines.by_ref().find_map(|line| {
        let line = line.unwrap();
        let line: Value = serde_json::from_str(&line).unwrap_or_else(|_| panic!("instead of a log: {line}"));
        let address = |name: &str| line[name].as_str()?.parse().ok();
        Some((address("address")?, address("admin_address")?))
    });
    let (address, admin_address) = addresses.expect("the gateway logs its addresses");
    let (sender, log) = mpsc::channel();
    // The log must be read on, or a full pipe would stop the gateway.
    std::thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            // Who does not want it has dropped the other end.
            let _ = sender.send(serde_json::from_str(&line).unwrap_or(Value::String(line)));
        }
    });
    Served { process: Running(child), address, admin_address, log: Log(log) }
}
