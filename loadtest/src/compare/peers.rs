//! The backend and the peers: nginx and haproxy, two hops each with TLS on both, configured from the templates.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::{LOAD_CORE, MEASURED_CORE, Peer, Setup, free_ports};
use crate::client::Target;
use crate::failure::{Failure, ensure};
use crate::process::{self, Process};

/// Response body of the backend: 98 bytes.
pub(super) const ANSWER: &str =
    "The backend's answer: long enough to be a small document, short enough to cost next to nothing. OK";

/// Path of a file that is larger than all buffers between the backend and a caller that does not read.
pub(crate) const LARGE: &str = "/large";
const LARGE_BYTES: u64 = 100_000_000;
/// Path of a file of 1 MB, which fits into socket buffers sized by the kernel.
pub(crate) const MEGABYTE: &str = "/megabyte";

/// Host name of the peers, as long as a tenant's.
const HOST: &str = "demo--echo.eu1.gw.localhost";
/// A key as long as the product's, so that requests have equal sizes. The peers do not authenticate callers.
const UNUSED_KEY: &str = "gw_sk_0000000000000000.0000000000000000000000000000000000000000000";
const LISTEN_WITHIN: Duration = Duration::from_secs(10);
const TICK: Duration = Duration::from_millis(10);

/// A folder with certificate and configurations of the servers.
pub(crate) struct Site {
    folder: TempDir,
    nginx: PathBuf,
    haproxy: Option<PathBuf>,
    backend_port: u16,
    /// More options of the backend's `listen`.
    backend_buffers: &'static str,
}

impl Site {
    /// Issues a certificate and finds the programs that `peers` need. The backend is always nginx.
    pub(super) fn prepare(peers: &[Peer]) -> Result<Self, Failure> {
        let site = Self::with_backend_alone()?;
        let haproxy = if peers.contains(&Peer::Haproxy) { Some(process::find("haproxy", "haproxy")?) } else { None };
        Ok(Self { haproxy, ..site })
    }

    /// Prepares only the backend.
    pub(crate) fn with_backend_alone() -> Result<Self, Failure> {
        let nginx = process::find("nginx", "nginx")?;
        let folder = tempfile::Builder::new().prefix("gw-loadtest-").tempdir()?;
        write_certificate(folder.path())?;
        // A sparse file.
        File::create(folder.path().join("large"))?.set_len(LARGE_BYTES)?;
        File::create(folder.path().join("megabyte"))?.set_len(1_000_000)?;
        let [backend_port] = free_ports()?;
        Ok(Self { folder, nginx, haproxy: None, backend_port, backend_buffers: "" })
    }

    /// Prepares a backend with small socket send buffers. With default buffers, many stalled downloads would hold more
    /// memory in the backend than in the product and exhaust the TCP memory of the machine.
    pub(crate) fn with_frugal_backend() -> Result<Self, Failure> {
        Ok(Self { backend_buffers: " sndbuf=8k", ..Self::with_backend_alone()? })
    }

