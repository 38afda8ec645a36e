//! Container images, run by runc: as another user than root, with a root that cannot be written.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::{FOLDER, build, run, usable};

/// The network of a machine on which all ports are free. Its first process is the backend.
struct Machine(Child);

impl Machine {
    /// With a backend that listens on `port` and answers with `body`.
    fn start(port: u16, body: &str) -> Self {
        let mut command = Command::new("unshare");
        command
            .args(["--net", "python3"])
            .arg(Path::new(FOLDER).join("backend.py"))
            .arg(port.to_string())
            .arg(body);
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut machine = Self(child);
        // It is in its namespace then, and loopback is up.
        assert_eq!(first_line(&mut machine.0, |_| true), "listening");
        machine
    }

    /// A command on this network.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net=/proc/{}/ns/net", self.0.id()))
            .arg(program)
            .stdin(Stdio::null());
        command
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The first line of the program's standard output of which `is_it` is true.
fn first_line(child: &mut Child, is_it: impl Fn(&str) -> bool) -> String {
    let mut lines = BufReader::new(child.stdout.take().unwrap())
        .lines()
        .map(Result::unwrap);
    lines
        .find(|line| is_it(line))
        .expect("the program has ended without that line")
}

/// An image unpacked for runc, on a machine.
struct Bundle<'m> {
    machine: &'m Machine,
    folder: PathBuf,
    /// The name of the container, of which there is one on the machine.
    name: String,
}

impl<'m> Bundle<'m> {
    /// Unpacks the image; the container's folder of data is writable, and nothing else is. Its
    /// network is the machine's.
    fn unpack(machine: &'m Machine, archive: &Path, folder: PathBuf, data: &str) -> Self {
        let layout = folder.with_extension("layout");
        let from = format!("oci-archive:{}", archive.display());
        run(Command::new("skopeo")
            .args(["copy", "--quiet", &from])
            .arg(format!("oci:{}:it", layout.display())));
        run(Command::new("umoci")
            .arg("unpack")
            .arg("--image")
            .arg(format!("{}:it", layout.display()))
            .arg(&folder));
        let bundle = Self {
            machine,
            name: format!("gw-test-{}-{data}", std::process::id()),
            folder,
        };
        let mut config = bundle.config();
        assert_eq!(
            config["process"]["user"],
            json!({ "uid": 65532, "gid": 65532 })
        );
        config["root"]["readonly"] = json!(true);
        config["process"]["terminal"] = json!(false);
        config["process"]["capabilities"] = json!({});
        config["process"]["noNewPrivileges"] = json!(true);
        config["linux"]["namespaces"]
            .as_array_mut()
            .unwrap()
            .retain(|namespace| namespace["type"] != "network");
        let options = ["uid=65532", "gid=65532", "mode=0700"];
        let volume = format!("/var/lib/{data}");
        bundle.write(&config);
        bundle.mount(json!({
            "destination": volume,
            "type": "tmpfs",
            "source": "tmpfs",
            "options": options,
        }));
        bundle
    }

    fn config(&self) -> Value {
        serde_json::from_slice(&fs::read(self.folder.join("config.json")).unwrap()).unwrap()
    }

    fn write(&self, config: &Value) {
        fs::write(self.folder.join("config.json"), config.to_string()).unwrap();
    }

    fn mount(&self, mount: Value) {
        let mut config = self.config();
        config["mounts"].as_array_mut().unwrap().push(mount);
        self.write(&config);
    }

    /// Sets the arguments of the image's program.
    fn set_arguments(&self, arguments: &[&str]) {
        let mut config = self.config();
        let program = config["process"]["args"][0].clone();
        config["process"]["args"] = [program]
            .into_iter()
            .chain(arguments.iter().map(|it| json!(it)))
            .collect();
        self.write(&config);
    }

    fn add_to_environment(&self, variables: &[&str]) {
        let mut config = self.config();
        config["process"]["env"]
            .as_array_mut()
            .unwrap()
            .extend(variables.iter().map(|it| json!(it)));
        self.write(&config);
    }

