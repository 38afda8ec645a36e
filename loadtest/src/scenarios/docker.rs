//! A Docker daemon on a Unix socket: its commands that upgrade connections print the same through
//! the gateway as directly.

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::geteuid;
use serde_json::json;
use tempfile::TempDir;

use crate::agents::{Plan, Pool};
use crate::client::Target;
use crate::demo::{Demo, Options};
use crate::failure::{Failure, ensure, wait_until};
use crate::machine::process::{self, Process, output};
use crate::report::say;

const IMAGE: &str = "gw-loadtest";
const APPLETS: [&str; 4] = ["sh", "echo", "sha256sum", "tty"];
const LINE: &str = "hello\n";
const UPLOAD: usize = 1_000_000;
const STARTED_WITHIN: Duration = Duration::from_secs(30);

/// Commands with what they read and their exit codes; CONTAINER is a container that waits for a
/// line.
const COMMANDS: [(&str, &[u8], u8); 6] = [
    ("exec CONTAINER echo printed", b"", 0),
    ("exec CONTAINER sh -c 'echo no >&2; exit 7'", b"", 7),
    (
        "exec -i CONTAINER sh -c 'read line; echo got $line; exit 4'",
        LINE.as_bytes(),
        4,
    ),
    ("exec -i CONTAINER sha256sum", &[b'x'; UPLOAD], 0),
    ("attach CONTAINER", LINE.as_bytes(), 5),
    (
        "run -it --rm --network none gw-loadtest sh -c 'tty; read line; echo got $line; exit 3'",
        LINE.as_bytes(),
        3,
    ),
];

pub(crate) fn run(gateway: &Path) -> Result<(), Failure> {
    ensure(geteuid().is_root(), || {
        "mount namespaces need root".to_owned()
    })?;
    process::find("script", "bsdutils")?;
    let docker = process::find("docker", "docker.io")?;
    let demo = Demo::start(gateway, &Options::default())?;
    let folder = tempfile::Builder::new().prefix("gw-loadtest-").tempdir()?;
    let path = folder.path().to_owned();
    let daemon = start(folder)?;
    let socket = format!("unix:{}", path.join("docker.sock").display());
    let pool = Pool::start(gateway, &demo, vec![Plan::new(socket)])?;
    let ways = Ways {
        docker,
        folder: path,
        target: pool.target.clone(),
    };
    ways.prepare(&demo.ca_file)?;
    make_image(&ways)?;
    compare(&ways)?;
    daemon.stop()?;
    demo.stop()
}

/// Starts a daemon with files and a socket of its own, and without networks.
fn start(folder: TempDir) -> Result<Process, Failure> {
    let path = folder.path().to_owned();
    let log = path.join("dockerd.log");
    let socket = path.join("docker.sock");
    let option = |name: &str, value: &Path| format!("--{name}={}", value.display());
    let mut command = process::command(&process::find("dockerd", "docker.io")?, &[])?;
    command
        .arg(option("data-root", &path.join("data")))
        .arg(option("exec-root", &path.join("exec")))
        .arg(option("pidfile", &path.join("pid")))
        .arg(format!("--host=unix://{}", socket.display()))
        .args(["--bridge=none", "--iptables=false", "--ip6tables=false"])
        .arg("--storage-driver=vfs");
    command.stdin(Stdio::null()).stderr(fs::File::create(&log)?);
    let mut process = Process::spawn("dockerd", &mut command)?.with_folder(folder);
    let mut has_ended = false;
    let silent = || "it does not accept connections".to_owned();
    let started = wait_until(STARTED_WITHIN, silent, || {
        has_ended = process.wait(Duration::ZERO)?.is_some();
        Ok(has_ended || UnixStream::connect(&socket).is_ok())
    });
    if has_ended || started.is_err() {
        let log = fs::read_to_string(&log)?;
        let last = log.lines().last().unwrap_or_default();
        return Err(Failure::during("dockerd cannot run here", last));
    }
    Ok(process)
}

/// Runs each command directly and through the gateway.
fn compare(ways: &Ways) -> Result<(), Failure> {
    let mut different = Vec::new();
    for (arguments, input, code) in COMMANDS {
        let direct = ways.said(false, input, arguments)?;
        ensure(direct.ends_with(&format!("exit status: {code}")), || {
            format!("without the gateway, docker {arguments} ends with {direct:?}")
        })?;
        let relayed = ways.said(true, input, arguments)?;
        if direct != relayed {
            different.push(format!("{arguments}: {relayed:?} in place of {direct:?}"));
        }
    }
    say(format_args!(
        "docker: {} of {} commands of exec, exec -i (1 MB), attach and run -it print the same and \
         end with the same code as directly",
        COMMANDS.len() - different.len(),
        COMMANDS.len()
    ));
    ensure(different.is_empty(), || different.join("; "))
}

