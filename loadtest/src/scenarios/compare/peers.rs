//! The backend and the peers, two hops each, configured from the templates: nginx and HAProxy with
//! TLS on both hops, and rathole, which forwards the bytes of callers' connections.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use super::programs::rathole::Rathole;
use super::setups::{Entrant, Kind};
use super::{LOAD_CORE, MEASURED_CORE};
use crate::client::Target;
use crate::demo::first_line;
use crate::failure::{Failure, wait_until};
use crate::machine::process;
use crate::machine::process::Process;

/// Response body of the backend: 98 bytes.
pub(super) const ANSWER: &str = "The backend's answer: long enough to be a small document, short \
                                 enough to cost next to nothing. OK";

/// Path of a file that is larger than all buffers between the backend and a caller that does not
/// read.
pub(crate) const LARGE: &str = "/large";
const LARGE_BYTES: u64 = 100_000_000;
/// Path of a file of 1 MB, which fits into socket buffers sized by the kernel.
pub(crate) const MEGABYTE: &str = "/megabyte";

/// Host name of the peers, as long as a tenant's.
const HOST: &str = "demo--echo.eu1.gw.localhost";
/// A key as long as the product's, so that requests have equal sizes. The peers do not authenticate
/// callers.
const UNUSED_KEY: &str = "gw_sk_0000000000000000.0000000000000000000000000000000000000000000";
const LISTEN_WITHIN: Duration = Duration::from_secs(10);

/// A folder with certificate and configurations of the servers.
pub(crate) struct Site {
    folder: TempDir,
    nginx: PathBuf,
    /// Programs, with the names of their setups.
    haproxies: Vec<(String, PathBuf)>,
    rathole: Option<Rathole>,
    backend_port: u16,
    h2c_port: u16,
    /// More options of the backend's `listen`.
    backend_buffers: &'static str,
}

impl Site {
    /// Issues a certificate for the peers. The backend is always nginx.
    pub(super) fn prepare(
        haproxies: Vec<(String, PathBuf)>,
        rathole: Option<Rathole>,
    ) -> Result<Self, Failure> {
        Ok(Self {
            haproxies,
            rathole,
            ..Self::with_backend_alone()?
        })
    }

    /// Prepares only the backend.
    pub(crate) fn with_backend_alone() -> Result<Self, Failure> {
        let nginx = process::find("nginx", "nginx")?;
        let folder = tempfile::Builder::new().prefix("gw-loadtest-").tempdir()?;
        write_certificate(folder.path())?;
        // A sparse file.
        File::create(folder.path().join("large"))?.set_len(LARGE_BYTES)?;
        File::create(folder.path().join("megabyte"))?.set_len(1_000_000)?;
        let [backend_port, h2c_port] = process::free_ports()?;
        Ok(Self {
            folder,
            nginx,
            haproxies: Vec::new(),
            rathole: None,
            backend_port,
            h2c_port,
            backend_buffers: "",
        })
    }

    /// Prepares a backend with small socket send buffers. With default buffers, many stalled
    /// downloads would hold more memory in the backend than in the product and exhaust the TCP
    /// memory of the machine.
    pub(crate) fn with_frugal_backend() -> Result<Self, Failure> {
        Ok(Self {
            backend_buffers: " sndbuf=8k",
            ..Self::with_backend_alone()?
        })
    }

    pub(super) fn nginx(&self) -> &Path {
        &self.nginx
    }

    pub(super) fn haproxies(&self) -> &[(String, PathBuf)] {
        &self.haproxies
    }

    pub(super) fn rathole(&self) -> Option<&Path> {
        self.rathole.as_ref().map(|it| it.program.as_path())
    }

