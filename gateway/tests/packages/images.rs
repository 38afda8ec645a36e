//! Container images, run by runc: as another user than root, with a root that cannot be written.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::{build, run, usable};

/// An image unpacked for runc.
struct Bundle {
    folder: PathBuf,
    /// The name of the container, of which there is one on the machine.
    name: String,
}

impl Bundle {
    /// Unpacks the image; the container's folder of data is writable, and nothing else is.
    fn unpack(archive: &Path, folder: PathBuf, data: &str) -> Self {
        let layout = folder.with_extension("layout");
        let from = format!("oci-archive:{}", archive.display());
        run(Command::new("skopeo").args(["copy", "--quiet", &from]).arg(format!("oci:{}:it", layout.display())));
        run(Command::new("umoci").arg("unpack").arg("--image").arg(format!("{}:it", layout.display())).arg(&folder));
        let bundle = Self { name: format!("gw-test-{}-{data}", std::process::id()), folder };
        let mut config = bundle.config();
        assert_eq!(config["process"]["user"], json!({ "uid": 65532, "gid": 65532 }));
        config["root"]["readonly"] = json!(true);
        config["process"]["terminal"] = json!(false);
        config["process"]["capabilities"] = json!({});
        config["process"]["noNewPrivileges"] = json!(true);
        let options = ["uid=65532", "gid=65532", "mode=0700"];
        let volume = format!("/var/lib/{data}");
        config["mounts"]
            .as_array_mut()
            .unwrap()
            .push(json!({ "destination": volume, "type": "tmpfs", "source": "tmpfs", "options": options }));
        bundle.write(&config);
        bundle
    }

    fn config(&self) -> Value {
        serde_json::from_slice(&fs::read(self.folder.join("config.json")).unwrap()).unwrap()
    }

    fn write(&self, config: &Value) {
        fs::write(self.folder.join("config.json"), config.to_string()).unwrap();
    }

    /// Sets the arguments of the image's program, and adds to its environment.
    fn set(&self, arguments: Option<&[&str]>, environment: &[&str]) {
        let mut config = self.config();
        if let Some(arguments) = arguments {
            let program = config["process"]["args"][0].clone();
            config["process"]["args"] = [program].into_iter().chain(arguments.iter().map(|it| json!(it))).collect();
        }
        config["process"]["env"].as_array_mut().unwrap().extend(environment.iter().map(|it| json!(it)));
        self.write(&config);
    }

    fn runc(&self) -> Command {
        let mut command = Command::new("runc");
        command.arg("--root").arg(self.folder.with_extension("state"));
        command
    }

    fn command(&self) -> Command {
        let mut command = Command::new("timeout");
        command.args(["60", "runc", "--root"]).arg(self.folder.with_extension("state"));
        command.arg("run").arg("--bundle").arg(&self.folder).arg(&self.name).stdin(Stdio::null());
        command
    }
}

impl Drop for Bundle {
    fn drop(&mut self) {
        // It is gone already unless the test has failed.
        let _ = self.runc().args(["delete", "--force", &self.name]).output();
    }
}

#[test]
fn images_run_without_root_and_without_a_writable_root() {
    if !usable(&["python3", "runc", "skopeo", "umoci"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let images = build("oci", folder.path(), ".oci.tar");
    let [gateway, agent] = &images[..] else { panic!("{images:?}") };

    let bundle = Bundle::unpack(agent, folder.path().join("agent"), "gw-agent");
    bundle.set(Some(&["--version"]), &[]);
    let version = run(&mut bundle.command());
    assert_eq!(version, format!("gw-agent {}\n", env!("CARGO_PKG_VERSION")));

    // The image's own command, with the variables that it needs.
    let bundle = Bundle::unpack(gateway, folder.path().join("gateway"), "gw-gateway");
    bundle.set(None, &["GW_REGION=eu1", "GW_DOMAIN=gw.localhost"]);
    let mut process = bundle.command().stderr(Stdio::null()).spawn().unwrap();
    let mut administer = bundle.runc();
    administer.args(["exec", "--env", "GW_ADMIN_TOKEN_FILE=/var/lib/gw-gateway/admin.token"]);
    administer.args([&*bundle.name, "/usr/bin/gw-gateway", "account", "create", "acme", "--json"]);
    let deadline = Instant::now() + Duration::from_secs(30);
    let answer = loop {
        let output = administer.output().unwrap();
        if output.status.success() {
            break String::from_utf8(output.stdout).unwrap();
        }
        assert!(Instant::now() < deadline, "{output:?}");
        std::thread::sleep(Duration::from_millis(50));
    };
    assert!(answer.contains("acme"), "{answer}");
    run(bundle.runc().args(["kill", &bundle.name, "TERM"]));
    assert!(process.wait().unwrap().success(), "SIGTERM drains and ends the gateway with exit code 0");
}