    fn runc(&self) -> Command {
        let mut command = self.machine.command("runc");
        command
            .arg("--root")
            .arg(self.folder.with_extension("state"));
        command
    }

    /// Runs the container, for a minute at most.
    fn command(&self) -> Command {
        let mut command = self.machine.command("timeout");
        command
            .args(["60", "runc", "--root"])
            .arg(self.folder.with_extension("state"));
        command
            .arg("run")
            .arg("--bundle")
            .arg(&self.folder)
            .arg(&self.name);
        command
    }

    /// Repeats a command in the container until it succeeds, for half a minute at most; its output.
    fn exec(&self, arguments: &[&str]) -> String {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let output = self
                .runc()
                .args(["exec", &self.name])
                .args(arguments)
                .output()
                .unwrap();
            if output.status.success() {
                return String::from_utf8(output.stdout).unwrap();
            }
            assert!(Instant::now() < deadline, "{output:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Asserts that SIGTERM ends the container with exit code 0.
    fn stop(&self, process: &mut Child) {
        run(self.runc().args(["kill", &self.name, "TERM"]));
        assert!(
            process.wait().unwrap().success(),
            "SIGTERM drains and ends {} with exit code 0",
            self.name
        );
    }
}

impl Drop for Bundle<'_> {
    fn drop(&mut self) {
        // It is gone already unless the test has failed.
        let _ = self.runc().args(["delete", "--force", &self.name]).output();
    }
}

#[test]
fn images_relay_a_request_without_root_and_without_a_writable_root() {
    if !usable(&["curl", "python3", "runc", "skopeo", "umoci", "unshare"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let images = build("oci", folder.path(), ".oci.tar");
    let [gateway, agent] = &images[..] else {
        panic!("{images:?}")
    };
    let machine = Machine::start(8000, "the backend's answer");
    let unpack =
        |image: &Path, data: &str| Bundle::unpack(&machine, image, folder.path().join(data), data);

    let agent = unpack(agent, "gw-agent");
    agent.set_arguments(&["--version"]);
    assert_eq!(
        run(&mut agent.command()),
        format!("gw-agent {}\n", env!("CARGO_PKG_VERSION"))
    );

    // The commands of docs/packages.md. First the image's own command, with the variables that it
    // needs.
    let gateway = unpack(gateway, "gw-gateway");
    gateway.add_to_environment(&["GW_REGION=eu1", "GW_DOMAIN=gw.localhost"]);
    let mut serving = gateway.command().stderr(Stdio::null()).spawn().unwrap();

    let create = "gw-gateway service create acme api --create-account --with-key --with-agent \
                  --backend-port 8000 --json";
    let created: Value =
        serde_json::from_str(&gateway.exec(&create.split(' ').collect::<Vec<_>>())).unwrap();
    let command = |name: &str| created[name].as_str().unwrap().to_owned();

    // As printed: the file of the authority is written where the command is run, and mounted for
    // the agent.
    let agent_command = command("agent_command");
    let (write_authority, arguments) = agent_command.split_once("gw-agent ").unwrap();
    let shell = |script: &str| {
        let mut sh = machine.command("sh");
        run(sh.arg("-c").arg(script).current_dir(&folder))
    };
    shell(write_authority);
    let authority = folder.path().join("gw-ca.crt");
    agent.mount(json!({
        "destination": "/gw-ca.crt",
        "type": "bind",
        "source": authority,
        "options": ["bind", "ro"],
    }));
    let arguments = arguments.split(" --token-file ").next().unwrap();
    agent.set_arguments(&arguments.split_whitespace().collect::<Vec<_>>());
    let token = format!("GW_ENROLLMENT_TOKEN={}", command("enrollment_token"));
    agent.add_to_environment(&[&token]);
    let mut relaying = agent
        .command()
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let relayed = first_line(&mut relaying, |line| line.contains(" -> "));
    assert_eq!(
        relayed,
        "https://acme--api.eu1.gw.localhost:8443 -> http://localhost:8000"
    );

    let answer = shell(&command("curl_command"));
    assert_eq!(answer, "the backend's answer");

    agent.stop(&mut relaying);
    gateway.stop(&mut serving);
}