    pub(crate) fn backend_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.backend_port)
    }

    pub(super) fn backend_port(&self) -> u16 {
        self.backend_port
    }

    /// Port where the backend speaks HTTP/2 without TLS.
    pub(super) fn h2c_port(&self) -> u16 {
        self.h2c_port
    }

    pub(super) fn h2c_url(&self) -> String {
        format!("h2c://127.0.0.1:{}", self.h2c_port)
    }

    pub(super) fn unix_url(&self) -> String {
        let name = format!("{}-{}.sock", BACKEND.name, self.backend_port);
        format!("unix:{}", self.folder.path().join(name).display())
    }

    pub(crate) fn start_backend(&self) -> Result<Process, Failure> {
        let ports = Ports {
            front: 0,
            middle: 0,
            backend: self.backend_port,
        };
        let command = self.command(&BACKEND, 0, LOAD_CORE)?;
        self.start(&BACKEND, command, "", self.backend_port, ports)
    }

    /// Starts both hops of a peer in front of a backend.
    pub(super) fn start_peer(
        &self,
        Entrant { kind, number }: Entrant,
        backend: u16,
    ) -> Result<(Vec<Process>, Target), Failure> {
        let [front, middle] = process::free_ports()?;
        let ports = Ports {
            front,
            middle,
            backend,
        };
        let (servers, transport) = match kind {
            Kind::Nginx => (NGINX, ""),
            Kind::Haproxy => (HAPROXY, ""),
            Kind::RatholeNoise => (RATHOLE, "noise"),
            _ => (RATHOLE, "tcp"),
        };
        let [first, second] = servers;
        let start = |server: &Server, port| {
            let command = self.command(server, number, MEASURED_CORE)?;
            self.start(server, command, transport, port, ports)
        };
        // A server of rathole listens for callers once its client is connected.
        let processes = vec![start(&first, middle)?, start(&second, front)?];
        let target = if kind.is_rathole() {
            self.plain(front)?
        } else {
            self.with_tls(front)?
        };
        Ok((processes, target))
    }

    fn with_tls(&self, port: u16) -> Result<Target, Failure> {
        let url = format!("https://{HOST}:{port}");
        Target::new(&url, &self.folder.path().join("server.crt"), UNUSED_KEY)
    }

    /// Starts the relay that passes bytes on, in front of a backend.
    pub(super) fn start_null_relay(
        &self,
        tls: bool,
        backend: u16,
    ) -> Result<(Vec<Process>, Target), Failure> {
        let file = |name| self.folder.path().join(name);
        let mut command = process::command(&std::env::current_exe()?, &[MEASURED_CORE])?;
        command
            .args(["null-relay", "--name", HOST, "--backend"])
            .arg(SocketAddr::from((Ipv4Addr::LOCALHOST, backend)).to_string());
        if tls {
            command.arg("--certificate").arg(file("server.crt"));
            command.arg("--key").arg(file("server.key"));
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut process = Process::spawn("null-relay", &mut command)?;
        let line = first_line(&mut process)?;
        let port = line
            .trim()
            .parse()
            .map_err(|error| Failure::during("null-relay", error))?;
        let target = if tls {
            self.with_tls(port)?
        } else {
            self.plain(port)?
        };
        Ok((vec![process], target))
    }

    /// A server on loopback without TLS, which gets the same requests as the peers.
    pub(super) fn plain(&self, port: u16) -> Result<Target, Failure> {
        Target::plain(port, HOST, UNUSED_KEY)
    }

    /// Starts a server; it listens on `port` when this returns.
    fn start(
        &self,
        server: &Server,
        mut command: Command,
        transport: &str,
        port: u16,
        ports: Ports,
    ) -> Result<Process, Failure> {
        // A peer may run several times at once, with different ports.
        let name = format!("{}-{port}", server.name);
        let file = |extension: &str| self.folder.path().join(format!("{name}.{extension}"));
        let config = file("conf");
        let log = file("log");
        fs::write(
            &config,
            self.fill_in(server.template, &name, transport, ports),
        )?;
        if matches!(server.program, Program::Nginx) {
            fs::create_dir_all(file("tmp"))?;
            command
                .arg("-p")
                .arg(self.folder.path())
                .arg("-e")
                .arg(&log)
                .arg("-c");
        }
        command
            .arg(config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log)?);
        let mut process = Process::spawn(server.name, &mut command)?;
        wait_until_listening(&mut process, port).map_err(|failure| {
            let log = fs::read_to_string(&log).unwrap_or_default();
            Failure::during(server.name, format_args!("{failure}\n{log}"))
        })?;
        Ok(process)
    }

    /// The program of a server, without its configuration file, which is the last argument.
    fn command(&self, server: &Server, number: usize, core: usize) -> Result<Command, Failure> {
        let program = match server.program {
            Program::Nginx => Some(&self.nginx),
            Program::Haproxy => self.haproxies.get(number).map(|(_, program)| program),
            Program::Rathole => self.rathole.as_ref().map(|rathole| &rathole.program),
        };
        let missing = || Failure::new(format!("{} is left out of this comparison", server.name));
        let mut command = process::command(program.ok_or_else(missing)?, &[core])?;
        if matches!(server.program, Program::Haproxy) {
            command.args(["-db", "-f"]);
        }
        Ok(command)
    }

    fn fill_in(&self, template: &str, name: &str, transport: &str, ports: Ports) -> String {
        let (private_key, public_key) = self.rathole.as_ref().map_or(("", ""), |rathole| {
            (&rathole.private_key, &rathole.public_key)
        });
        template
            .replace("{dir}", &self.folder.path().display().to_string())
            .replace("{name}", name)
            .replace("{host}", HOST)
            .replace("{answer}", ANSWER)
            .replace("{front_port}", &ports.front.to_string())
            .replace("{middle_port}", &ports.middle.to_string())
            .replace("{backend_port}", &ports.backend.to_string())
            .replace("{h2c_port}", &self.h2c_port.to_string())
            .replace("{backend_buffers}", self.backend_buffers)
            .replace("{transport}", transport)
            .replace("{private_key}", private_key)
            .replace("{public_key}", public_key)
    }
}

