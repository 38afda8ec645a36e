//! tinyproxy, an HTTP proxy of Debian's.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};

use crate::support::eventually;
use crate::support::processes::process::Running;

/// tinyproxy with one user, on a port that stays its own while it does not run.
pub(crate) struct Tinyproxy {
    pub(crate) address: SocketAddr,
    folder: tempfile::TempDir,
    process: Option<Running>,
    /// Reserves the port. It does not listen: without the proxy, connections are refused.
    _port: socket2::Socket,
}

impl Tinyproxy {
    /// Starts the proxy for `user` with `password`, or for everyone if `None`.
    pub(crate) fn start(credentials: Option<(&str, &str)>) -> Self {
        let port =
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        port.set_reuse_address(true).unwrap();
        port.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into())
            .unwrap();
        let address = port.local_addr().unwrap().as_socket().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let credentials =
            credentials.map(|(user, password)| format!("BasicAuth {user} {password}\n"));
        let config = format!(
            "Port {}\nListen 127.0.0.1\nTimeout 600\nMaxClients 100\nLogLevel Connect\n\
             LogFile \"{}\"\n{}",
            address.port(),
            folder.path().join("log").display(),
            credentials.unwrap_or_default()
        );
        fs::write(folder.path().join("tinyproxy.conf"), config).unwrap();
        let mut proxy = Self {
            address,
            folder,
            process: None,
            _port: port,
        };
        proxy.run();
        proxy
    }

    /// Starts the process and waits until it accepts connections.
    pub(crate) fn run(&mut self) {
        let mut command = Command::new("tinyproxy");
        command
            .arg("-d")
            .arg("-c")
            .arg(self.folder.path().join("tinyproxy.conf"));
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        self.process = Some(Running::new(child));
        eventually("tinyproxy accepts connections", || {
            TcpStream::connect(self.address).ok()
        });
    }

    /// Kills the process, and with it the connections through it.
    pub(crate) fn kill(&mut self) {
        self.process = None;
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap()
    }
}