/// An image of a static busybox.
fn make_image(ways: &Ways) -> Result<(), Failure> {
    let root = ways.folder.join("root");
    let busybox = process::find("busybox", "busybox-static")?;
    fs::create_dir_all(root.join("bin"))?;
    fs::copy(busybox, root.join("bin/busybox"))?;
    for applet in APPLETS {
        symlink("busybox", root.join("bin").join(applet))?;
    }
    let archive = ways.folder.join("root.tar");
    output(
        Command::new("tar")
            .arg("-C")
            .arg(&root)
            .arg("-cf")
            .arg(&archive)
            .arg("."),
    )?;
    let mut import = ways.command(false, &ways.docker)?;
    output(import.arg("import").arg(&archive).arg(IMAGE)).map(drop)
}

/// The client, directly and through the gateway.
struct Ways {
    docker: PathBuf,
    folder: PathBuf,
    target: Target,
}

impl Ways {
    /// Writes the files with which the client reaches the gateway: the name, the authority and the
    /// key.
    fn prepare(&self, ca_file: &Path) -> Result<(), Failure> {
        let Target {
            host, service_key, ..
        } = &self.target;
        let hosts = fs::read_to_string("/etc/hosts").unwrap_or_default();
        let path = |name: &str| self.folder.join(name);
        fs::write(path("hosts"), format!("{hosts}\n127.0.0.1 {host}\n"))?;
        fs::create_dir(path("client"))?;
        fs::copy(ca_file, path("client/ca.pem"))?;
        let configuration = json!({ "HttpHeaders": { "X-Gw-Service-Key": service_key } });
        Ok(fs::write(
            path("client/config.json"),
            configuration.to_string(),
        )?)
    }

    /// Command of a program that starts the client.
    fn command(&self, relayed: bool, program: &Path) -> Result<Command, Failure> {
        let mut command = Command::new("timeout");
        command.arg("60").arg(program);
        if !relayed {
            let socket = self.folder.join("docker.sock");
            command
                .env("DOCKER_HOST", format!("unix://{}", socket.display()))
                .env("DOCKER_CONFIG", self.folder.join("data"))
                .env_remove("DOCKER_TLS_VERIFY");
            return Ok(command);
        }
        let Target { host, port, .. } = &self.target;
        command
            .env("DOCKER_HOST", format!("tcp://{host}:{port}"))
            .env("DOCKER_TLS_VERIFY", "1")
            .env("DOCKER_CERT_PATH", self.folder.join("client"))
            .env("DOCKER_CONFIG", self.folder.join("client"));
        process::with_file(&command, &self.folder.join("hosts"), "/etc/hosts")
    }

    /// What a command prints, and its exit code, with a new container.
    fn said(&self, relayed: bool, input: &[u8], arguments: &str) -> Result<String, Failure> {
        let mut run = self.command(false, &self.docker)?;
        run.args([
            "run",
            "--detach",
            "--interactive",
            "--network",
            "none",
            IMAGE,
        ]);
        let container = output(run.args(["sh", "-c", "read line; echo got $line; exit 5"]))?;
        let container = String::from_utf8_lossy(&container).trim().to_owned();
        let line = arguments.replace("CONTAINER", &container);
        let line = format!("{} {line}", self.docker.display());
        let mut command = if arguments.starts_with("run -it") {
            // With a terminal.
            let mut command = self.command(relayed, Path::new("script"))?;
            command.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
            command
        } else {
            let mut command = self.command(relayed, Path::new("sh"))?;
            command.args(["-c", &line]);
            command
        };
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let mut stdin = child.stdin.take();
        if let Some(stdin) = &mut stdin {
            stdin.write_all(input)?;
        }
        // The daemon ends the output of `attach` when the input ends.
        let held = stdin.filter(|_| !arguments.starts_with("exec"));
        let said = child.wait_with_output()?;
        drop(held);
        let text = [said.stdout, said.stderr].concat();
        // Terminals also show what they read, once or twice.
        let text = String::from_utf8_lossy(&text).into_owned();
        let lines = text.lines().filter(|line| *line != LINE.trim());
        let text = lines.collect::<Vec<_>>().join("\n");
        let mut remove = self.command(false, &self.docker)?;
        output(remove.args(["rm", "--force", &container]))?;
        Ok(format!("{text} {}", said.status))
    }
}