#[derive(Debug, Clone, Copy)]
struct Ports {
    front: u16,
    middle: u16,
    backend: u16,
}

/// A server configured from a template.
struct Server {
    name: &'static str,
    template: &'static str,
    program: Program,
}

#[derive(Clone, Copy)]
enum Program {
    Nginx,
    Haproxy,
    Rathole,
}

const BACKEND: Server = Server {
    name: "nginx-backend",
    template: include_str!("../../../templates/nginx-backend.conf"),
    program: Program::Nginx,
};

/// The servers of each peer, in the order of their start.
const NGINX: [Server; 2] = [
    Server {
        name: "nginx-middle",
        template: include_str!("../../../templates/nginx-middle.conf"),
        program: Program::Nginx,
    },
    Server {
        name: "nginx-front",
        template: include_str!("../../../templates/nginx-front.conf"),
        program: Program::Nginx,
    },
];

const HAPROXY: [Server; 2] = [
    Server {
        name: "haproxy-middle",
        template: include_str!("../../../templates/haproxy-middle.cfg"),
        program: Program::Haproxy,
    },
    Server {
        name: "haproxy-front",
        template: include_str!("../../../templates/haproxy-front.cfg"),
        program: Program::Haproxy,
    },
];

const RATHOLE: [Server; 2] = [
    Server {
        name: "rathole-server",
        template: include_str!("../../../templates/rathole-server.toml"),
        program: Program::Rathole,
    },
    Server {
        name: "rathole-client",
        template: include_str!("../../../templates/rathole-client.toml"),
        program: Program::Rathole,
    },
];

fn wait_until_listening(process: &mut Process, port: u16) -> Result<(), Failure> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let otherwise = || format!("does not listen after {LISTEN_WITHIN:?}");
    wait_until(LISTEN_WITHIN, otherwise, || {
        match process.wait(Duration::ZERO)? {
            Some(status) => Err(Failure::new(format!("ended with {status}"))),
            None => Ok(TcpStream::connect_timeout(&address, LISTEN_WITHIN).is_ok()),
        }
    })
}

/// Writes one certificate for both hops of every peer, with the key type of the product's.
fn write_certificate(folder: &Path) -> Result<(), Failure> {
    let failed = |error| Failure::during("cannot make a certificate", error);
    let rcgen::CertifiedKey { cert, signing_key } =
        rcgen::generate_simple_self_signed([HOST.to_owned()]).map_err(failed)?;
    let certificate = cert.pem();
    let key = signing_key.serialize_pem();
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
        let rathole = Rathole {
            program: PathBuf::new(),
            private_key: "private".to_owned(),
            public_key: "public".to_owned(),
        };
        let site = Site {
            folder,
            nginx: PathBuf::new(),
            haproxies: Vec::new(),
            rathole: Some(rathole),
            backend_port: 3,
            h2c_port: 4,
            backend_buffers: "",
        };
        let ports = Ports {
            front: 1,
            middle: 2,
            backend: 3,
        };
        for server in NGINX
            .iter()
            .chain(&HAPROXY)
            .chain(&RATHOLE)
            .chain([&BACKEND])
        {
            let config = site.fill_in(server.template, server.name, "noise", ports);
            for name in [
                "{dir}",
                "{name}",
                "{host}",
                "{answer}",
                "port}",
                "{transport}",
                "key}",
            ] {
                assert!(!config.contains(name), "{}: {name}", server.name);
            }
        }
    }
}