    pub(crate) fn backend_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.backend_port)
    }

    pub(crate) fn start_backend(&self) -> Result<Process, Failure> {
        self.start(&BACKEND, LOAD_CORE, self.backend_port, [0, 0])
    }

    /// Starts both hops of a peer.
    pub(super) fn start_peer(&self, peer: Peer) -> Result<Setup, Failure> {
        let ports = free_ports()?;
        let [front_port, middle_port] = ports;
        let (name, [front, middle]) = match peer {
            Peer::Nginx => ("nginx", NGINX),
            Peer::Haproxy => ("haproxy", HAPROXY),
        };
        let middle = self.start(&middle, MEASURED_CORE, middle_port, ports)?;
        let front = self.start(&front, MEASURED_CORE, front_port, ports)?;
        let url = format!("https://{HOST}:{front_port}");
        let target = Target::new(&url, &self.folder.path().join("server.crt"), UNUSED_KEY)?;
        Ok(Setup { name, target, processes: vec![front, middle] })
    }

    /// Starts a server on `core`; it listens on `port` when this returns.
    fn start(&self, server: &Server, core: usize, port: u16, ports: [u16; 2]) -> Result<Process, Failure> {
        let config = self.folder.path().join(server.name).with_extension("conf");
        fs::write(&config, self.fill_in(server.template, ports))?;
        let log = self.folder.path().join(server.name).with_extension("log");
        let mut command = match &self.haproxy {
            Some(haproxy) if server.is_haproxy => {
                let mut command = process::command(haproxy, Some(core))?;
                command.arg("-db").arg("-f").arg(config);
                command
            }
            _ => {
                fs::create_dir_all(self.folder.path().join(server.name).with_extension("tmp"))?;
                let mut command = process::command(&self.nginx, Some(core))?;
                command.arg("-p").arg(self.folder.path()).arg("-e").arg(&log).arg("-c").arg(config);
                command
            }
        };
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log)?);
        let mut process = Process::spawn(server.name, &mut command)?;
        wait_until_listening(&mut process, port).map_err(|failure| {
            let log = fs::read_to_string(&log).unwrap_or_default();
            Failure::during(server.name, format_args!("{failure}\n{log}"))
        })?;
        Ok(process)
    }

    fn fill_in(&self, template: &str, [front_port, middle_port]: [u16; 2]) -> String {
        template
            .replace("{dir}", &self.folder.path().display().to_string())
            .replace("{host}", HOST)
            .replace("{answer}", ANSWER)
            .replace("{front_port}", &front_port.to_string())
            .replace("{middle_port}", &middle_port.to_string())
            .replace("{backend_port}", &self.backend_port.to_string())
            .replace("{backend_buffers}", self.backend_buffers)
    }
}

/// A server configured from a template.
struct Server {
    name: &'static str,
    template: &'static str,
    is_haproxy: bool,
}

const BACKEND: Server =
    Server { name: "nginx-backend", template: include_str!("../../templates/nginx-backend.conf"), is_haproxy: false };

const NGINX: [Server; 2] = [
    Server { name: "nginx-front", template: include_str!("../../templates/nginx-front.conf"), is_haproxy: false },
    Server { name: "nginx-middle", template: include_str!("../../templates/nginx-middle.conf"), is_haproxy: false },
];

const HAPROXY: [Server; 2] = [
    Server { name: "haproxy-front", template: include_str!("../../templates/haproxy-front.cfg"), is_haproxy: true },
    Server { name: "haproxy-middle", template: include_str!("../../templates/haproxy-middle.cfg"), is_haproxy: true },
];

fn wait_until_listening(process: &mut Process, port: u16) -> Result<(), Failure> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let deadline = Instant::now() + LISTEN_WITHIN;
    while TcpStream::connect_timeout(&address, LISTEN_WITHIN).is_err() {
        if let Some(status) = process.wait(TICK)? {
            return Err(Failure::new(format!("ended with {status}")));
        }
        ensure(Instant::now() < deadline, || format!("does not listen after {LISTEN_WITHIN:?}"))?;
    }
    Ok(())
}

/// Writes one certificate for both hops of every peer, with the key type of the product's.
fn write_certificate(folder: &Path) -> Result<(), Failure> {
    let failed = |error| Failure::during("cannot make a certificate", error);
    let rcgen::CertifiedKey { cert, signing_key } =
        rcgen::generate_simple_self_signed([HOST.to_owned()]).map_err(failed)?;
    let (certificate, key) = (cert.pem(), signing_key.serialize_pem());
    fs::write(folder.join("server.crt"), &certificate)?;
    fs::write(folder.join("server.key"), &key)?;
    fs::write(folder.join("server.pem"), certificate + &key)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_have_no_placeholders_left() {
        let folder = tempfile::tempdir().unwrap();
        let site = Site { folder, nginx: PathBuf::new(), haproxy: None, backend_port: 3, backend_buffers: "" };
        for server in NGINX.iter().chain(&HAPROXY).chain([&BACKEND]) {
            let config = site.fill_in(server.template, [1, 2]);
            for name in ["{dir}", "{host}", "{answer}", "port}"] {
                assert!(!config.contains(name), "{}: {name}", server.name);
            }
        }
    }
}
