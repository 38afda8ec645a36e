//! The programs, run as processes.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::eventually;

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
        let pid = self.0.id().to_string();
        assert!(Command::new("kill").args(["-s", signal, &pid]).status().unwrap().success());
    }

    pub(crate) fn exit_code(&mut self) -> Option<i32> {
        eventually("the process has ended", || self.0.try_wait().unwrap()).code()
    }
}

/// The least that a gateway on `port` needs.
pub(crate) fn config_text(data_dir: &Path, port: u16) -> String {
    format!(
        "region = \"eu1\"\ndomain = \"gw.localhost\"\ndata_dir = \"{}\"\nlisten = \"127.0.0.1:{port}\"\n\
         admin_listen = \"127.0.0.1:0\"\nworkers = 2\nlog_format = \"json\"\n",
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
}

/// Starts what ends up as a gateway, and waits until it says where it listens.
pub(crate) fn serve(command: &mut Command) -> Served {
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let addresses = lines.by_ref().find_map(|line| {
        let line = line.unwrap();
        let line: serde_json::Value =
            serde_json::from_str(&line).unwrap_or_else(|_| panic!("instead of a log: {line}"));
        let address = |name: &str| line[name].as_str()?.parse().ok();
        Some((address("address")?, address("admin_address")?))
    });
    let (address, admin_address) = addresses.expect("the gateway logs its addresses");
    // The log must be read on, or a full pipe would stop the gateway.
    std::thread::spawn(move || lines.for_each(drop));
    Served { process: Running(child), address, admin_address }
}
