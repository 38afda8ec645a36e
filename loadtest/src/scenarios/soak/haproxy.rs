//! HAProxy in front of the nodes: it passes TCP connections on.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::Stdio;
use std::time::Duration;

use crate::failure::{Failure, wait_until};
use crate::machine::process;
use crate::machine::process::Process;

const LISTEN_WITHIN: Duration = Duration::from_secs(10);

pub(super) struct Balancer {
    _process: Process,
    pub(super) port: u16,
}

impl Balancer {
    /// Starts HAProxy in front of the nodes at these addresses.
    pub(super) fn start(nodes: &[SocketAddr]) -> Result<Self, Failure> {
        let folder = tempfile::Builder::new().prefix("gw-loadtest-").tempdir()?;
        let [port] = process::free_ports()?;
        let servers: String = nodes
            .iter()
            .enumerate()
            .map(|(node, address)| format!("  server node{node} {address}\n"))
            .collect();
        let file = folder.path().join("haproxy.cfg");
        fs::write(
            &file,
            format!(
                "global\n  maxconn 4000\n\
                 defaults\n  mode tcp\n  timeout connect 1s\n  timeout client 60s\n  timeout \
                 server 60s\n  retries 3\n  option redispatch 1\n\
                 listen gw\n  bind 127.0.0.1:{port}\n  balance roundrobin\n  default-server check \
                 inter 500ms fall 2 rise 1 on-marked-down shutdown-sessions\n{servers}"
            ),
        )?;
        let mut command = process::command(&process::find("haproxy", "haproxy")?, &[])?;
        command.args(["-q", "-f"]).arg(&file).stdin(Stdio::null());
        let process = Process::spawn("haproxy", &mut command)?.with_folder(folder);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let otherwise = || "haproxy does not listen".to_owned();
        wait_until(LISTEN_WITHIN, otherwise, || {
            Ok(TcpStream::connect(address).is_ok())
        })?;
        Ok(Self {
            _process: process,
            port,
        })
    }
}
